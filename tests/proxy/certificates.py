"""Certificates for a test, made with the `openssl` command: an authority, and what it signs."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
EXTENSIONS = "basicConstraints=critical,CA:FALSE\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.file, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        uses = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        subject = ("-subj", f"/CN={name}", "-days", "2")
        openssl("req", "-x509", *NEW_KEY, "-keyout", self._key, "-out", self.file, *subject, *uses)

    def issue(self, name: str, *alternatives: str) -> Pair:
        """`alternatives`: names as in `DNS:localhost`, `IP:127.0.0.1`."""
        stem = self._folder / f"{self._name}-{name}"
        request, extensions = stem.with_suffix(".csr"), stem.with_suffix(".ext")
        pair = Pair(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        openssl("req", *NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text(f"{EXTENSIONS}subjectAltName={','.join(alternatives)}\n")
        signed = ("-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions, "-days", "2")
        openssl("x509", "-req", "-in", request, "-out", pair.certificate, *signed)
        return pair

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.file))
