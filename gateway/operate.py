"""The operator's side of a gateway: who its replicas are, and taking one out of the traffic and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from gateway.dry_run import Unanswered, aligned, message_of, new_client


class Load(Struct):
    age_seconds: float
    running: int | None
    waiting: int | None
    kv_usage: float | None


class Replica(Struct):
    replica: str
    source: str
    health: str
    draining: bool
    in_flight: int
    models: list[str]
    last_failure: str
    load: Load | None
    engine: str | None = None
    name: str | None = None
    """Where the gateway runs it itself."""
    in_flight_elsewhere: int = 0

    @property
    def requests(self) -> int:
        """Of all gateways there."""
        return self.in_flight + self.in_flight_elsewhere


class Address(Struct):
    replica: str
    problem: str


class Registration(Struct):
    url: str
    problem: str
    addresses: list[Address]


class Fleet(Struct):
    replicas: list[Replica]
    registrations: list[Registration]

    def out(self, registration: Registration) -> list[Address]:
        """Addresses that stay out. One may be in on another's word, as a configured replica is."""
        known = {one.replica for one in self.replicas}
        return [one for one in registration.addresses if one.problem and one.replica not in known]


class Restart(Struct):
    is_over: bool
    current: str | None
    left: list[str]
    renewed: list[str]
    problem: str
    waits_for: str = ""


class Restarted(Struct):
    restart: Restart


class Blamed(Struct):
    code: str | None = None


class Refusal(Struct):
    """As OpenAI's error objects."""

    error: Blamed


LOOK_SECONDS = 0.5
SAY_SECONDS = 10.0
"""Between two lines that say what a restart waits for: engines start for minutes."""
NAMES_NOBODY = ("no_such_replica", "no_such_worker")
NOT_ADMIN = (
    "this is not an admin listener, or (for `restart`) not that of a `warmlane up`: "
    "give the address of [admin], see docs/admin.md"
)


def list_replicas(url: str, key: str | None) -> bytes:
    """All replicas as JSON. Raises `Unanswered`."""
    return _asked("GET", f"{url.rstrip('/')}/warmlane/replicas", key)


def drain(url: str, replica: str, key: str | None, *, draining: bool) -> bytes:
    """No new requests for this replica, or requests again. `url` is the admin listener's. Raises `Unanswered`."""
    verb = "drain" if draining else "undrain"
    return _asked("POST", f"{url.rstrip('/')}/warmlane/replicas/{quote(replica, safe='')}/{verb}", key)


def restart(
    url: str,
    replica: str | None,
    key: str | None,
    *,
    alone: bool,
    say: Callable[[str], None],
    say_seconds: float = SAY_SECONDS,
) -> str:
    """Renew one replica that the gateway runs, or all one after the other, and follow it to its end. Returns why it
    stopped before; nothing when it did not. `url` is the admin listener's. Raises `Unanswered`."""
    workers = f"{url.rstrip('/')}/warmlane/workers"
    body = msgspec.json.encode({"replica": replica, "alone": alone})
    now, told = _restart_in(_asked("POST", f"{workers}/restart", key, body)), 0
    next_word = time.monotonic() + say_seconds
    while True:
        for name in now.renewed[told:]:
            say(f"{name} is renewed")
            next_word = time.monotonic() + say_seconds
        told = len(now.renewed)
        if now.current and now.waits_for and time.monotonic() >= next_word:
            say(f"{now.current}: waiting for {now.waits_for}")
            next_word = time.monotonic() + say_seconds
        if now.is_over:
            return now.problem
        time.sleep(LOOK_SECONDS)
        now = _restart_in(_asked("GET", workers, key))


def _restart_in(answer: bytes) -> Restart:
    try:
        return msgspec.json.decode(answer, type=Restarted).restart
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unanswered(f"not an answer of a Warmlane gateway: {error}") from error


def _asked(method: str, url: str, key: str | None, body: bytes = b"") -> bytes:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with new_client() as client:
            answer = client.request(method, url, headers=headers, content=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unanswered(f"{url}: {error}") from error
    if answer.status_code not in (200, 202):
        if method == "POST" and answer.status_code == 404 and not _names_nobody(answer.content):
            raise Unanswered(f"{url}: {NOT_ADMIN}", 404)
        raise Unanswered(f"{url}: HTTP {answer.status_code}: {message_of(answer.content)}", answer.status_code)
    return answer.content


def _names_nobody(refusal: bytes) -> bool:
    """An admin listener knows the path, but not the replica in it."""
    try:
        return msgspec.json.decode(refusal, type=Refusal).error.code in NAMES_NOBODY
    except (msgspec.DecodeError, RecursionError):
        return False


def table(answer: bytes) -> str:
    """The replicas for people, and below them who is registered but stays out, and why."""
    try:
        fleet = msgspec.json.decode(answer, type=Fleet)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unanswered(f"not an answer of a Warmlane gateway: {error}") from error
    rows = [["replica", "source", "engine", "health", "in flight", "running", "waiting", "kv", "load age", "models"]]
    rows += [_row(one) for one in fleet.replicas]
    if any(one.name for one in fleet.replicas):
        for row, name in zip(rows, ["name", *(one.name or "-" for one in fleet.replicas)], strict=True):
            row.insert(1, name)
    lines = aligned(rows)
    lines += [
        f"{one.replica} is {one.health}: {one.last_failure}"
        for one in fleet.replicas
        if one.last_failure and one.health != "up"
    ]
    for registration in fleet.registrations:
        if registration.problem:
            lines.append(f"registered but out: {registration.url}: {registration.problem}")
        lines += [f"registered but out: {one.replica}: {one.problem}" for one in fleet.out(registration)]
    return "\n".join(lines)


def _row(one: Replica) -> list[str]:
    health = f"{one.health}, draining" if one.draining else one.health
    load = one.load
    kv = "-" if load is None or load.kv_usage is None else f"{load.kv_usage:.0%}"
    age = "-" if load is None else f"{load.age_seconds:.1f} s"
    running, waiting = (None, None) if load is None else (load.running, load.waiting)
    counts = ["-" if count is None else str(count) for count in (one.requests, running, waiting)]
    return [one.replica, one.source, one.engine or "-", health, *counts, kv, age, str(len(one.models))]
