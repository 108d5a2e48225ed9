"""Whether a replica that came up is still alive, beyond that its process runs.

An engine core that dies takes its API server along, as a rule within seconds. Where it does not (a variable tells vLLM
so, or the server hangs), the server says it on `/health`, or says nothing at all. The engine's own word is enough;
silence has to last, for a server that is very busy may be late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

LOOK_SECONDS = 2.0
TIMEOUT_SECONDS = 5.0
BAD_ANSWERS = 3
"""In a row. vLLM answers 503 for a dead engine only; a proxy in between might once for something else."""


class Vitals:
    def __init__(
        self,
        url: str,
        *,
        silent_seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = url
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._sleep = sleep

    async def wait_lost(self) -> str:
        """Returns when the replica is past hope: why."""
        heard_at, bad = self._clock(), 0
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=TIMEOUT_SECONDS) as client:
            while True:
                await self._sleep(LOOK_SECONDS)
                try:
                    status = (await client.get(f"{self._url}/health")).status_code
                except httpx.HTTPError as error:
                    silent = self._clock() - heard_at
                    if silent >= self._silent_seconds:
                        return f"has not answered on /health for {silent:.0f} s ({type(error).__name__})"
                    continue
                heard_at = self._clock()
                bad = 0 if status == httpx.codes.OK else bad + 1
                if bad >= BAD_ANSWERS:
                    return f"answers HTTP {status} on /health: its engine is dead"
