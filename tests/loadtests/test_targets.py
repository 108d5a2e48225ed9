"""The table of targets: what counts as met, what is measured, and that every row can be run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.core.model import RouteRequest
from gateway.core.settings import RoutingSettings
from loadtests import targets
from loadtests.fleet import Fleet, Restart
from loadtests.simulator import Simulator
from loadtests.target_rows import ROWS, Lengths, Promise, Row, SampleGroups, measure_samples, weighted_router
from loadtests.traces import BLOCK_TOKENS, Request, Synthetic, write
from loadtests.trials import SIMPLE, Bench, Measured, Trial, as_ratio, false_credit_tokens

NOWHERE = Bench(Path("/nowhere"))


def row(*promises: Promise, any_is_enough: bool = False) -> Row:
    return Row("a-row", "some workload", "1", promises, lambda bench, seed: Measured({}), any_is_enough=any_is_enough)


def judged(promise: Promise, *reached: float) -> targets.Verdict:
    return targets.verdicts(row(promise), [Measured({promise.figure: value}) for value in reached])[0]


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reached", "word"), [((1.0,), "stretch"), ((1.9, 2.1), "met"), ((2.04,), "met"), ((2.05,), "MISSED")]
)
def test_a_target_is_met_by_the_mean_within_two_per_cent(reached: tuple[float, ...], word: str) -> None:
    assert judged(Promise("x", 2.0, stretch=1.5), *reached).word == word


@pytest.mark.parametrize(("reached", "word"), [(90.0, "MISSED"), (90.65, "met"), (95.0, "met")])
def test_some_figures_should_be_high(reached: float, word: str) -> None:
    assert judged(Promise("x", 92.5, at_least=True), reached).word == word


def test_the_best_of_the_others_is_the_one_with_the_best_mean() -> None:
    seeds = [
        Measured({"x": 1.0}, {"a": {"x": 2.0}, "b": {"x": 3.0}, "c": {"y": 0.0}}, {"x": 0.5}),
        Measured({"x": 1.0}, {"a": {"x": 6.0}, "b": {"x": 3.0}, "c": {"y": 0.0}}, {"x": 0.7}),
    ]
    (low,) = targets.verdicts(row(Promise("x", 1.0)), seeds)
    (high,) = targets.verdicts(row(Promise("x", 1.0, at_least=True)), seeds)
    assert (low.best_other, high.best_other) == (("b", 3.0), ("a", 4.0))
    assert low.bound == pytest.approx(0.6)


def test_of_two_promises_one_may_be_enough() -> None:
    both = (Promise("x", 1.0), Promise("y", 1.0))
    measured = [Measured({"x": 0.5, "y": 2.0})]
    assert not targets.is_kept(targets.verdicts(row(*both), measured))
    assert targets.is_kept(targets.verdicts(row(*both, any_is_enough=True), measured))
    assert targets.summary(targets.verdicts(row(*both), measured)) == "0 of 1 rows met; missed: a-row"


def test_some_figures_are_only_shown() -> None:
    (kept, shown) = (Promise("x", 1.0), Promise("y", 1.0, counts=False))
    found = targets.verdicts(row(kept, shown), [Measured({"x": 0.5, "y": 2.0})])
    assert [verdict.word for verdict in found] == ["met", "no"]
    assert targets.is_kept(found)


def test_a_ratio_is_to_the_best_of_the_others() -> None:
    measured = as_ratio({"x": 3.0}, {"a": {"x": 2.0}, "b": {"x": 4.0}}, "x")
    assert (measured.own["ratio"], measured.others["b"]["ratio"]) == (1.5, 2.0)


# ---- what is measured ----------------------------------------------------------------------------------------------


def test_false_credit_is_what_was_predicted_and_never_sent_since_the_restart() -> None:
    """Back at 7 s, seen by the scrape at 7.5 at the latest, so it should be known at 8.5 s."""
    fleet = Fleet(replicas=1, restart=Restart(0, at=5.0, down_seconds=2.0))
    requests = [Request(float(at), 2048, 1, (1, 2, 3, 4)) for at in (0, 8, 9, 10)]
    trips = Simulator(requests, fleet).run()
    assert false_credit_tokens(trips, fleet) == 0.0
    trips[1].sent_at = None  # as if it had never been sent there
    assert trips[2].predicted_tokens == 2048
    assert false_credit_tokens(trips, fleet) == 2048
    assert false_credit_tokens(trips, replace(fleet, restart=None)) == 0.0


def test_samples_are_counted_apart_from_the_traffic_around_them(tmp_path: Path) -> None:
    """On one replica nothing is computed twice but the tokens after the last full block of each further sample."""
    write(tmp_path / "t.jsonl", [Request(0.0, 600, 1, (1,))])
    found = measure_samples(SampleGroups(), 1, Bench(tmp_path, limit=3, with_others=False), 0)
    assert found.own["prefills"] == pytest.approx(1 + 15 * (16_400 % BLOCK_TOKENS) / 16_400)
    assert found.own["waits"] == pytest.approx(found.own["prefills"], abs=0.05)


def test_a_weighted_router_believes_its_weights() -> None:
    requests = [Request(0.0, 20_000, 1)] * 10
    counts = []
    for weights in ((20_000.0, 20_000.0), (20_000.0, 2_000.0)):
        simulator = Simulator(
            requests, Fleet(2), RoutingSettings(hold=False), make_router=partial(weighted_router, weights)
        )
        counts.append(sum(trip.place == 1 for trip in simulator.run()))
    assert counts == [5, 0]


def test_the_router_itself_is_not_weighted() -> None:
    simulator = Simulator([], Fleet(2))
    simulator.run()
    assert simulator.router.decide(RouteRequest(length=1), 0.0).policy == "cache-cost"


def test_lengths_have_their_median_and_share_nothing() -> None:
    requests = Lengths(1_000, 100, requests=2_000).trace(3).requests
    inputs, outputs = (sorted(getattr(r, name) for r in requests) for name in ("input_tokens", "output_tokens"))
    assert 900 < inputs[1_000] < 1_100
    assert 90 < outputs[1_000] < 110
    blocks = [block for request in requests for block in request.blocks]
    assert len(set(blocks)) == len(blocks) > 2_000
    assert Lengths(1_000, 100, requests=50).trace(3).requests == requests[:50]


def test_a_trial_is_compared_on_the_same_requests() -> None:
    trial = Trial(Synthetic(requests=60), Fleet(replicas=2), load=0.5)
    measured = replace(NOWHERE, limit=40).measure(trial, 0)
    assert set(measured.others) == {*SIMPLE, "least-work, holding", "cache-cost, not holding"}
    assert {figures["ceiling_pct"] for figures in (measured.own, *measured.others.values())} == {
        measured.own["ceiling_pct"]
    }
    assert measured.bound["ttft_mean_s"] <= measured.own["ttft_mean_s"]
    assert replace(NOWHERE, with_others=False).measure(trial, 0).others == {}


# ---- the table and the command -------------------------------------------------------------------------------------


def test_every_row_can_be_run(tmp_path: Path) -> None:
    """With a few requests of a small trace in place of the recorded ones."""
    small = Synthetic(requests=40, groups=3, system_tokens=2_048).trace(1).requests
    for path in {needed.path for one in ROWS for needed in one.needs}:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b"")
        plain = tmp_path / "plain.jsonl"
        write(plain, small)
        (tmp_path / path).write_bytes(plain.read_bytes())
    bench = Bench(tmp_path, limit=25, with_others=False)
    assert len({one.name for one in ROWS}) == len(ROWS)
    for one in ROWS:
        verdicts = targets.verdicts(one, [one.measure(bench, 0)])
        assert [verdict.promise for verdict in verdicts] == list(one.promises)


def test_missing_traces_are_named_and_the_other_rows_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    arguments = ["--rows", "hot-prompt", "agents", "--seeds", "2", "--requests", "60", "--traces", str(tmp_path)]
    assert targets.main([*arguments, "--alone", "--json", str(file)]) == 2
    out, err = capsys.readouterr()
    assert err == f"2 rows need claude_code/agentic_120s.jsonl.gz, which is not in {tmp_path} (--traces)\n"
    assert out.startswith("hot-prompt: one 8k system prompt for all")
    assert "of 1 rows met" in out.splitlines()[-1]
    rows = json.loads(file.read_text())["rows"]
    assert [found["figure"] for found in rows] == ["request_imbalance", "ttft_mean_s"]
    assert all(len(found["seeds"]) == 2 for found in rows)
    assert all(found["reached"] == pytest.approx(sum(found["seeds"]) / 2) for found in rows)


def test_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert targets.main(["--list", "--rows", "conversation-1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["conversation-1", "conversation-1.2"]
    assert targets.main(["--rows", "none-such"]) == 2
    assert "none-such" not in capsys.readouterr().out


def test_a_broken_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "claude_code").mkdir()
    (tmp_path / "claude_code" / "agentic_120s.jsonl.gz").write_bytes(b"nonsense\n")
    assert targets.main(["--rows", "agents-2x", "--seeds", "1", "--traces", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
