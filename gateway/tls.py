"""TLS on both sides: the certificate that the gateway shows to clients, and whom it believes to be a replica.

A certificate is renewed by replacing its files. They are looked at every few seconds; what has changed is loaded in the
context in use, so that new connections get it and open ones stay. A pair that does not fit together (one of two files
has been written) changes nothing until it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.config import ConfigError

log = logging.getLogger(__name__)

LABEL = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")
CERTIFICATE, PRIVATE_KEY = b"CERTIFICATE", b"PRIVATE KEY"
"""Ends of the labels that PEM files have: some say more (`EC PRIVATE KEY`)."""
LOOK_SECONDS = 5.0
"""Between two looks at the files: renewals are announced days ahead."""


class TlsError(ConfigError):
    """Certificate, key or authorities cannot be used; one line that names the key of the configuration."""


class Certificate:
    """The gateway's own. Raises `TlsError` when it cannot be read at the start."""

    def __init__(self, certificate: str, key: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._seen = self._state()
        self.context = self._loaded()

    def for_server(self, _config: object, _default: object) -> ssl.SSLContext:
        """As uvicorn asks for it."""
        return self.context

    async def follow(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Runs beside the requests."""
        while True:
            await sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Load the files again if they have changed."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._loaded()  # into a context of its own: half a pair would spoil the one in use
            self.context.load_cert_chain(self._certificate, self._key)
        except (OSError, TlsError) as error:
            log.warning("the old TLS certificate stays: %s", error)
        else:
            log.info("TLS certificate loaded again from %s", self._certificate)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, password=refuse_password)
        except OSError as error:  # also what is no certificate, or another's key
            raise TlsError(pair_problem(self._certificate, self._key, error)) from error
        return context

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(file_state(path) for path in (self._certificate, self._key) if path is not None)


def replica_context(ca_file: str | None) -> ssl.SSLContext:
    """How `https://` replicas are verified. Raises `TlsError`."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        undecoded = isinstance(error, ssl.SSLError) and not error.reason
        reason = "its certificates cannot be decoded" if undecoded else reason_of(error)
        raise TlsError(f"upstream.ca_file {ca_file}: {reason}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def pair_problem(certificate: str, key: str | None, refusal: OSError) -> str:
    """Which of the two files OpenSSL has refused, and why: it says only that one of them is wrong."""
    shown = f"server.tls_certificate {certificate}"
    secret = shown if key is None else f"server.tls_key {key}"
    for called, path, wanted in ((shown, certificate, CERTIFICATE), (secret, key or certificate, PRIVATE_KEY)):
        try:
            labels = LABEL.findall(Path(path).read_bytes())
        except OSError as error:
            return f"{called}: {error.strerror}"
        if not labels:
            return f"{called}: is not PEM"
        if not any(label.endswith(wanted) for label in labels):
            remedy = "; server.tls_key names its file" if called == shown and wanted is PRIVATE_KEY else ""
            return f"{called}: holds no {wanted.decode().lower()}{remedy}"
    if isinstance(refusal, ssl.SSLError) and refusal.reason == "KEY_VALUES_MISMATCH":
        return f"{secret}: its key does not match the certificate, {certificate}"
    try:
        ssl.create_default_context(cafile=certificate)
    except OSError:
        return f"{shown}: its certificate cannot be decoded"
    known = isinstance(refusal, ssl.SSLError) and refusal.reason
    return f"{secret}: {reason_of(refusal) if known else 'its key cannot be decoded'}"


def refuse_password() -> str:
    """Without this OpenSSL would ask on the terminal, and wait."""
    raise TlsError("the TLS key is encrypted; a server needs one without a passphrase")


def file_state(path: str) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; `None` where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def reason_of(error: OSError) -> str:
    """Short, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not usable").replace("_", " ").lower()
    return error.strerror or str(error)
