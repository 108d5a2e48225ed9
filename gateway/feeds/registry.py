"""Registry: replicas that come and go on somebody's word while the gateway runs (an autoscaler's, as a rule).

A registration is a URL, and for how long it is good. Nothing of it is believed:

- its host is resolved here, every address is checked (`addresses.py`), and the address that was checked is the replica:
  a name that later points elsewhere is checked again before anything is sent there. With https the name stays, for the
  certificate proves it;
- it must answer `/v1/models` before it gets a request, so nothing that is no model server is ever sent one;
- it may not serve a model that another replica serves already, unless that is allowed. Configured replicas win whenever
  they appear, among registered ones the first does. It stays out as a whole: requests that name no model go anywhere.

What is out stays listed with the reason. Every interval all of it is gone through again, so nothing depends on having
seen a change, and a registration that is not repeated in its time is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import urlsplit

from gateway.core.model import Fact, ModelCard, ModelsListed, ReplicaId, ReplicaRemoved
from gateway.feeds.addresses import Allowlist, Forbidden
from gateway.feeds.announcements import Announcement
from gateway.feeds.fetch import FetchFailed
from gateway.feeds.sources import Resolve, address_of, replica_at, resolve

log = logging.getLogger(__name__)

MAX_REGISTRATIONS = 256
"""More than a gateway has replicas; a caller that runs wild must not fill the memory or the resolver's queue."""
MAX_REPLICAS = 256
"""All registrations together: a name may have many addresses."""
MAX_ASKED = 16
"""Asked for their models at the same time."""
RESOLVE_SECONDS = 2.0
"""Whoever registers waits for this."""
CONFIGURED, REGISTERED = "is configured already", "is registered already"
NO_MATTER = (CONFIGURED, REGISTERED)
"""It is in, on another's word."""
SHOWN = 5
"""Model names in a message; adapters go into the hundreds."""

ListModels = Callable[[ReplicaId], Awaitable[tuple[ModelCard, ...]]]
"""Asks a replica for its models. Raises `FetchFailed`."""


class Refused(Exception):
    """The registration is not taken. `code` is a short word for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Candidate:
    """One address of a registration."""

    models: frozenset[str] | None = None
    """`None` until it has listed them."""
    problem: str = "was not asked for its models yet"
    """Why it is out; empty while it is in."""


@dataclass(slots=True)
class Registration:
    url: ReplicaId
    arrival: int
    """The first has the lowest."""
    prefill_rate: float | None = None
    is_announced: bool = False
    """By the replica itself, through Redis (`announcements.py`)."""
    named: frozenset[str] = frozenset()
    """Models that its registration names; empty where it names none."""
    expires_at: float | None = None
    problem: str = ""
    """Why none of its addresses is in; empty otherwise."""
    candidates: dict[ReplicaId, Candidate] = field(default_factory=dict)


class Registry:
    """`changed` hears of every change of what is in: replica -> known prefill rate or `None`. `is_configured` tells
    whether the file, or a name in it, knows a replica already."""

    def __init__(
        self,
        allowlist: Allowlist,
        changed: Callable[[Mapping[ReplicaId, float | None]], None],
        is_configured: Callable[[ReplicaId], bool],
        list_models: ListModels,
        *,
        allow_existing_models: bool = False,
        interval_seconds: float = 5.0,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._allowlist = allowlist
        self._changed = changed
        self._is_configured = is_configured
        self._list_models = list_models
        self._allow_existing_models = allow_existing_models
        self._interval_seconds = interval_seconds
        self._resolve = resolve
        self._clock = clock
        self._sleep = sleep
        self._own: dict[ReplicaId, float | None] = {}
        self._own_models: dict[ReplicaId, frozenset[str]] = {}
        """Of those that ended, too: nobody takes a name over while its replica starts again."""
        self._asking = asyncio.Semaphore(MAX_ASKED)
        self._registrations: dict[ReplicaId, Registration] = {}
        self._announced: dict[ReplicaId, Registration] = {}
        self._arrivals = count()
        self._admitted: dict[ReplicaId, float | None] = {}
        self._listed: dict[ReplicaId, frozenset[str]] = {}
        """Models of every replica of the gateway, as the probes report them."""

    def __iter__(self) -> Iterator[Registration]:
        return iter((*self._registrations.values(), *self._announced.values()))

    def __repr__(self) -> str:
        return f"<Registry: {len(tuple(self))} registrations, {len(self._admitted)} replicas in>"

    @property
    def own(self) -> frozenset[ReplicaId]:
        """Replicas that this process runs itself."""
        return frozenset(self._own)

    @property
    def admitted(self) -> frozenset[ReplicaId]:
        return frozenset(self._admitted)

    def seconds_left(self, registration: Registration) -> float | None:
        return None if registration.expires_at is None else registration.expires_at - self._clock()

    async def register(
        self, url: ReplicaId, prefill_rate: float | None = None, lease_seconds: float | None = None
    ) -> Registration:
        """Take a registration, or renew it, and look at it at once. `url` is normalised. Raises `Refused`."""
        if not self._allowlist:
            raise Refused("Registration is off: admin.allow names no network.", "registration_off")
        if url not in self._registrations and len(self._registrations) >= MAX_REGISTRATIONS:
            raise Refused(f"There are {MAX_REGISTRATIONS} registrations already.", "too_many_registrations")
        try:
            await self._addresses(url)
        except Forbidden as error:
            log.warning("registration of %s refused: %s", url, error)
            raise Refused(f"{error}.", "address_not_allowed") from error
        except (OSError, UnicodeError, TimeoutError) as error:
            raise Refused(f"{url} does not resolve.", "unresolvable") from error
        return await self.take(url, prefill_rate, lease_seconds)

    async def take(
        self, url: ReplicaId, prefill_rate: float | None = None, lease_seconds: float | None = None
    ) -> Registration:
        """As `register`, for one that another process of this gateway has taken: nobody waits for an answer, so that it
        cannot be resolved now is no reason to forget it."""
        expires_at = None if lease_seconds is None else self._clock() + lease_seconds
        registration = self._registrations.get(url)
        if registration is None:
            registration = self._registrations[url] = Registration(url, next(self._arrivals))
            log.info("%s is registered", url)
        registration.prefill_rate, registration.expires_at = prefill_rate, expires_at
        await self._examine(registration)
        return registration

    def unregister(self, url: ReplicaId) -> bool:
        """Returns whether it was registered."""
        if self._registrations.pop(url, None) is None:
            return False
        log.info("%s is not registered any more", url)
        self._settle()
        return True

    async def take_announced(self, announced: Mapping[ReplicaId, Announcement]) -> None:
        """These announce themselves now, and no others. They are looked at as all others are."""
        for url in self._announced.keys() - announced.keys():
            del self._announced[url]
            log.info("%s is not announced any more", url)
        new = []
        for url, one in announced.items():
            registration = self._announced.get(url)
            if registration is None and len(self._announced) < MAX_REGISTRATIONS:
                registration = self._announced[url] = Registration(url, next(self._arrivals), is_announced=True)
                new.append(registration)
                log.info("%s announces itself", url)
            if registration is not None:
                registration.prefill_rate, registration.named = one.prefill_rate, frozenset(one.models)
        self._settle()
        await asyncio.gather(*(self._examine(registration) for registration in new))

    def addresses(self, url: ReplicaId) -> frozenset[ReplicaId]:
        """The replicas that an announced URL stands for."""
        registration = self._announced.get(url)
        return frozenset() if registration is None else frozenset(registration.candidates)

    def adopt(self, replica: ReplicaId, prefill_rate: float | None = None) -> None:
        """This process runs it, and it is ready: in at once and unasked, whatever models it serves."""
        self._own[replica] = prefill_rate
        self._settle()

    def let_go(self, replica: ReplicaId) -> None:
        """It ended."""
        if replica in self._own:
            del self._own[replica]
            self._settle()

    async def run(self) -> None:
        """Goes through everything again and again, until cancelled."""
        while True:
            try:
                await self.reconcile()
            except Exception:
                log.exception("the registry stumbled and goes on")
            await self._sleep(self._interval_seconds)

    async def reconcile(self) -> None:
        now = self._clock()
        for registration in tuple(self._registrations.values()):
            if registration.expires_at is not None and registration.expires_at <= now:
                log.info("the registration of %s was not renewed", registration.url)
                del self._registrations[registration.url]
        self._settle()
        await asyncio.gather(*(self._examine(registration) for registration in self))

    def heard(self, fact: Fact) -> None:
        """A fact on its way to the router. A registered replica whose new list takes a name from others is out before
        the router reads the list."""
        if isinstance(fact, ModelsListed):
            self._listed[fact.replica] = frozenset(card.id for card in fact.models)
            if fact.replica in self._own:
                self._own_models[fact.replica] = self._listed[fact.replica]
            if self._registrations or self._announced:
                self._settle()
        elif isinstance(fact, ReplicaRemoved):
            self._listed.pop(fact.replica, None)

    # ---- one registration ------------------------------------------------------------------------------------------

    async def _examine(self, registration: Registration) -> None:
        try:
            found = await self._addresses(registration.url)
        except Forbidden as error:
            self._note(registration, str(error))
            registration.candidates.clear()
        except (OSError, UnicodeError, TimeoutError) as error:
            self._note(registration, f"does not resolve: {str(error) or 'no answer in time'}")
        else:
            self._note(registration, "")
            known = registration.candidates
            registration.candidates = {replica: known.get(replica) or Candidate() for replica in found}
        await asyncio.gather(
            *(
                self._ask(replica, candidate)
                for replica, candidate in registration.candidates.items()
                if replica not in self._admitted
            )
        )
        self._settle()

    async def _addresses(self, url: ReplicaId) -> list[ReplicaId]:
        """The replicas that a registered URL stands for. Raises `Forbidden`, and what the resolver does."""
        scheme = urlsplit(url).scheme
        host, port = address_of(url)
        async with asyncio.timeout(RESOLVE_SECONDS):
            addresses = sorted(await self._resolve(host, port))
        for address in addresses:
            self._allowlist.check(address)
        if scheme == "https":
            return [url]
        return [replica_at(scheme, address, port) for address in addresses[:MAX_REPLICAS]]

    async def _ask(self, replica: ReplicaId, candidate: Candidate) -> None:
        try:
            async with self._asking:
                cards = await self._list_models(replica)
            candidate.models = frozenset(card.id for card in cards)
        except FetchFailed as error:
            candidate.models = None
            candidate.problem = f"does not list its models: {error}"

    def _note(self, registration: Registration, problem: str) -> None:
        if problem and problem != registration.problem:
            log.warning("%s is registered, but %s", registration.url, problem)
        registration.problem = problem

    # ---- all of them -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Decide anew who is in, from what is known."""
        taken = {name for replica, names in self._listed.items() if self._is_configured(replica) for name in names}
        taken.update(*self._own_models.values())
        admitted: dict[ReplicaId, float | None] = dict(self._own)
        for group in self._groups():
            served: set[str] = set()
            for registration in group:
                self._let_in(registration, admitted, taken, served)
            taken |= served
        if admitted != self._admitted:
            self._admitted = admitted
            self._changed(dict(admitted))

    def _groups(self) -> list[tuple[Registration, ...]]:
        """Registrations that take no names from each other, in the order of their arrival. Whoever announces himself
        has the fleet's secret: those are one."""
        groups: list[tuple[Registration, ...]] = [(one,) for one in self._registrations.values()]
        if self._announced:
            groups.append(tuple(self._announced.values()))
        return sorted(groups, key=lambda group: min(one.arrival for one in group))

    def _let_in(
        self,
        registration: Registration,
        admitted: dict[ReplicaId, float | None],
        taken: set[str],
        served: set[str],
    ) -> None:
        """Those of its addresses that nothing speaks against; what they serve goes into `served`."""
        for replica, candidate in registration.candidates.items():
            if replica in self._admitted and replica in self._listed:
                candidate.models = self._listed[replica]
            if candidate.models is None and replica not in self._own:  # which is in, and so was not asked
                continue
            problem = self._problem(replica, registration, candidate, taken, admitted)
            self._note_verdict(replica, candidate, problem)
            if not problem:
                admitted[replica] = registration.prefill_rate
                served |= candidate.models or frozenset()

    def _is_given(self, replica: ReplicaId) -> bool:
        """Nobody had to register it."""
        return replica in self._own or self._is_configured(replica)

    def _problem(
        self,
        replica: ReplicaId,
        registration: Registration,
        candidate: Candidate,
        taken: set[str],
        admitted: Mapping[ReplicaId, float | None],
    ) -> str:
        """Why it stays out; nothing where it may come in."""
        names = candidate.models or frozenset()
        claimed = sorted(names & taken) if not self._allow_existing_models else []
        if self._is_given(replica):
            return CONFIGURED
        if replica in admitted:
            return REGISTERED
        if not names:
            return "lists no model"
        if registration.named and names.isdisjoint(registration.named):
            return f"lists none of the models that its registration names: {shown(sorted(registration.named))}"
        if claimed:
            return f"lists models that others serve: {shown(claimed)}"
        if len(admitted) - len(self._own) >= MAX_REPLICAS:
            return f"is one too many: {MAX_REPLICAS} registered replicas are in"
        return ""

    def _note_verdict(self, replica: ReplicaId, candidate: Candidate, problem: str) -> None:
        if problem and problem != candidate.problem:
            level = logging.INFO if problem in NO_MATTER else logging.WARNING
            log.log(level, "%s stays out: it %s", replica, problem)
        elif not problem and candidate.problem:
            log.info("%s comes in with %s", replica, shown(sorted(candidate.models or ())))
        candidate.problem = problem


def shown(names: Sequence[str]) -> str:
    """A few names, as a replica gave them: they must not forge a line of the log or flood it."""
    return ", ".join(repr(name)[:80] for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
