"""The comparison on real replicas, without them: chats, clients against a real socket, figures, tables, clean-up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from loadtests.bench.processes import BenchmarkFailure, stat_fields
from loadtests.engines.client import Answer, Load, ask, new_client, run_workload
from loadtests.engines.fleet import BLOCK_TOKENS, CACHE_BLOCKS, Counters, read_cache_tokens, read_counters, running
from loadtests.engines.measure import Decode, Facts, Prefill, Sustained
from loadtests.engines.predict import as_table, busy_seconds, fleet_of, predictions, prefill_curve
from loadtests.engines.predict_gpu import Line, fleet_on_gpu, simulate
from loadtests.engines.report import Run, figures_of, percentile, read_runs, write_report
from loadtests.engines.routers import ROUTERS
from loadtests.engines.run import plan, read_options
from loadtests.engines.workload import REGIMES, WORDS, Turn, Workload, write_body, write_turns
from workers.worker import Worker, WorkerFailed

SMALL = Workload(
    users=3,
    groups=2,
    system_tokens=50,
    context_tokens=40,
    turn_tokens=10,
    max_tokens=4,
    think_seconds=0.001,
    turns=3,
    chats=2,
)
DEADLINE_SECONDS = 20.0

# -- the workload


def messages(turn: Turn) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(turn.body)["messages"]
    return found


def all_turns(seed: int) -> list[list[Turn]]:
    return [list(write_turns(SMALL, seed, user, "m")) for user in range(SMALL.users)]


def test_the_same_seed_writes_the_same_requests_and_another_seed_others() -> None:
    assert all_turns(1) == all_turns(1)
    assert not {turn.body for user in all_turns(1) for turn in user} & {
        turn.body for user in all_turns(2) for turn in user
    }


def test_every_turn_of_a_chat_begins_with_the_turn_before() -> None:
    for turns in all_turns(1):
        assert [turn.number for turn in turns] == [1, 2, 3, 1, 2, 3]
        for before, after in pairwise(turns):
            same_chat = before.session == after.session
            assert same_chat is (after.number > 1)
            assert (messages(after)[: len(messages(before))] == messages(before)) is same_chat


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    systems = [messages(turns[0])[0] for turns in all_turns(1)]
    assert systems[0] == systems[2] != systems[1]
    questions = [messages(turn)[1]["content"] for turns in all_turns(1) for turn in turns if turn.number == 1]
    assert len(set(questions)) == SMALL.users * SMALL.chats


def test_prompts_have_the_promised_sizes() -> None:
    last = messages(all_turns(1)[0][2])
    assert [len(one["content"].split()) for one in last] == [50, 40, 4, 10, 4, 10]
    assert SMALL.chat_tokens == 40 + 2 * (4 + 10)
    assert SMALL.working_set_tokens == 3 * 68 + 2 * 50
    assert SMALL.requests == sum(map(len, all_turns(1)))


def test_words_are_distinct_so_that_equal_text_means_equal_seed() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100


@pytest.mark.parametrize(("regime", "share"), [("fits", 0.6), ("exceeds", 2.0)])
def test_regimes_are_what_they_are_called(regime: str, share: float) -> None:
    caches = 3 * CACHE_BLOCKS * BLOCK_TOKENS
    assert REGIMES[regime].working_set_tokens / caches == pytest.approx(share, rel=0.1)


# -- clients, against a server that says what it is told to


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def text(content: str) -> bytes:
    return event({"choices": [{"delta": {"content": content}}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 90, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 64}},
    }
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FULL = HEAD + text("") + text("a") + text("b") + USAGE + b"data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: bytes, pause_seconds: float = 0.0) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its address, and the requests that it got so far."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        await asyncio.sleep(pause_seconds)
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", seen


async def one_answer(answer: bytes) -> Answer:
    async with server(answer) as (url, _), new_client() as client:
        body = write_body("m", [{"role": "user", "content": "hi"}], 4)
        return await ask(client, url, Turn("s", 1, 0.0, body), max_tokens=4)


async def test_an_answer_is_timed_at_its_first_text_and_read_to_its_usage() -> None:
    answer = await one_answer(FULL)
    assert answer.failure == ""
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (90, 64, 4)
    assert answer.first_seconds is not None
    assert 0 < answer.first_seconds <= answer.seconds


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "status 503"),
        (HEAD + event({"error": {"message": "engine died"}}), "engine died"),
        (HEAD + text("a"), "0 tokens instead of 4"),
        (HEAD + text("") + USAGE, "4 tokens instead of 4"),
        (HEAD + b"data: {nonsense\n\n", "DecodeError"),
        (b"", "RemoteProtocolError"),
    ],
)
async def test_anything_but_a_full_answer_is_a_failure(answer: bytes, failure: str) -> None:
    assert failure in (await one_answer(answer)).failure


async def test_all_requests_are_sent_with_their_session_and_a_failure_does_not_end_a_chat() -> None:
    async with server(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n") as (url, seen):
        load = await run_workload(SMALL, 1, url, "m", DEADLINE_SECONDS)
    sent = {turn.body for turns in all_turns(1) for turn in turns}
    assert {request.partition(b"\r\n\r\n")[2] for request in seen} == sent
    assert b"x-session-id: 1-" in seen[0]
    figures = figures_of(load)
    assert (figures.requests, figures.failed, figures.unsent) == (0, SMALL.requests, 0)
    assert figures.ttft_mean is None


async def test_a_run_is_cut_short_and_says_what_it_left_out() -> None:
    async with server(FULL, pause_seconds=DEADLINE_SECONDS) as (url, _):
        load = await run_workload(SMALL, 1, url, "m", seconds=0.2)
    assert load.unsent == SMALL.requests


# -- figures and tables


def answers(*first: float) -> Load:
    rows = [Answer(1 + at % 2, 9.0, value, 100, 25, 4) for at, value in enumerate(first)]
    return Load(len(rows), rows, wall_seconds=10.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_figures_are_those_of_full_answers() -> None:
    load = answers(1.0, 2.0, 3.0, 4.0)
    load.answers.append(Answer(1, 60.0, 50.0, 100, 100, 1, failure="cut off"))
    load.planned = 7
    figures = figures_of(load)
    assert (figures.requests, figures.failed, figures.unsent, figures.first_failure) == (4, 1, 2, "cut off")
    assert (figures.ttft_mean, figures.ttft_p50, figures.later_ttft_mean) == (2.5, 2.0, 3.0)
    assert (figures.cached_share, figures.requests_per_second, figures.output_tokens) == (0.25, 0.4, 16)


def make_run(router: str, repeat: int, *first: float, served: list[int] | None = None, foreign: float = 0.0) -> Run:
    return Run(
        started_at="2030-01-01 00:00:00",
        router=router,
        regime="fits",
        repeat=repeat,
        seed=repeat,
        figures=figures_of(answers(*first)),
        replica_requests=served or [1, 1],
        router_cpu_seconds=0.1,
        foreign_cores=foreign,
        cache_tokens=152,
        workload=SMALL,
        versions={"vllm": "1"},
        machine="a machine",
    )


RUNS = [
    make_run("cache-cost", 0, 1.0, served=[3, 1]),
    make_run("least-requests", 0, 2.0),
    make_run("sglang-router", 0, 1.0),
    make_run("cache-cost", 1, 2.0, served=[3, 1]),
    make_run("least-requests", 1, 9.0),
    make_run("sglang-router", 1, 4.0),
]


def test_the_table_gives_the_mean_over_repeats_and_its_spread() -> None:
    report = write_report(RUNS)
    assert (
        "| cache-cost | 1.500 (1.000–2.000) | 1.500 | 1.50 | 1.50 (1.00–2.00) | 25.0 (25.0–25.0) | 0.10 | 1.50 |"
        in report
    )
    assert "**fits**: 3 users in 2 groups, 18 requests a run, working set 1.0 of all caches" in report
    assert "INCOMPLETE" not in report
    assert "NOISY" not in report


def test_ours_is_compared_repeat_by_repeat_with_the_one_that_is_best_on_average() -> None:
    assert "| TTFT mean | sglang-router | 0.75 | 0.50 | 1.00 |" in write_report(RUNS)
    assert "| TTFT mean | cache-cost | 3.25 | 2.00 | 4.50 |" in write_report(RUNS, ours="least-requests")


def test_one_router_alone_is_compared_with_nobody() -> None:
    assert "best of the others" not in write_report(RUNS[:1])


def test_the_report_says_what_makes_figures_doubtful() -> None:
    cut = msgspec.structs.replace(RUNS[1], figures=msgspec.structs.replace(RUNS[1].figures, unsent=5))
    report = write_report([RUNS[0], cut, make_run("round-robin", 0, 1.0, foreign=0.7)])
    assert "**INCOMPLETE** least-requests, fits, repeat 0: 5 unsent, 0 failed" in report
    assert "**NOISY**: in 1 of 3 runs" in report
    assert "worst 0.70: round-robin" in report


def test_lines_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in RUNS))
    assert read_runs(file) == RUNS


# -- the plan


def test_every_router_has_each_place_in_the_order_and_each_cell_once() -> None:
    options = read_options(["--repeats", "3", "--routers", "round-robin,cache-cost,session-hash"])
    trials = list(plan(options))
    assert len(set(trials)) == len(trials) == 3 * len(REGIMES) * 3
    rounds = [[trial.router for trial in trials[at : at + 3]] for at in range(0, len(trials), 3)]
    for place in range(3):
        assert sorted(one[place] for one in rounds) == sorted([*options.routers] * len(REGIMES))


def test_smoke_is_small_unless_told_otherwise_and_leaves_the_kept_results_alone() -> None:
    smoke = read_options(["--smoke", "--routers", "session-hash"])
    assert (smoke.repeats, smoke.regimes, smoke.routers) == (1, ("fits",), ("session-hash",))
    assert "loadtests" not in smoke.output.parts[-3:]


@pytest.mark.parametrize(
    "option", [["--regimes", "fit"], ["--routers", "nginx"], ["--repeats", "0"], ["--seconds", "0"]]
)
def test_wrong_options_are_refused_by_name(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(option)
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_all_routers_can_be_named() -> None:
    assert read_options([]).routers == tuple(ROUTERS)


# -- replicas


METRICS = """\
# HELP vllm:request_success_total x
vllm:request_success_total{engine="0",finished_reason="stop"} 2.0
vllm:request_success_total{engine="0",finished_reason="length"} 40.0
vllm:prefix_cache_queries_total{engine="0"} 1.5e+03
vllm:prefix_cache_hits_total{engine="0"} 700.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="512"} 1.0
"""


def test_counters_are_sums_over_a_family() -> None:
    assert read_counters(METRICS) == Counters(requests=42, queried_tokens=1_500, hit_tokens=700)


def test_the_size_of_the_cache_is_read_or_missed_aloud() -> None:
    assert read_cache_tokens(METRICS) == 16_384
    with pytest.raises(BenchmarkFailure, match="KV cache"):
        read_cache_tokens("")


HEALTHY = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = "import sys; sys.exit('no such model')"


def worker(script: str, log: object) -> Worker:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Worker((sys.executable, "-c", script, str(port)), {}, f"http://127.0.0.1:{port}", output=log)  # type: ignore[arg-type]


def group_is_gone(leader: int) -> bool:
    """No process of the session is left, children included; zombies do not count."""
    for entry in Path("/proc").iterdir():
        fields = stat_fields(int(entry.name)) if entry.name.isdigit() else []
        if fields and fields[0] != "Z" and int(fields[2]) == leader:
            return False
    return True


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_replicas_and_their_children_are_gone_after_a_run_that_failed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        workers = [worker(HEALTHY, log), worker(HEALTHY, log)]
        leaders: list[int | None] = []

        async def fail_in_the_middle() -> None:
            async with running(workers, DEADLINE_SECONDS):
                leaders.extend(one.pid for one in workers)
                assert all(leader and os.getpgid(leader) == leader for leader in leaders)
                raise BenchmarkFailure("in the middle")

        with pytest.raises(BenchmarkFailure, match="in the middle"):
            await fail_in_the_middle()
        for leader in leaders:
            assert leader is not None
            await wait_until(lambda leader=leader: group_is_gone(leader))  # type: ignore[misc]


async def test_one_replica_that_does_not_start_takes_the_others_with_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        workers = [worker(HEALTHY, log), worker(BROKEN, log)]
        with pytest.raises(WorkerFailed, match="no such model"):
            async with running(workers, DEADLINE_SECONDS):
                pytest.fail("it is not up")
        leader = workers[0].pid
        assert leader is not None
        await wait_until(lambda: group_is_gone(leader))


# -- the simulator's prediction

FACTS = Facts(
    machine="a machine",
    vllm="1",
    model="tiny",
    replicas=3,
    cache_tokens=16_384,
    floor_seconds=0.01,
    prefill_alone=[
        Prefill(1_000, 0.16, 0.01, 6_667),
        Prefill(4_000, 1.22, 0.02, 3_333),
        Prefill(6_000, 2.43, 0.03, 2_500),
    ],
    sustained=Sustained(4_000, 30, 10, 19.5),
    decode_alone=[Decode(1, 300.0), Decode(8, 150.0)],
    decode_all_busy=[Decode(1, 200.0), Decode(8, 100.0)],
)


def test_the_simulated_fleet_is_the_measured_one() -> None:
    fleet = fleet_of(FACTS)
    assert (fleet.replicas, fleet.cache_tokens, fleet.decode_rate) == (3, 16_384, 300)
    # 0.1 ms for the first token, twice as much from token 1,000 on: 1.2 s for 4,000 alone, and 0.1 s for an answer of
    # 30.
    assert (fleet.prefill_rate, fleet.attention_tokens) == pytest.approx((10_000, 1_000))
    share = fleet.full_speed_replicas / 3
    assert [fleet.share_of_each(busy) for busy in (0, 1, 3)] == pytest.approx([1, 1, share])
    # Two prompts at a time: while one decodes the other is in prefill, so ten take less than ten times 1.3 s alone.
    assert 10 * 1.2 < busy_seconds(fleet, FACTS.sustained, 1.0) < 10 * 1.3
    assert busy_seconds(fleet, FACTS.sustained, share) == pytest.approx(19.5, rel=1e-3)
    assert fleet.decode_slowdown == pytest.approx(1 / 7)


def test_replicas_that_lose_time_by_taking_turns_are_slower_together_than_one_alone() -> None:
    slow = msgspec.structs.replace(FACTS, sustained=msgspec.structs.replace(FACTS.sustained, seconds=60.0))
    fleet = fleet_of(slow)
    assert fleet.full_speed_replicas < 1
    assert fleet.share_of_each(1) == 1
    assert fleet.share_of_each(2) == pytest.approx(fleet.full_speed_replicas / 2)


def test_four_replicas_on_a_gpu_were_predicted() -> None:
    folder = Path(__file__).parents[2] / "loadtests" / "results"
    facts = msgspec.json.decode((folder / "2026-12-01-h200-llama8b-facts.json").read_bytes(), type=Facts)
    lines = (folder / "2026-12-01-h200-llama8b.jsonl").read_text().splitlines()
    measured = [msgspec.json.decode(line, type=Line) for line in lines]
    line = next(one for one in measured if (one.router, one.users) == ("warmlane", 24))
    simulated = simulate(line, fleet_on_gpu(facts))
    assert simulated.ttft_mean == pytest.approx(line.ttft_mean, rel=0.15)
    assert simulated.cached_share == pytest.approx(line.cached_share, abs=0.03)


def test_prompts_that_show_no_attention_have_their_mean_rate() -> None:
    flat = [Prefill(1_000, 0.11, 0.01, 10_000), Prefill(4_000, 0.41, 0.01, 10_000)]
    assert prefill_curve(flat) == (pytest.approx(1e-4), pytest.approx(0.0, abs=1e-12))
    assert prefill_curve(flat[:1]) == (pytest.approx(1e-4), 0.0)


def test_predictions_are_of_our_own_policies_and_name_what_is_off() -> None:
    found = predictions(RUNS, fleet_of(FACTS))
    assert [(one.regime, one.policy) for one in found] == [("fits", "cache-cost"), ("fits", "least-requests")]
    assert found[0].measured_seconds == 1.5
    assert 0 < found[0].simulated_seconds < 1.0
    lines = as_table(found).splitlines()
    assert "| no" in next(line for line in lines if "least-requests" in line)
