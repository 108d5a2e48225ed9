"""Warmlane's own request log as a trace: JSON lines of `gateway.request_log.RequestRecord`.

A record says when a request ended and how long it took, hence when it came; its tokens as the replica reported them;
and, with `[server] log_blocks = true`, how many prefix blocks of its prompt an earlier request had. Which text the
blocks hold is nowhere in the log. A chain of block ids is built again from that: the first blocks of the earlier
request, then new ones. Without `log_blocks` no request shares a prefix with another.

The log's blocks are bytes of text, a trace's are 512 tokens, so one is laid over the other with the mean tokens of a
block of that log. Requests that no replica got, or without a prompt, are left out, and so are lines that are no JSON
object: standard output has the greeting of `warmlane up` as well, and the last record may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loadtests.traces.lines import Lines, Source, Tell, at_least
from loadtests.traces.model import BLOCK_TOKENS, Request, Trace, TraceError


class Prefix(msgspec.Struct, frozen=True):
    """`gateway.request_log.PrefixRecord`."""

    run: str
    number: int
    blocks: int
    shared: int = 0
    earlier: int | None = None
    session: str | None = None


class Entry(msgspec.Struct):
    """What is needed of one record."""

    time: float
    duration_seconds: float
    replica: str = ""
    prompt_tokens_estimated: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prefix: Prefix | None = None

    @property
    def arrival(self) -> float:
        return self.time - self.duration_seconds

    @property
    def tokens(self) -> int:
        return self.prompt_tokens_estimated if self.prompt_tokens is None else self.prompt_tokens


Chain = tuple[int, ...]


def parse(lines: Lines, tell: Tell) -> Source:
    decoder = msgspec.json.Decoder(Entry)

    def checked(text: bytes) -> Entry | None:
        try:
            entry = decoder.decode(text) if text.lstrip().startswith(b"{") else None
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            entry = None
        if entry is None:
            return None
        at_least(0, duration_seconds=entry.duration_seconds)
        if (prefix := entry.prefix) is not None:
            at_least(0, blocks=prefix.blocks, shared=prefix.shared)
            if prefix.shared > prefix.blocks or (prefix.shared and prefix.earlier is None):
                raise ValueError("`prefix` shares blocks that it does not have, or with nobody")
        return entry

    entries = [entry for entry in lines.each(checked) if entry is not None]
    chains = chains_of([entry.prefix for entry in entries if entry.prefix is not None])
    sent = sorted((entry for entry in entries if entry.replica and entry.tokens), key=lambda entry: entry.arrival)
    if not sent:
        raise TraceError(f"{lines.path}: no request that a replica got")
    report_left_out(tell, len(lines.texts) - len(entries), len(entries) - len(sent))
    if all(entry.prefix is None for entry in sent):
        tell("no prefixes in this log, so nothing can be cached: set [server] log_blocks = true")
    trace = Trace(tuple(requests_of(sent, chains)))
    return lambda seed: trace


def report_left_out(tell: Tell, strange: int, unsent: int) -> None:
    for count, what in ((strange, "are not JSON objects"), (unsent, "are of requests without a prompt or a replica")):
        if count:
            tell(f"lines of the log left out because they {what}: {count}")


def chains_of(prefixes: Iterable[Prefix]) -> dict[tuple[str, int], Chain]:
    """Ids of the log's blocks, by the run of the gateway and the number of the request in it."""
    ids: dict[tuple[str, int, int], int] = {}
    chains: dict[tuple[str, int], Chain] = {}
    for prefix in sorted(prefixes, key=lambda prefix: (prefix.run, prefix.number)):
        shared: Chain = ()
        if prefix.earlier is not None:
            # An earlier request that is not in this file: named by what is known of it.
            earlier = chains.get((prefix.run, prefix.earlier), ())
            missing = range(len(earlier), prefix.shared)
            named = [ids.setdefault((prefix.run, prefix.earlier, place), len(ids)) for place in missing]
            shared = (*earlier[: prefix.shared], *named)
        places = range(len(shared), prefix.blocks)
        own = [ids.setdefault((prefix.run, prefix.number, place), len(ids)) for place in places]
        chains[prefix.run, prefix.number] = (*shared, *own)
    return chains


def requests_of(entries: Sequence[Entry], chains: dict[tuple[str, int], Chain]) -> Iterable[Request]:
    block_tokens = tokens_of_a_block(entries)
    numbers: dict[tuple[int, int], int] = {}
    ended_at: dict[str, float] = {}
    start = entries[0].arrival
    for entry in entries:
        prefix, session, think = entry.prefix, None, None
        blocks: list[int] = []
        if prefix is not None:
            laid = laid_over(chains[prefix.run, prefix.number], block_tokens, entry.tokens)
            blocks = [numbers.setdefault(block, len(numbers)) for block in laid]
            session = prefix.session
        if session is not None:
            if session in ended_at:
                think = max(0.0, entry.arrival - ended_at[session])
            ended_at[session] = entry.time
        output = max(1, entry.completion_tokens or 0)
        yield Request(entry.arrival - start, entry.tokens, output, tuple(blocks), session, think)


def tokens_of_a_block(entries: Sequence[Entry]) -> float:
    """Mean over the log; a prompt ends half a block after its last full one."""
    known = [(entry.tokens, entry.prefix.blocks + 0.5) for entry in entries if entry.prefix is not None]
    return sum(tokens for tokens, _ in known) / sum(blocks for _, blocks in known) if known else float(BLOCK_TOKENS)


def laid_over(chain: Chain, block_tokens: float, tokens: int) -> Iterable[tuple[int, int]]:
    """For each block of the trace the block of the log where it ends, and its own place: two may end in the same."""
    for place in range(tokens // BLOCK_TOKENS):
        end = -int(-(place + 1) * BLOCK_TOKENS // block_tokens)
        if end > len(chain):
            return
        yield chain[end - 1], place
