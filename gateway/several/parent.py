"""The parent: starts the workers, starts again who ends, and ends all of them.

It listens, knows no replica and serves no request. What a worker loses with its end are its own connections. Without
the parent no worker stays: each ends when the parent does, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvloop

import gateway
from gateway.config import Config
from gateway.listeners import base_url, listen_all
from gateway.several.doorman import ADMIN, CLIENT, END, Doorman, Taker
from gateway.several.hub import Hub, Seat
from gateway.several.messages import Address, Begin, Channel, FromWorker, Stop
from gateway.several.output import Funnel, Said, pass_on
from gateway.several.totals import Page, rows_of_parent
from gateway.stderr_log import report_unforeseen
from gateway.stop_signals import StopSignals
from gateway.views import is_loopback
from workers.back_off import BackOff, BackOffSettings

log = logging.getLogger(__name__)

HUNG_SECONDS = 2.0
"""A worker says that it lives four times a second. Silent for so long it is handed no connections ..."""
SILENT_SECONDS = 30.0
"""... and after this it is ended: nothing that a gateway does takes a tenth of it."""
START_SECONDS = 120.0
"""The same before it serves: on a machine that is busy starting everything, imports alone may take a while."""
LOOK_SECONDS = 1.0
WRONG_USAGE = 2
"""Exit code of the command for a configuration that cannot be used."""
BACK_OFF = BackOffSettings(first_seconds=0.5, longest_seconds=30.0, calm_seconds=60.0)
LAST_SECONDS = 5.0
"""Beyond the grace that workers keep themselves, and for all after a second signal; then they are killed."""
SAY_SECONDS = 0.1
WORDS_SECONDS = 1.0
"""For the last words of a worker that has ended, which lie in its channel and its pipes."""
START = "import sys; sys.path.insert(0, sys.argv[1]); from gateway.several.worker import main; main(*sys.argv[2:])"
ROOT = Path(gateway.__file__).parents[1]
"""Workers run the same source, wherever they are started."""


class Worker:
    """One place among the workers, whoever fills it now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seat = Seat(number)
        self.process: Process | None = None
        self.starts = 0
        self.began_at = 0.0
        self.handed = 0
        self._handing: socket.socket | None = None

    def begin(self, process: Process, handing: socket.socket) -> Seat:
        self.seat = Seat(self.number)
        self.process = process
        self.starts += 1
        self.began_at = time.monotonic()
        self.handed = 0
        self._handing = handing
        return self.seat

    def end(self) -> None:
        self.process = None
        if self._handing is not None:
            self._handing.close()
            self._handing = None

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    # ---- its connections ---------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """As it says, and those on their way to it."""
        return self.seat.connections + max(0, self.handed - self.seat.received)

    def is_open(self, now: float) -> bool:
        seat = self.seat
        is_there = self._handing is not None and seat.is_ready and not seat.is_leaving
        return is_there and now - seat.alive_at < HUNG_SECONDS

    def take(self, kind: bytes, connection: socket.socket) -> bool:
        if self._handing is None:
            return False
        try:
            socket.send_fds(self._handing, [kind], [connection.fileno()])
        except OSError:  # it does not take them as fast as they come, or has ended
            return False
        self.handed += 1
        return True

    def end_of_connections(self) -> None:
        if self._handing is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._handing.send(END)


class Hearing:
    """Since when the parent hears its workers. It does not while it is stopped itself (SIGSTOP, `docker pause`, a
    debugger): what they said meanwhile lies unread, and the first look would find all of them silent."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._looked_at = now

    def look(self, now: float) -> None:
        """Called every `LOOK_SECONDS`."""
        if now - self._looked_at > LOOK_SECONDS + HUNG_SECONDS:
            self.since = now
        self._looked_at = now


class Parent:
    def __init__(self, config: Config, signals: StopSignals, on_ready: Callable[[str], None]) -> None:
        """Listens from now on. Raises `StartError`."""
        self._config = config
        self._signals = signals
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._workers = [Worker(number + 1) for number in range(config.server.workers)]
        self._hub = Hub(self._loop, self._note_ready, self._note_leaving, self._own_page)
        self._doorman = Doorman(self._loop, self._takers)
        self._said = Said()
        self._has_served = False
        self._exit_code = 0
        self._environment = dict(os.environ)
        if config.auth.isolate_tenants and not os.environ.get(config.auth.isolation_secret_env):
            self._environment[config.auth.isolation_secret_env] = secrets.token_hex(32)  # one for all
        sock, admin_sock = listen_all(config)
        self._address: Address = sock.getsockname()[:2]
        self._admin_address: Address | None = None
        self._doorman.open(sock, CLIENT)
        if admin_sock is not None:
            self._admin_address = admin_sock.getsockname()[:2]
            self._doorman.open(admin_sock, ADMIN)
        self._funnel = Funnel(sys.stdout.fileno())

    async def run(self) -> int:
        """Until a signal stops it. Returns the exit code."""
        places = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        silent = asyncio.create_task(self._end_silent())
        try:
            with self._signals.heeded_by(self._heed):
                await asyncio.gather(*places)
        finally:
            self._doorman.close()
            for task in (*places, silent):
                task.cancel()
            await asyncio.gather(*places, silent, return_exceptions=True)
            await self._funnel.finish()
        return self._exit_code

    def _takers(self) -> list[Taker]:
        """Whoever has the fewest connections first."""
        now = time.monotonic()
        there = [one for one in self._workers if one.is_open(now)]
        return [*sorted(there, key=lambda one: (one.connections, one.handed))]

    def _note_ready(self, seat: Seat) -> None:
        if not self._has_served and all(one.seat.is_ready for one in self._workers):
            self._has_served = True
            tls = self._config.server.tls_certificate is not None
            if self._admin_address is not None:
                admin_tls = tls and not is_loopback(self._config.admin.host)
                log.info("admin listener on %s", base_url(self._admin_address, "https" if admin_tls else "http"))
            self._on_ready(base_url(self._address, "https" if tls else "http"))

    def _note_leaving(self, seat: Seat) -> None:
        self._workers[seat.number - 1].end_of_connections()

    def _own_page(self) -> Page:
        now = time.monotonic()
        starts = float(sum(one.starts for one in self._workers))
        serving = float(sum(one.is_open(now) for one in self._workers))
        gauges = [("warmlane_processes", (), serving), *rows_of_parent()]
        return Page([("warmlane_process_starts_total", (), starts)], gauges)

    # ---- a worker's life ---------------------------------------------------------------------------------------------

    async def _keep(self, worker: Worker) -> None:
        back_off = BackOff(BACK_OFF)
        asked = self._signals.asked
        while not asked.is_set():
            code = await self._run_once(worker)
            if asked.is_set():
                return
            if not self._has_served and not worker.seat.is_ready:
                if code < 0:  # else it has said why
                    log.error("worker %d ended (%s) before it served", worker.number, called(code))
                self._exit_code = code if code == WRONG_USAGE else 1
                self._signals.ask()
                self._signals.ask()
                return
            pause = back_off.ended(time.monotonic() - worker.began_at)
            log.warning("worker %d ended (%s), another starts in %g s", worker.number, called(code), pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), pause)

    async def _run_once(self, worker: Worker) -> int:
        """Its whole life. Returns its exit code."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                talking, their_talking = pair(ours, theirs, socket.SOCK_STREAM)
                handing, their_handing = pair(ours, theirs, socket.SOCK_SEQPACKET)
                handing.setblocking(False)
                out, their_out = await piped(theirs)
                err, their_err = await piped(theirs)
                process = await self._spawn(their_talking.fileno(), their_handing.fileno(), their_out, their_err)
            except OSError as error:  # no memory, or no process or descriptor more is allowed
                log.warning("worker %d: %s", worker.number, error.strerror)
                return 1
            ours.pop_all()
        seat = worker.begin(process, handing)
        printing = [
            asyncio.create_task(pass_on(out, self._funnel.write)),
            asyncio.create_task(pass_on(err, functools.partial(self._said.print_news, worker=worker.number))),
        ]
        try:
            return await self._follow(seat, process, talking)
        finally:
            worker.kill()
            worker.end()
            await asyncio.wait(printing, timeout=WORDS_SECONDS)
            for task in printing:
                task.cancel()

    async def _spawn(self, talking: int, handing: int, out: int, err: int) -> Process:
        """Raises `OSError`."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, str(ROOT), str(os.getpid()), str(talking), str(handing)),
            pass_fds=[talking, handing],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C is the parent's business
            env=self._environment,
        )

    async def _follow(self, seat: Seat, process: Process, talking: socket.socket) -> int:
        lost = asyncio.Event()
        hear = functools.partial(self._hub.hear, seat)
        channel = Channel(FromWorker, hear, lost.set, lambda: self._hub.tell(seat))
        await self._loop.create_unix_connection(lambda: channel, sock=talking)
        channel.send(Begin(self._config, self._address, self._admin_address, seat.number, self._hub.changes()))
        seat.channel = channel
        self._hub.enter(seat)
        if self._signals.asked.is_set():
            channel.send(Stop(now=self._signals.insisted.is_set()))
        try:
            code = await process.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), WORDS_SECONDS)
            return code
        finally:
            self._hub.leave(seat)
            channel.close()

    async def _end_silent(self) -> None:
        hearing = Hearing(time.monotonic())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            hearing.look(now)
            for worker in self._workers:
                limit = SILENT_SECONDS if worker.seat.is_ready else START_SECONDS
                silent_since = max(worker.seat.alive_at, worker.began_at, hearing.since)
                if worker.process is not None and now - silent_since > limit:
                    log.warning("worker %d has said nothing for %g s: it is ended", worker.number, limit)
                    worker.kill()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _heed(self) -> None:
        """The first signal lets running requests finish, the second does not."""
        now = self._signals.insisted.is_set()
        for worker in self._workers:
            if worker.seat.channel is not None:
                worker.seat.channel.send(Stop(now=now))
        if now:
            self._close_doors()
            self._loop.call_later(LAST_SECONDS, self._kill_all)
            return
        limits = self._config.server
        self._loop.call_later(SAY_SECONDS, self._say_what_runs)
        self._loop.call_later(limits.drain_delay_seconds, self._close_doors)
        grace = limits.drain_delay_seconds + limits.drain_seconds + LAST_SECONDS
        self._loop.call_later(grace, self._kill_all)

    def _say_what_runs(self) -> None:
        """By now each has told."""
        limits = self._config.server
        if running := sum(one.seat.requests for one in self._workers if one.process is not None):
            seconds = limits.drain_delay_seconds + limits.drain_seconds
            what = "1 request" if running == 1 else f"{running} requests"
            log.info("draining: %s running, up to %g s; again to stop now", what, seconds)

    def _close_doors(self) -> None:
        self._doorman.close()
        for worker in self._workers:
            worker.end_of_connections()

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()


def pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack, kind: socket.SocketKind
) -> tuple[socket.socket, socket.socket]:
    """Our end and theirs. Raises `OSError`."""
    our_end, their_end = socket.socketpair(socket.AF_UNIX, kind)
    return ours.enter_context(our_end), theirs.enter_context(their_end)


async def piped(theirs: contextlib.ExitStack) -> tuple[asyncio.StreamReader, int]:
    """A pipe: our end to read from, and the descriptor of theirs. Not the process's own, for its `wait` would wait for
    all to be read."""
    ours, their_end = os.pipe()
    theirs.callback(os.close, their_end)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
    )
    return reader, their_end


def called(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def run(config: Config, check: Callable[[Config], Awaitable[None]], on_ready: Callable[[str], None]) -> int:
    """Blocks until a signal stops it. `check` raises `ConfigError` for what workers would refuse. Raises that and
    `StartError`."""

    async def run_all() -> int:
        asyncio.get_running_loop().set_exception_handler(report_unforeseen)
        with said_by_workers():
            await check(config)
        with StopSignals().heard() as signals:
            return await Parent(config, signals, on_ready).run()

    return uvloop.run(run_all())


@contextlib.contextmanager
def said_by_workers() -> Iterator[None]:
    """What is noticed here each worker notices again."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
