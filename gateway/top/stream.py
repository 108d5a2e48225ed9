"""The stream of frames: it comes back when the gateway does, and says what it waits for until then.

The first connection must succeed: what is wrong with an address or a key does not heal by waiting.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import httpx

from gateway.dry_run import Unanswered, message_of
from gateway.top.frames import Frame, NotAFrame, frame_in

SILENCE_SECONDS = 6.0
"""A frame comes each second: after this the line is dead, whatever the socket says."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 4.0
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A whole picture of 64 replicas has some 200 KB."""
MAX_REFUSAL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no connection; another try follows."""

    why: str


async def frames(url: str, key: str | None) -> AsyncGenerator[Frame | Lost]:
    """Without end. Raises `Unanswered` where the first connection brings no frame."""
    wait, had_one = FIRST_WAIT_SECONDS, False
    async with httpx.AsyncClient(
        trust_env=False,
        timeout=SILENCE_SECONDS,
        verify=ssl.create_default_context(),
        headers={} if key is None else {"authorization": f"Bearer {key}"},
    ) as client:
        while True:
            try:
                async for frame in connection(client, url):
                    wait, had_one = FIRST_WAIT_SECONDS, True
                    yield frame
                if not had_one:
                    raise Unanswered(f"{url}: the gateway closed it at once: it is about to stop")
                why = "the gateway closed it"
            except Unanswered as error:
                if not had_one:
                    raise
                why = str(error)
            yield Lost(why)
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


async def connection(client: httpx.AsyncClient, url: str) -> AsyncIterator[Frame]:
    """Frames of one connection, until it ends. Raises `Unanswered`."""
    address = f"{url.rstrip('/')}/warmlane/live"
    try:
        async with client.stream("GET", address, headers={"accept-encoding": "identity"}) as answer:
            if answer.status_code != 200:
                raise await refused(address, answer)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise Unanswered(f"{address}: this is not a Warmlane gateway")
            async for event in events(answer):
                yield frame_in(event)
    except NotAFrame as error:
        raise Unanswered(f"{address}: not what a Warmlane gateway of this version says: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unanswered(f"{address}: {cause_of(error)}") from error


async def events(answer: httpx.Response) -> AsyncIterator[bytes]:
    held = b""
    async for piece in answer.aiter_raw():
        *whole, held = (held + piece).split(b"\n\n")
        if len(held) > MAX_FRAME_BYTES:
            raise NotAFrame("it has no end")
        for event in whole:
            yield event


def cause_of(error: Exception) -> str:
    """What the system said, where the HTTP client says only that it has tried all addresses."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            return str(link)
        link = link.__cause__ or link.__context__
    return str(error) or type(error).__name__


async def refused(address: str, answer: httpx.Response) -> Unanswered:
    body = b""
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > MAX_REFUSAL_BYTES:
            break
    hint = " (is its live page switched off?)" if answer.status_code == 404 else ""
    return Unanswered(f"{address}: HTTP {answer.status_code}: {message_of(body)}{hint}", answer.status_code)
