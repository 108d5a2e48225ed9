"""All upstreams of a gateway: one for each replica that was sent to, until it is gone and nothing runs there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator

from gateway.config import Upstream as UpstreamConfig
from gateway.core.model import ReplicaId
from gateway.proxy.upstream import Connection, Upstream

SWEEP_SECONDS = 0.25
"""Period of the deadline sweep over upstream connections: deadlines are exact to this."""


class Upstreams:
    """Made as they are asked for."""

    def __init__(self, config: UpstreamConfig, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None) -> None:
        self._config = config
        self._loop = loop
        self._tls = tls
        self._known: dict[ReplicaId, Upstream] = {}

    def of(self, replica: ReplicaId) -> Upstream:
        found = self._known.get(replica)
        if found is None:
            found = self._known[replica] = Upstream(replica, self._config, self._loop, self._tls)
        found.retired = False
        return found

    async def connect(self, upstream: Upstream) -> Connection:
        """A new connection, made by a task of its own: time-outs need one."""
        task = self._loop.create_task(upstream.connect())
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:  # made just before the client left
                upstream.give_back(task.result())
            raise

    def retire(self, replica: ReplicaId) -> None:
        """The replica was removed: what runs may finish, nothing is kept."""
        if (upstream := self._known.get(replica)) is not None:
            upstream.retired = True
            upstream.close()

    async def sweep(self) -> None:
        """Runs as long as the gateway: enforces upstream deadlines and forgets replicas that are gone."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._loop.time()
            for replica, upstream in list(self._known.items()):
                upstream.sweep(now)
                if upstream.retired and not upstream.busy:
                    del self._known[replica]

    def close(self) -> None:
        for upstream in self._known.values():
            upstream.close()

    def connections(self) -> Iterator[tuple[ReplicaId, int, int]]:
        """To each replica: how many carry a request, and how many are kept for the next."""
        for replica, upstream in self._known.items():
            yield replica, len(upstream.busy), len(upstream.idle)
