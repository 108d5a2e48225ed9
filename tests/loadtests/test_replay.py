"""`warmlane replay`: the report, its JSON, and what the command refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.core.settings import POLICY_NAMES
from loadtests.report import Plan, as_table, imbalance, quantile, replay
from loadtests.simulator import Fleet
from loadtests.traces import Request, Synthetic, Trace, synthetic, write

SMALL = Fleet(replicas=4, cache_tokens=40_000)
TRACE = synthetic(Synthetic(requests=300, groups=6, system_tokens=4096), 1)
CONTRACT = {
    "policy",
    "load",
    "hit_pct",
    "ceiling_pct",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "request_imbalance",
    "work_imbalance",
    "shed_pct",
}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.jsonl"
    write(path, TRACE.requests)
    return path


def warmlane(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_json_has_a_row_for_each_policy_and_the_bound(sample: Path, capsys):
    code, out, err = warmlane(capsys, "--trace", sample, "--replicas", 3, "--cache-tokens", 30_000, "--json")
    answer = json.loads(out)
    assert code == 0
    assert [row["policy"] for row in answer["rows"]] == list(POLICY_NAMES)
    for row in [*answer["rows"], answer["bound"]]:
        assert row.keys() >= CONTRACT
        assert row["load"] == pytest.approx(1.0, abs=0.01)
    assert len(err.splitlines()) == len(POLICY_NAMES)


def test_the_table_shows_the_same(sample: Path, capsys):
    code, out, _ = warmlane(capsys, "--trace", sample, "--policy", "least-work", "--policy", "cache-cost")
    lines = [line.split()[0] for line in out.splitlines() if line]
    assert code == 0
    assert lines[-4:] == ["policy", "least-work", "cache-cost", "bound"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "--policy: unknown policy 'best'"),
        (["--load", "heavy"], "--load: a number above 0 or `recorded`, not 'heavy'"),
        (["--load", "-1"], "--load: a number"),
        (["--load", "nan"], "--load: a number"),
        (["--speed", "2"], "add --load recorded"),
        (["--load", "recorded", "--speed", "0"], "--speed: must be above 0"),
        (["--replicas", "0"], "--replicas"),
        (["--trace", "/nowhere/trace"], "--trace: /nowhere/trace: No such file"),
    ],
)
def test_wrong_usage_is_one_line_and_2(sample: Path, capsys, arguments: list[str], message: str):
    code, out, err = warmlane(capsys, "--trace", sample, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_recorded_keeps_the_rate_and_speed_multiplies_it():
    loads = [
        replay(TRACE, Plan(SMALL, load=None, speed=speed, policies=("random",))).bound.load for speed in (1.0, 2.0)
    ]
    offered = TRACE.input_tokens / TRACE.seconds / 80_000
    assert loads == pytest.approx([offered, 2 * offered])


def test_hits_and_losses_are_all_input_tokens_and_the_cache_is_worth_something():
    report = replay(TRACE, Plan(SMALL, load=1.0))
    for row in (*report.rows, report.bound):
        losses = row.lost_new_pct + row.lost_spilled_pct + row.lost_belief_pct + row.lost_evicted_pct
        assert row.hit_pct + losses == pytest.approx(100.0)
        assert min(row.lost_spilled_pct, row.lost_belief_pct, row.lost_evicted_pct) >= -1e-9
        assert 1.0 <= row.request_imbalance <= 4.0
    rows = {row.policy: row for row in report.rows}
    assert rows["cache-cost"].hit_pct > rows["least-work"].hit_pct + 5
    assert rows["random"].lost_spilled_pct > rows["cache-cost"].lost_spilled_pct
    assert report.bound.hit_pct >= rows["cache-cost"].hit_pct
    assert report.bound.ttft_mean_s <= min(row.ttft_mean_s for row in report.rows)


def test_a_hit_is_counted_to_the_token():
    trace = Trace((Request(0.0, 2000, 1, (1, 2, 3)), Request(5.0, 2000, 1, (1, 2, 9))))
    (row,) = replay(trace, Plan(Fleet(replicas=1), load=None, policies=("cache-cost",))).rows
    assert row.hit_pct == row.ceiling_pct == pytest.approx(100 * 1024 / 4000)
    assert row.ttft_mean_s == pytest.approx((0.1 + 976 / 20_000) / 2)
    assert row.lost_new_pct == pytest.approx(100 - row.hit_pct)


def test_the_same_seeds_give_the_same_report_and_more_seeds_their_mean():
    plan = Plan(SMALL, policies=("random",))
    (one,), (two,) = replay(TRACE, plan).rows, replay(TRACE, Plan(SMALL, policies=("random",), seeds=2)).rows
    assert replay(TRACE, plan).rows == (one,)
    assert one != two
    assert as_table(replay(TRACE, plan)) == as_table(replay(TRACE, plan))


def test_overload_sheds_unless_told_never_to():
    """6,000 at once for one replica: 4,096 go in, 1,024 wait, and in a minute some 600 of these can take a place."""
    trace = Trace(tuple(Request(0.0, 2000, 1) for _ in range(6000)))
    plans = [Plan(Fleet(replicas=1), load=None, policies=("least-work",), sheds=sheds) for sheds in (True, False)]
    (hurried,), (patient,) = (replay(trace, plan).rows for plan in plans)
    assert hurried.shed_pct == pytest.approx(100 * (6000 - 4096 - 600) / 6000, abs=1)
    assert patient.shed_pct == 0
    assert patient.ttft_p50_s == pytest.approx(300.0, rel=0.01)


def test_quantiles_are_nearest_ranks():
    assert [quantile([1, 2, 3, 4], share) for share in (0.25, 0.5, 0.9, 0.99)] == [1, 2, 4, 4]
    assert quantile([], 0.5) == 0.0


def test_imbalance_is_the_busiest_by_the_mean():
    assert imbalance([4, 0]) == 2.0
    assert imbalance([0, 0]) == 1.0
