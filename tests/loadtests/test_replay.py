"""`warmlane replay`: the report, its JSON, and what the command refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.core.settings import POLICY_NAMES, RoutingSettings
from loadtests.options import Options
from loadtests.replay import Refused, plans_of, restart_of
from loadtests.report import Plan, as_table, imbalance, quantile, replay
from loadtests.simulator import Fleet, GatewayRestart, Restart, Sharing
from loadtests.traces import Request, Synthetic, Trace, generator_named, synthetic, write

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


def test_several_loads_are_one_report(sample: Path, capsys):
    _, out, err = warmlane(
        capsys, "--trace", sample, "--policy", "random", "--load", "0.5,1", "--load", "recorded", "--json"
    )
    answer = json.loads(out)
    recorded = TRACE.input_tokens / TRACE.seconds / 160_000
    loads = pytest.approx([0.5, 1.0, recorded], abs=0.001)
    assert [row["load"] for row in answer["bounds"]] == loads
    assert answer["bound"] == answer["bounds"][0]
    assert [row["load"] for row in answer["rows"] if row["policy"] == "random"] == loads
    assert [line.split(":")[1] for line in err.splitlines()][:2] == [" random, load 0.5", " least-work, load 0.5"]
    _, out, _ = warmlane(capsys, "--trace", sample, "--policy", "random", "--load", "0.5,1")
    assert [line.split()[4][:4] for line in out.splitlines() if "requests at load" in line] == ["0.50", "1.00"]


def test_the_cache_blind_row_is_always_there(sample: Path, capsys):
    _, out, _ = warmlane(capsys, "--trace", sample, "--policy", "cache-cost", "--json")
    assert [row["policy"] for row in json.loads(out)["rows"]] == ["cache-cost", "least-work"]


def test_the_words_become_the_fleet():
    (plan,) = plans_of(
        Options(
            replicas=3,
            cache_tokens=1000,
            prefill_rate=100.0,
            decode_rate=5.0,
            max_num_seqs=2,
            speeds="1,0.5",
            network_delay_ms=20.0,
            restart="2@300+10.5",
            scrape_interval="never",
            hold=False,
            never_shed=True,
            limit=7,
        )
    )
    assert plan.fleet == Fleet(
        replicas=3,
        cache_tokens=1000,
        prefill_rate=100.0,
        decode_rate=5.0,
        max_num_seqs=2,
        speeds=(1.0, 0.5),
        network_delay_seconds=0.02,
        restart=Restart(2, 300.0, 10.5),
        scrape_seconds=None,
    )
    assert (plan.hold, plan.sheds, plan.limit) == (False, False, 7)
    assert plan.routing("random").hold is False
    (plan,) = plans_of(Options())
    assert plan.fleet == Fleet()
    assert plan.routing("random") == RoutingSettings(policy="random")
    assert restart_of("0@1", 1) == Restart(0, 1.0)


def test_only_the_first_requests(sample: Path, capsys):
    _, out, _ = warmlane(capsys, "--trace", sample, "--limit", 20, "--policy", "random", "--json")
    assert json.loads(out)["requests"] == 20


def test_traffic_that_is_made_up_differs_by_seed(capsys):
    arguments = ["--synthetic", "rag,requests=40,passages=2", "--policy", "random", "--replicas", 2, "--json"]
    reports = []
    for more in ([], [], ["--seeds", 2]):
        code, out, _ = warmlane(capsys, *arguments, *more)
        reports.append(json.loads(out))
        assert (code, reports[-1]["requests"]) == (0, 40)
    assert reports[0] == reports[1]
    assert reports[0]["bound"]["ceiling_pct"] != reports[2]["bound"]["ceiling_pct"]


def test_a_plot_is_drawn_beside_the_table(sample: Path, capsys, tmp_path: Path):
    path = tmp_path / "plot.svg"
    code, out, _ = warmlane(capsys, "--trace", sample, "--policy", "random", "--plot", path)
    assert code == 0
    assert "bound" in out
    assert ">random</text>" in path.read_text()


WRONG = [
    (["--policy", "best"], "--policy: unknown policy 'best'"),
    (["--load", "heavy"], "--load: a number above 0 or `recorded`, not 'heavy'"),
    (["--load", "-1"], "--load: a number"),
    (["--load", "nan"], "--load: a number"),
    (["--load", "1,,2"], "--load: a number"),
    (["--speed", "2"], "add --load recorded"),
    (["--load", "recorded,1", "--speed", "2"], "add --load recorded"),
    (["--load", "recorded", "--speed", "0"], "--speed: must be above 0"),
    (["--replicas", "0"], "--replicas"),
    (["--seeds", "0"], "--seeds"),
    (["--limit", "0"], "--limit"),
    (["--prefill-rate", "0"], "--prefill-rate: must be above 0"),
    (["--prefill-rate", "nan"], "--prefill-rate: must be above 0"),
    (["--decode-rate", "inf"], "--decode-rate: must be above 0"),
    (["--max-num-seqs", "0"], "--max-num-seqs"),
    (["--network-delay-ms", "-1"], "--network-delay-ms: must be 0 or more"),
    (["--speeds", "1,fast"], "--speeds: must be above 0"),
    (["--replicas", "2", "--speeds", "1,1,1"], "--speeds: 3 speeds for 2 replicas"),
    (["--restart", "1"], "--restart: REPLICA@SECONDS or REPLICA@SECONDS+DOWN, as 2@300+30, not '1'"),
    (["--restart", "1@1.2.3"], "--restart: REPLICA@SECONDS"),
    (["--replicas", "2", "--restart", "2@5"], "--restart: there is no replica 2: they are 0 to 1"),
    (["--scrape-interval", "often"], "--scrape-interval: must be above 0 or `never`"),
    (["--synthetic", "rag"], "--synthetic and --trace: one of them"),
    (["--chats", "2"], "--trace: .*: holds no chats"),
    (["--plot", "plot.pdf"], "--plot: plot.pdf: must end in .png or .svg"),
    (["--trace", "/nowhere/trace"], "--trace: /nowhere/trace: No such file"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_usage_is_one_line_and_2(sample: Path, capsys, arguments: list[str], message: str):
    code, out, err = warmlane(capsys, "--trace", sample, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message if ".*" in message else re.escape(message), err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace FILE or --synthetic NAME says what to replay"),
        (["--synthetic", "best"], "--synthetic: unknown name 'best'; one of hot-prompt, samples, bursty, rag, chats"),
        (["--synthetic", "rag,k=3"], "--synthetic: rag: 'k=3' is none of its settings; they are requests, rate"),
        (["--synthetic", "rag,rate"], "--synthetic: rag: 'rate' is none of its settings"),
        (["--synthetic", "rag,passages=2.5"], "--synthetic: passages: '2.5' is no whole number"),
        (["--synthetic", "rag,rate=x"], "--synthetic: rate: 'x' is no number"),
        (["--synthetic", "rag,rate=0"], "--synthetic: rate: must be above 0"),
        (["--synthetic", "chats,think_seconds=-1"], "--synthetic: think_seconds: must be 0 or more"),
        (["--synthetic", "chats", "--chats", "2"], "--chats: is for a file of chats"),
    ],
)
def test_traffic_must_be_named(capsys, arguments: list[str], message: str):
    code, out, err = warmlane(capsys, *arguments)
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


@pytest.mark.parametrize(
    ("hold", "served"),
    [(False, 4096 + 600), (True, 600)],
    ids=["4,096 go in, 1,024 wait, 600 of these get a place", "1,024 wait, 600 of these get a place"],
)
def test_overload_sheds_unless_told_never_to(hold: bool, served: int):
    """6,000 at once for one replica that does 600 in the minute that they may wait."""
    trace = Trace(tuple(Request(0.0, 2000, 1) for _ in range(6000)))
    plan = Plan(Fleet(replicas=1), load=None, policies=("least-work",), hold=hold)
    assert replay(trace, plan).rows[0].shed_pct == pytest.approx(100 * (6000 - served) / 6000, abs=1)


def test_nobody_is_shed_who_may_wait_for_ever():
    trace = Trace(tuple(Request(0.0, 2000, 1) for _ in range(1000)))
    plan = Plan(Fleet(replicas=1), load=None, policies=("least-work",), sheds=False)
    report = replay(trace, plan)
    for row in (*report.rows, report.bound):
        assert row.shed_pct == 0
        assert row.ttft_p50_s == pytest.approx(50.0, rel=0.01)
        assert row.throughput_rps == pytest.approx(10.0, rel=0.01)


def test_quantiles_are_nearest_ranks():
    assert [quantile([1, 2, 3, 4], share) for share in (0.25, 0.5, 0.9, 0.99)] == [1, 2, 4, 4]
    assert quantile([], 0.5) == 0.0


def test_imbalance_is_the_busiest_by_the_mean():
    assert imbalance([4, 0]) == 2.0
    assert imbalance([0, 0]) == 1.0


def test_a_closed_loop_offers_no_more_than_is_answered():
    """Eight users, one slow replica: in an open loop the queue grows, in a closed one nobody asks before the answer."""
    trace = synthetic(generator_named("chats,users=8,turns=4,chats=2,context_tokens=4000"), 1)
    fleet = Fleet(replicas=1, cache_tokens=200_000, prefill_rate=4_000.0)
    reports = [replay(trace, Plan(fleet, None, policies=("random",), closed_loop=closed)) for closed in (False, True)]
    (opened,), (closed,) = (report.rows for report in reports)
    assert opened.load == pytest.approx(trace.input_tokens / trace.seconds / 4_000)
    assert closed.load < opened.load
    assert closed.ttft_mean_s < opened.ttft_mean_s / 2
    for report in reports:
        for row in (*report.rows, report.bound):
            assert row.hit_pct + row.lost_new_pct <= 100.0 + 1e-9
            assert row.throughput_rps > 0
    assert "in a closed loop" in as_table(reports[1])
    assert ["no bound here" in as_table(report) for report in reports] == [False, True]


def test_the_command_line_knows_closed_loops_and_several_gateways(capsys):
    arguments = ["--synthetic", "chats,users=4,turns=2,chats=1", "--policy", "random", "--json"]
    code, out, _ = warmlane(capsys, *arguments, "--closed-loop", "--gateways", 2)
    assert (code, json.loads(out)["closed_loop"], json.loads(out)["requests"]) == (0, True, 8)
    (plan,) = plans_of(
        Options(
            gateways=3,
            shared_state=True,
            closed_loop=True,
            decode_slowdown=0.1,
            step_tokens=512,
            preempts=True,
            cache_answers=True,
            shared_processor=True,
        )
    )
    assert (plan.closed_loop, plan.load) == (True, None)
    assert plan.fleet == Fleet(
        gateways=3,
        shared_state=True,
        decode_slowdown=0.1,
        step_tokens=512,
        preempts=True,
        cache_answers=True,
        shared_processor=True,
    )
    code, _, err = warmlane(capsys, *arguments, "--shared-state")
    assert (code, err) == (2, "warmlane: --shared-state: is for several --gateways\n")


def test_the_command_line_knows_what_gateways_tell_each_other():
    (plan,) = plans_of(
        Options(gateways=4, shared_view=True, view_delay=0.5, view_loss=0.1, gateway_restart="0@10,3@20.5+4")
    )
    assert plan.fleet == Fleet(
        gateways=4,
        sharing=Sharing(0.5, 0.1),
        gateway_restarts=(GatewayRestart(0, 10.0), GatewayRestart(3, 20.5, 4.0)),
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (Options(shared_view=True), "--shared-view: is for several --gateways"),
        (Options(gateways=2, shared_state=True, shared_view=True), "--shared-view: with --shared-state they know"),
        (Options(gateways=2, view_delay=1.0), "--view-delay: is for --shared-view"),
        (Options(gateways=2, view_loss=0.5), "--view-loss: is for --shared-view"),
        (Options(gateways=2, shared_view=True, view_loss=1.5), "--view-loss: a share from 0 to 1"),
        (Options(gateways=2, shared_view=True, view_delay=-1.0), "--view-delay: must be 0 or more"),
        (Options(gateways=2, gateway_restart="2@10"), "--gateway-restart: there is no gateway 2: they are 0 to 1"),
        (Options(gateways=2, gateway_restart="now"), "--gateway-restart: GATEWAY@SECONDS or GATEWAY@SECONDS+DOWN"),
        (Options(gateways=2, shared_state=True, gateway_restart="1@10"), "--gateway-restart: with --shared-state"),
    ],
)
def test_sharing_that_makes_no_sense_is_refused(options, complaint):
    with pytest.raises(Refused) as refused:
        plans_of(options)
    assert str(refused.value).startswith(complaint)
