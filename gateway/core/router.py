"""The facade of the core: all state, seven calls, and the theory of operation of the whole gateway.

**What it does.** A replica that still holds a prompt's prefix in its KV cache answers in a twentieth of the time that
the others need. So each prompt is hashed in blocks, the router remembers which replica was sent which blocks, and
prices every replica for every request in one unit: seconds of wait. A warm replica is cheap until its queue costs more
than it saves.

**A request's life.** `admit` lets it in, makes it wait or sheds it; `release` says who may go on when somebody leaves.
`decide` ranks the replicas; it is a question and changes nothing, so a retry (`exclude`), a dry run or another policy
may ask as often as they like. `start` is a promise: its work and its blocks are booked at once, before the first byte
leaves, so the next decision, a microsecond later, already counts them. `first_token` ends its prefill, `finish` ends
it, exactly once. The flight knows what it booked and gives precisely that back.

**The world.** Everything else arrives as facts through `observe`: replicas come and go, probes, scrapes, model lists,
drains. Facts correct what the router booked; they never replace it, because they are late. What is not known is `None`.

**What is learned.** The prefill rate of each replica and the key bytes per token of each model come from finished
flights. Cache capacity comes from the replica. If a replica restarts, falls asleep or says five times in a row that
nothing was cached, its part of the index is forgotten.

**Rules.** No clock, no chance, no I/O, no await: time is an argument, chance is a function of the number of requests
started. One event loop owns a router, so no call needs a lock; the simulator drives the same object in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gateway.core import filters, holding, outliers, settling
from gateway.core.admission import Admission, Admitted, Release, Shed, Ticket, Waiting, lane_of
from gateway.core.belief import CacheShare
from gateway.core.departed import Departed
from gateway.core.flight import Flight
from gateway.core.holding import Promises
from gateway.core.model import (
    CacheCleared,
    CacheSized,
    Decision,
    DrainRequested,
    Fact,
    HealthState,
    LoadReported,
    ModelCard,
    ModelsListed,
    NoReplica,
    Outcome,
    OwnerGone,
    PauseReported,
    PeerFact,
    PeerReported,
    PeerSent,
    PeerStored,
    ProbeAnswered,
    PromptCounted,
    ReplicaAdded,
    ReplicaId,
    ReplicaRemoved,
    ReplicaStatistics,
    ReplicaView,
    RouteRequest,
    RouterStatistics,
    RoutingError,
    UnknownModel,
    Usage,
)
from gateway.core.ownership import Ownership
from gateway.core.pickers import AGREED_SHARE, CUT_OFF_SHARE, Ranking, agreed, ranked, reason_of
from gateway.core.policy import Policy, policy_named
from gateway.core.prefix_index import PrefixIndex
from gateway.core.rates import BytesPerToken, PrefillRates
from gateway.core.replica import Replica
from gateway.core.scorers import OUTPUT_RESERVE_TOKENS
from gateway.core.settings import RoutingSettings
from gateway.core.sharing import Journal

__all__ = ["Flight", "Router"]


class Router:
    """See the module. `seed` varies only how ties are broken."""

    def __init__(self, settings: RoutingSettings, seed: int = 0) -> None:
        self._settings = settings
        self._seed = seed
        self._policy = policy_named(settings.policy)
        holds = self._policy.holds if settings.hold is None else settings.hold
        self._holds = holds and settings.max_waiting > 0
        self._replicas: dict[ReplicaId, Replica] = {}
        self._index = PrefixIndex(settings.index_memory_mib * 1024 * 1024)
        self._rates = PrefillRates()
        self._bytes_per_token = BytesPerToken()
        self._cache_share = CacheShare()
        self._admission = Admission(settings.max_in_flight, settings.max_waiting, settings.max_wait_seconds)
        self._ownership = Ownership()
        self._departed = Departed()
        self._started = 0
        self._in_flight = 0
        self._settling_until = float("-inf")
        self._all_up: dict[str | None, list[Replica]] = {}
        """Candidates by model while every replica is up, so that time does not matter; emptied by every change."""
        self.before_start: Callable[[Decision, float], None] | None = None
        """Hears of each decision just before it is booked. Must not raise."""
        self.journal: Journal | None = None
        """Where it is written down for other gateways what was sent and stored; `None`: there are none."""
        self.cut_off = False
        """Other gateways cannot be heard."""

    def __repr__(self) -> str:
        return f"<Router {self._policy.name}: {len(self._replicas)} replicas, {self._admission!r}, {self._index!r}>"

    # ---- the seven calls (two are the flight's) --------------------------------------------------------------------

    def observe(self, fact: Fact, now: float) -> None:
        """The world changed. Facts about replicas that are not there (any more) are ignored."""
        if isinstance(fact, (PeerSent, PeerReported, PeerStored)):
            self._hear_peer(fact, now)
            return
        self._all_up.clear()
        if isinstance(fact, ReplicaAdded):
            self._add(fact)
            return
        replica = self._replicas.get(fact.replica)
        if replica is None:
            return
        match fact:
            case LoadReported(snapshot=snapshot):
                replica.report(snapshot, now)
            case ProbeAnswered(ok=ok, reason=reason):
                replica.probed(ok, reason, now)
                self._settling_until = max(self._settling_until, replica.settling_until)
            case ModelsListed(models=models):
                replica.list_models(models, now)
                self._departed.forget(replica.id)
            case DrainRequested(draining=draining):
                replica.draining = draining
            case CacheCleared():
                replica.clear()
            case CacheSized(cache_tokens=cache_tokens):
                replica.cache_sized(cache_tokens)
            case PromptCounted(model=model, space=space, length=length, prompt_tokens=prompt_tokens):
                ratio = self._bytes_per_token.learn(model, space, length, prompt_tokens)
                for each in self._replicas.values():  # whoever counted: all that serve the model get such prompts
                    if model is None or each.models is None or each.serves(model):
                        each.mix_bytes_per_token(ratio)
            case PauseReported(paused=paused):
                replica.pause(paused, now)
            case ReplicaRemoved(returns=returns):
                if returns:
                    self._departed.note(replica.id, replica.model_ids, now)
                del self._replicas[replica.id]
                self._index.remove(replica.id)
                self._rates.remove(replica.rate)

    def admit(self, request: RouteRequest, now: float) -> Admitted | Waiting | Shed:
        """May it be decided now? The ticket's `leave` must be called in the end, whatever the answer."""
        admission = self._admission
        if admission.is_crowded:
            return admission.wait(request, self._prefill_seconds(request), now)
        if not self._holds or not request.length or self._everybody_can_begin(request, now):
            return admission.admit(request, 0.0, now)
        decision = self._wish(request, now, None)
        if decision is None:
            return admission.admit(request, 0.0, now)
        if not self._can_begin(decision, now):
            return admission.wait(request, self._prefill_seconds(request), now)
        admitted = admission.admit(request, 0.0, now)
        admitted.ticket.bind(self.start(decision, now))
        return admitted

    def decide(
        self,
        request: RouteRequest,
        now: float,
        exclude: Collection[ReplicaId] = (),
        policy: str | Policy | None = None,
        promises: Promises | None = None,
    ) -> Decision:
        """Rank the replicas that may serve the request, without those in `exclude` (they were tried). Changes nothing.

        `promises` count as if they were booked: the router's own planning gives them.
        Raises `UnknownModel`, `OwnerGone` (a pinned request) or `NoReplica`.
        """
        chosen = self._policy if policy is None else policy_named(policy) if isinstance(policy, str) else policy
        if request.pinned is not None:
            candidates = [self._owner_of(request.pinned, now, exclude)]
        else:
            candidates = self._candidates(request, now, exclude)
        views = self._views(candidates, request, now, chosen.reads_cache)
        if promises:
            views = [promises.seen(view) for view in views]
        draw = self._seed + self._started
        ranking = ranked(views, chosen.costs(request, views, draw), draw)
        if self.journal is not None and chosen.reads_cache and len(ranking) > 1:
            ranking = self._agreed(ranking, request, now)
        return Decision(request, chosen.name, reason_of(request, ranking), ranking)

    def release(self, now: float) -> Release:
        """Waiting requests that may go on now, those that waited too long, and when to ask again.

        With late binding those that may go on are started already: their tickets carry the flights.
        """
        if not self._holds:
            return self._admission.release(now)
        shed = self._admission.turned_away(now)
        ready = self._bind(now) if self._admission.waiting else []
        return Release(ready, self._ask_again_at(now), shed)

    def start(self, decision: Decision, now: float) -> Flight:
        """The request is being sent to `decision.replica`: book its work and its blocks.

        Raises `NoReplica` if that replica was removed since.
        """
        replica = self._replicas.get(decision.replica)
        if replica is None:
            raise NoReplica("The chosen replica was removed.")
        if self.before_start is not None:
            self.before_start(decision, now)
        self._started += 1
        self._in_flight += 1
        replica.started = self._started
        if replica.health.state is HealthState.EJECTED:
            replica.health.flight_started()
        if self.journal is not None and decision.request.blocks:
            self.journal.note_sent(PeerSent(replica.id, decision.request.blocks))
        ahead = replica.load.queued_tokens(now, replica.rate.value)
        return Flight(self._settle, replica, decision, ahead, now)

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests now at all replicas."""
        return self._in_flight

    def owner(self, id: str) -> ReplicaId | None:
        """The replica that keeps the stored response `id`."""
        return self._ownership.owner(id)

    def is_foreign(self, id: str, tenant: str) -> bool:
        """Whether the stored response is known to be another tenant's."""
        return self._ownership.is_foreign(id, tenant)

    def own(self, id: str, replica: ReplicaId, tenant: str = "") -> None:
        """`replica` has stored a response under `id`. Changes nothing when that is known to be another tenant's."""
        self._ownership.own(id, replica, tenant)
        if self.journal is not None:
            self.journal.note_stored(PeerStored(replica, id, tenant))

    def report_to_peers(self, name: str, now: float) -> list[PeerReported]:
        """What this gateway, which the others know by that name, has booked at each replica."""
        return [replica.report_to_peers(name, now) for replica in self._replicas.values()]

    def reconsider(self, decision: Decision, now: float, policy: Policy) -> Decision:
        """What another policy decides from what `decision` saw, as long as that one is not started. Changes nothing."""
        request, views = decision.request, [view for view, _ in decision.ranking]
        if policy.reads_cache and not policy_named(decision.policy).reads_cache:  # then they lack what it reads
            candidates = [found for view in views if (found := self._replicas.get(view.replica)) is not None]
            views = self._views(candidates, request, now, True)
        draw = self._seed + self._started
        ranking = ranked(views, policy.costs(request, views, draw), draw)
        return Decision(request, policy.name, reason_of(request, ranking), ranking)

    def models(self) -> tuple[ModelCard, ...]:
        """What the fleet serves now: each model once, by id; its smallest context and earliest creation."""
        merged: dict[str, ModelCard] = {}
        for replica in sorted(self._replicas.values(), key=lambda replica: replica.id):
            if replica.health.state is HealthState.UP and not replica.draining:
                for card in replica.models or ():
                    known = merged.get(card.id)
                    merged[card.id] = card if known is None else known.merged(card)
        return tuple(merged[id] for id in sorted(merged))

    def cached_seconds(self, now: float) -> dict[ReplicaId, float]:
        """What the loss of each replica would cost: prefill of what it alone is believed to hold, the less the longer
        nobody asked for it. For operators: it looks at every block."""
        sole = self._index.sole_blocks(now)
        return {id: self._replicas[id].prefill_seconds(blocks) for id, blocks in sole.items()}

    def statistics(self, now: float) -> RouterStatistics:
        open_to_all = {replica.id for replica in self._open(now)}
        return RouterStatistics(
            replicas=tuple(
                self._describe(replica, replica.id in open_to_all, now) for replica in self._replicas.values()
            ),
            in_flight=self._in_flight,
            waiting=self._admission.waiting,
            index_blocks=len(self._index),
            index_capacity_blocks=self._index.capacity,
            started=self._started,
            cache_share=self._cache_share.value,
            bytes_per_token=self._bytes_per_token.statistics(),
            index_bytes=self._index.memory_bytes,
            waiting_by=self._admission.waiting_by(),
        )

    # ---- late binding ----------------------------------------------------------------------------------------------

    def _prefill_seconds(self, request: RouteRequest) -> float:
        """The request's own prefill where most of it is held."""
        ratio = self._bytes_per_token.of(request.model, request.space)
        held = self._index.match_anywhere(request.blocks) * self._settings.block_bytes
        rate = self._rates.typical() or self._settings.default_prefill_rate
        return (request.length - held) / ratio / rate

    def _everybody_can_begin(self, request: RouteRequest, now: float) -> bool:
        """Whoever is chosen: a quick look that spares most requests of a calm fleet the planning."""
        ratio = self._bytes_per_token.of(request.model, request.space)
        block_tokens, tokens = self._settings.block_bytes / ratio, request.length / ratio + OUTPUT_RESERVE_TOKENS
        for replica in self._replicas.values():
            if replica.load.in_flight or replica.load.peers is not None:
                has_room = replica.running_tokens(block_tokens, now) + tokens <= replica.cache_tokens
                if not (has_room and holding.is_free(replica, now)):
                    return False
        return True

    def _wish(self, request: RouteRequest, now: float, promises: Promises | None) -> Decision | None:
        """Where the request would go with these promises kept; `None` where `decide` explains why it goes nowhere."""
        try:
            return self.decide(request, now, promises=promises)
        except RoutingError:
            return None

    def _can_begin(self, decision: Decision, now: float) -> bool:
        return holding.has_room(decision.view) and holding.is_free(self._replicas[decision.replica], now)

    def _bind(self, now: float) -> list[Ticket]:
        """Let in, in turn, everybody whose choice of replica can begin with him; the others are promised theirs."""
        admission, promises, ready = self._admission, Promises(), list[Ticket]()
        free = {replica.id for replica in self._replicas.values() if holding.is_free(replica, now)}
        backlog_seconds = admission.waiting_prefill_seconds / max(1, len(self._replicas))
        patience = max(holding.MINIMUM_PATIENCE_SECONDS, holding.PATIENCE * backlog_seconds)
        patience = min(patience, holding.PATIENCE_SHARE * self._settings.max_wait_seconds)
        each = holding.PLAN_REQUESTS + len(self._replicas)
        limit, looked_at = each if admission.lanes == 1 else admission.waiting, dict[str | None, int]()
        for ticket in admission.next_in_turn(now, limit, patience) if free or not self._replicas else ():
            lane = lane_of(ticket.request)
            looked_at[lane] = looked_at.get(lane, 0) + 1
            if looked_at[lane] > each:
                continue
            if not admission.room:
                break
            decision = self._wish(ticket.request, now, promises)
            if decision is not None and not (decision.replica in free and holding.has_room(decision.view)):
                promises.promise(decision.view)
                continue
            admission.let_in(ticket)
            ready.append(ticket)
            if decision is not None:
                ticket.bind(self.start(decision, now))
                if not holding.is_free(self._replicas[decision.replica], now):
                    free.discard(decision.replica)
                    if not free:
                        break
        return ready

    def _ask_again_at(self, now: float) -> float | None:
        """When time alone lets somebody in, or makes somebody wait too long."""
        overdue_at = self._admission.next_overdue_at
        if overdue_at is None:
            return None
        seconds = [s for r in self._replicas.values() if (s := holding.free_in(r, now)) is not None and s > 0]
        return min(overdue_at, now + max(min(seconds), holding.TICK_SECONDS)) if seconds else overdue_at

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _agreed(self, ranking: Ranking, request: RouteRequest, now: float) -> Ranking:
        """Where it hardly matters, as other gateways would have it, which may know nothing of this prompt yet."""
        view, cost = ranking[0]
        share = CUT_OFF_SHARE if self.cut_off else AGREED_SHARE
        slack = share * (view.prompt_tokens - view.cached_tokens) / view.prefill_rate
        if ranking[1][1].total > cost.total + slack:
            return ranking
        key = self._index.discriminating(request.blocks, now)
        return ranking if key is None else agreed(ranking, key, slack)

    def _hear_peer(self, fact: PeerFact, now: float) -> None:
        replica = self._replicas.get(fact.replica)
        if replica is None:
            return
        match fact:
            case PeerSent(blocks=blocks):
                replica.sent_by_peer(blocks, now)
            case PeerReported():
                replica.reported_by_peer(fact, now)
            case PeerStored(replica=owner, id=id, tenant=tenant):
                self._ownership.own(id, owner, tenant)

    def _add(self, fact: ReplicaAdded) -> None:
        if fact.replica in self._replicas:
            return
        settings = self._settings
        rate = self._rates.add(fact.prefill_rate or settings.default_prefill_rate)
        index = self._index.add(fact.replica, capacity=1)
        tokens = float(settings.default_cache_tokens)
        self._replicas[fact.replica] = Replica(
            fact.replica, index, rate, tokens, settings.block_bytes, self._cache_share
        )

    def _owner_of(self, pinned: ReplicaId, now: float, exclude: Collection[ReplicaId]) -> Replica:
        replica = self._replicas.get(pinned)
        if replica is None or pinned in exclude:
            raise OwnerGone(pinned)
        health = replica.health
        if health.state is HealthState.ASLEEP or (health.state is HealthState.EJECTED and now < health.retry_at):
            raise OwnerGone(pinned)
        return replica

    def _open(self, now: float) -> list[Replica]:
        return filters.available(filters.accepting(self._replicas.values()), now)

    def _settle(self, flight: Flight, outcome: Outcome, now: float, usage: Usage | None) -> None:
        """Learn from a flight that ended, unless its replica was removed meanwhile."""
        self._in_flight -= 1
        replica = flight.to
        if self._replicas.get(replica.id) is not replica:
            return
        if outliers.judge(flight, outcome, self._replicas.values(), now):
            self._all_up.clear()
            self._settling_until = max(self._settling_until, replica.settling_until)
        if outcome is Outcome.COMPLETED:
            flight.teach_rate(usage)
            if usage is not None:
                request, tokens = flight.request, usage.prompt_tokens
                if tokens is not None:
                    ratio = self._bytes_per_token.learn(request.model, request.space, request.length, tokens)
                    replica.mix_bytes_per_token(ratio)
                cached = usage.cached_tokens
                if cached is not None and replica.check_belief(flight.record, flight.cached_tokens, cached):
                    self._resize_indexes()

    def _resize_indexes(self) -> None:
        """The share of cache that holds prefixes has moved: for all replicas, and memory is shared once."""
        resized = [replica for replica in self._replicas.values() if replica.resize_index()]
        if resized:
            self._index.share_memory()

    def _candidates(self, request: RouteRequest, now: float, exclude: Collection[ReplicaId]) -> list[Replica]:
        model = request.model
        candidates = self._all_up.get(model)
        if candidates is None:
            accepting = filters.accepting(self._serving(model, now))
            candidates = filters.available(accepting, now)
            if accepting and all(
                r.health.state is HealthState.UP and (model is None or r.serves(model)) for r in accepting
            ):
                self._all_up[model] = candidates
        if exclude:
            tried = candidates
            candidates = [replica for replica in tried if replica.id not in exclude]
            if not candidates:  # the best tier was tried: whoever is left
                accepting = filters.accepting(self._serving(model, now))
                candidates = [r for r in accepting if r.id not in exclude and not r.health.is_hopeless(now)]
        if not candidates:
            raise NoReplica("No replica can serve this request at the moment.")
        return candidates

    def _serving(self, model: str | None, now: float) -> list[Replica]:
        try:
            return filters.serving(list(self._replicas.values()), model)
        except UnknownModel:
            if model is None or not self._departed.is_expected(model, now):
                raise
            return []  # its replica will be back

    def _views(
        self, candidates: Sequence[Replica], request: RouteRequest, now: float, reads_cache: bool
    ) -> list[ReplicaView]:
        blocks = request.blocks
        ratio = self._bytes_per_token.of(request.model, request.space)
        block_tokens = self._settings.block_bytes / ratio
        prompt_tokens = request.length / ratio
        found = [replica.index.find(blocks) for replica in candidates]
        deserving, tau, thrift, waiting = 0, 0.0, 0.0, self._admission.waiting / max(1, len(self._replicas))
        if reads_cache and (longest := max([matched for matched, _ in found])):
            deserving = self._index.deserving_depth(blocks[:longest], now)
        if reads_cache:
            tau, thrift = self._index.tau(now), self._index.thrift(now)
        views: list[ReplicaView] = []
        foreign_total = 0.0
        silent: list[int] = []
        for replica, (matched, last) in zip(candidates, found, strict=True):
            load, index = replica.load, replica.index
            loss, missing = 0.0, len(blocks) - matched
            if reads_cache and index.held + missing > index.capacity:
                loss = index.eviction_loss(missing, now, tau) * block_tokens
            rate = replica.rate.value
            foreign, kv_usage = load.scraped(now)
            if foreign is None:
                silent.append(len(views))
            else:
                foreign_total += foreign
            cached = matched * block_tokens
            live = replica.running_tokens(block_tokens, now)
            if last is not None and last.live:
                live = max(0.0, live - cached)
            row = (
                replica.id,
                prompt_tokens,
                cached if cached < prompt_tokens else prompt_tokens,
                load.pending_tokens(now, rate),
                load.in_flight if load.peers is None else load.in_flight + load.peers.in_flight(now),
                live,
                0.0 if foreign is None else foreign,
                kv_usage,
                replica.cache_tokens,
                rate,
                loss,
                (deserving - matched) * block_tokens if deserving > matched else 0.0,
                replica.started,
                load.residence_seconds,
                thrift,
                waiting,
            )
            views.append(tuple.__new__(ReplicaView, row))  # half the time of ReplicaView(*row), for each candidate
        if silent and foreign_total:  # silence is neither idle nor full: the mean of the others stands in
            mean = foreign_total / (len(views) - len(silent))
            for position in silent:
                views[position] = views[position]._replace(foreign_requests=mean)
        return views if now >= self._settling_until else settling.seen(views, candidates, now)

    def _describe(self, replica: Replica, available: bool, now: float) -> ReplicaStatistics:
        load, snapshot = replica.load, replica.load.snapshot
        return ReplicaStatistics(
            replica=replica.id,
            health=replica.health.state,
            draining=replica.draining,
            available=available,
            models=replica.models or (),
            in_flight=load.in_flight,
            in_flight_tokens=load.in_flight_tokens,
            pending_tokens=load.pending_tokens(now, replica.rate.value),
            prefill_rate=replica.rate.value,
            cache_tokens=replica.cache_tokens,
            cache_tokens_known=replica.cache_tokens_known,
            index_blocks=len(replica.index),
            load=snapshot,
            load_age=None if snapshot is None else now - snapshot.taken_at,
            last_failure=replica.health.last_failure,
            in_flight_elsewhere=0 if load.peers is None else load.peers.in_flight(now),
            probe_age=None if replica.probed_at is None else now - replica.probed_at,
        )
