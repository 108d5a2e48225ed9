"""One bounded question to a replica: total time and size limited; no redirects, proxies, decompression or kept
connection.

A kept connection would go on answering for a server that its name no longer points to, so every question opens its own.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx

from gateway.descriptors import OURS


class FetchFailed(Exception):
    """The page could not be had. The message is one short line for people."""


class Hindered(FetchFailed):
    """Nobody was asked: this machine had no descriptor, memory or port left. No word about the replica."""


def new_client(
    tls: ssl.SSLContext | None = None, tls_server_name: str | None = None, key: str | None = None
) -> httpx.AsyncClient:
    """The client that all feeds share. Time is bounded by `fetch` as a whole, not step by step. `tls`: how `https://`
    replicas are verified; `tls_server_name`: the name in their certificates, if it is not that of the URL; `key`: what
    replicas ask for."""

    async def name_server(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = tls_server_name

    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        timeout=None,
        trust_env=False,
        follow_redirects=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"Accept-Encoding": "identity", "User-Agent": "warmlane", **authorization},
        verify=tls or True,
        event_hooks={"request": [name_server]} if tls_server_name is not None else {},
    )


class Handshake:
    """Closes a connection whose TLS handshake was cancelled: httpcore (1.0.9) closes one only when the handshake itself
    fails, so a server that accepts and says nothing would keep a socket of ours for each question, until the garbage
    collector comes."""

    def __init__(self) -> None:
        self._stream: Any = None

    async def note(self, event: str, info: dict[str, Any]) -> None:
        """httpcore's `trace` extension."""
        if event == "connection.connect_tcp.complete":
            self._stream = info["return_value"]
        elif event == "connection.start_tls.complete":
            self._stream = None

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


async def fetch(
    client: httpx.AsyncClient, url: str, *, timeout_seconds: float, max_bytes: int, posting: bytes | None = None
) -> bytes:
    """Body of a 200 answer to a GET, or to a POST of JSON. Raises `FetchFailed` for everything else: too late, too big,
    another status, no server."""
    body = bytearray()
    method, headers = ("GET", None) if posting is None else ("POST", {"Content-Type": "application/json"})
    handshake = Handshake() if url.startswith("https:") else None
    extensions = None if handshake is None else {"trace": handshake.note}
    question = client.stream(method, url, content=posting, headers=headers, extensions=extensions)
    try:
        async with asyncio.timeout(timeout_seconds), question as response:
            if response.status_code != 200:
                raise FetchFailed(f"HTTP {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise FetchFailed("compressed although not asked for")
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise FetchFailed(f"more than {max_bytes} bytes")
    except TimeoutError:
        raise FetchFailed(f"no whole answer in {timeout_seconds:g} s") from None
    except httpx.HTTPError as error:
        if is_ours(error):
            raise Hindered("this machine has no socket left") from error
        raise FetchFailed(str(error).partition("\n")[0] or type(error).__name__) from error
    finally:
        if handshake is not None:
            await handshake.close()
    return bytes(body)


def is_ours(error: BaseException | None) -> bool:
    """Whether a lack of our own is at its root: what opens sockets wraps it, several of more addresses."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in OURS:
            return True
        if isinstance(error, BaseExceptionGroup) and any(is_ours(one) for one in error.exceptions):
            return True
        error = error.__cause__ or error.__context__
    return False
