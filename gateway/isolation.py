"""Tenants that must not learn from each other's cache hits: each gets a prefix cache of its own, by `cache_salt`.

A first token that comes early tells that somebody has sent the same beginning before. vLLM mixes `cache_salt` into the
hash of the first block, so equal prompts of different tenants share nothing. The salt goes into the body, from where
the routing key takes it as well. It is a keyed hash of the tenant and of the client's own salt: nobody can write the
salt of another tenant. Only this changes a body: its values stay as they came, byte for byte, the space between them
does not.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec
from msgspec import Raw

from gateway.prompt import NotJson, reason
from gateway.skeleton import skeleton

decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
NULL = b"null"


MAX_NAMES = 262_144
"""Of objects in a body, inner ones included: at 230 bytes for each that stands outermost, 60 MB at most. As many as
65,536 messages have."""
NAME_BYTES = 5
"""`"":1,` is the shortest member."""


class CannotSalt(Exception):
    """The body is compressed, so it cannot get its salt."""


class TooManyNames(CannotSalt):
    def __init__(self) -> None:
        super().__init__("Tenants are isolated here, and the request body has more names than are read for that.")


class Isolation:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salted(self, body: bytes, tenant: str) -> bytes:
        """The body with its salt. JSON that is no object comes back as it is: it will be refused for that. Raises
        `NotJson`, also for what would do for routing (which reads no names that it does not know): a replica that is
        less strict must not get it without a salt. Raises `TooManyNames`."""
        bound_names(body)
        try:
            fields = decode_object(body)
        except msgspec.ValidationError:
            return body
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise NotJson(reason(error)) from error
        own = bytes(fields.get("cache_salt", b""))
        fields["cache_salt"] = Raw(b'"%b"' % self.salt(tenant, b"" if own == NULL else own).encode())
        return msgspec.json.encode(fields)

    def salt(self, tenant: str, own: bytes) -> str:
        """`own`: the JSON source of the client's salt, empty when there is none."""
        return hmac.new(self._secret, tenant.encode() + b"\0" + own, hashlib.sha256).hexdigest()


def bound_names(body: bytes) -> None:
    """Raises `TooManyNames`. What texts hold does not count; texts themselves do, with their names."""
    if len(body) > NAME_BYTES * MAX_NAMES and body.count(b":") > MAX_NAMES:
        found = skeleton(body, 2 * MAX_NAMES)
        if found is None or found.count(b":") > MAX_NAMES:
            raise TooManyNames
