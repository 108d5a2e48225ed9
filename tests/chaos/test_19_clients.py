"""Test 19, the client matrix: real SDKs and agents, direct against a replica and through the gateway.

Same transcript, same exception. One thing must differ: an answer that breaks off in the middle. There the gateway says
so in one error event (O-03), where a client without a gateway sees no more than a lost connection; all must raise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Figures
from tests.chaos.rig import EmbeddedReplica
from tests.clients.agents import AGENTS, Agent, Visit
from tests.clients.matrix import (
    BREAKS,
    BROKEN_RETRIES,
    INSIDE,
    REFUSALS,
    RETRIES,
    SDKS,
    TURNS,
    UNKNOWN,
    Lane,
    Scenario,
    Sdk,
    Witness,
    gateway_that_knows,
    gateway_to,
    lead,
    run,
    scripted_lanes,
)
from tests.clients.turns import COMMAND, EDIT, MODELS, TEXT, Seen
from tests.proxy.scripted import ScriptedReplica

TARGET = "same transcript, same exception class"
SCENARIOS = (*TURNS, *REFUSALS, *RETRIES, *INSIDE, *UNKNOWN)
EMBEDDED_REFUSALS = (Scenario("400", temperature=-1.0), Scenario("400, streamed", stream=True, temperature=-1.0))


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.name)
async def test_19_sdk(sdk: Sdk, tmp_path: Path, figures: Figures) -> None:
    """A tool-calling turn and every kind of error. O-03, the client's view: what breaks off raises."""
    async with scripted_lanes(tmp_path) as (near, far):
        direct, through = await both(sdk, (near.url, far.url), (*SCENARIOS, *BREAKS, BROKEN_RETRIES), tmp_path)
    for scenario in UNKNOWN:
        for told in (direct, through):
            told[scenario.name] = only_kind(told[scenario.name])
    differing = [scenario.name for scenario in SCENARIOS if direct[scenario.name] != through[scenario.name]]
    requests = [[one for one in lane.witness.seen if one.model in MODELS] for lane in (near, far)]
    same = not differing and requests[0] == requests[1]
    raised = [error_class(through[scenario.name]) for scenario in BREAKS]
    alike = f"{len(SCENARIOS) - len(differing)} of {len(SCENARIOS)} alike"
    measured = f"{alike}; broken off: {words(BREAKS, direct, through)}"
    figures.record(19, sdk.name, measured, f"{TARGET}; broken off: raises", same and all(raised))

    assert {name: through[name] for name in differing} == {name: direct[name] for name in differing}
    assert requests[0] == requests[1]
    asked = Counter((one.model, one.stream) for one in requests[0])
    assert [asked["hurried", stream] for stream in (False, True)] == [2, 2]
    assert asked["breaks", True] == 2  # none of the two scenarios sent it again
    for scenario in TURNS:
        assert direct[scenario.name]["error"] is None
        assert TEXT in str(direct[scenario.name]["steps"])
    for scenario in REFUSALS:
        error = direct[scenario.name]["error"]
        assert str(error["status"]) == scenario.name[:3]
        assert error["retry_after"] == ("7" if scenario.model == "busy" else None)
    # What had come is there, nothing is invented, and it ends in an exception.
    for scenario in (*INSIDE, *BREAKS, BROKEN_RETRIES):
        assert through[scenario.name]["steps"] == direct[scenario.name]["steps"]
        assert through[scenario.name]["error"], scenario.name


async def test_19_sdks_with_embedded_replicas(tmp_path: Path, figures: Figures) -> None:
    alone, behind = (EmbeddedReplica(name, tmp_path, "--decode-rate", "2000") for name in ("alone", "behind"))
    scenarios = (*TURNS, *EMBEDDED_REFUSALS)
    told = {}
    try:
        await asyncio.gather(alone.start(), behind.start())
        async with gateway_to(tmp_path, behind.url) as url:
            for sdk in SDKS:
                told[sdk.name] = await both(sdk, (alone.url, url), scenarios, tmp_path)
    finally:
        await asyncio.gather(alone.stop(), behind.stop())
    pairs = [(direct[one.name], through[one.name]) for direct, through in told.values() for one in scenarios]
    alike = sum(one == other for one, other in pairs)
    measured = f"{alike} of {len(pairs)} alike"
    figures.record(19, "SDKs with embedded replicas", measured, TARGET, alike == len(pairs))

    for direct, through in told.values():
        assert through == direct
        for scenario in TURNS:
            assert direct[scenario.name]["error"] is None
            assert any(city in str(direct[scenario.name]["steps"]) for city in ("Oslo", "Paris"))
        for scenario in EMBEDDED_REFUSALS:
            assert direct[scenario.name]["error"]["status"] == 400


async def test_19_sdks_with_keys(tmp_path: Path, figures: Figures) -> None:
    """The drivers say `key`: one gateway knows it, the other does not."""
    witness = Witness()
    told = {}
    async with ScriptedReplica(witness, MODELS).running() as replica:
        async with gateway_that_knows(tmp_path, "key", replica.url) as good:
            async with gateway_that_knows(tmp_path, "another", replica.url) as other:
                for sdk in SDKS:
                    told[sdk.name] = await both(sdk, (good, other), TURNS, tmp_path)
    known = [one for direct, _ in told.values() for one in direct.values()]
    unknown = [one["error"] for _, through in told.values() for one in through.values()]
    let_in = sum(one["error"] is None for one in known)
    refused = sum(error is not None and error["status"] == 401 for error in unknown)
    turns = len(TURNS) * len(SDKS)
    measured = f"{let_in} of {turns} turns let in; {refused} of {turns} refused: {', '.join(kinds(unknown))}"
    met = let_in == refused == turns and len(witness.exchanges) == 2 * turns
    figures.record(19, "SDKs with keys", measured, "own key: the turn; unknown key: 401 as its exception", met)

    assert [one["error"] for one in known] == [None] * turns
    assert [error["status"] for error in unknown] == [401] * turns
    assert len(witness.exchanges) == 2 * turns


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_19_agent(agent: Agent, tmp_path: Path, figures: Figures) -> None:
    """One turn with a tool, and one whose first request is refused with 400."""
    async with scripted_lanes(tmp_path) as lanes:
        turn = await both_visits(agent, lanes, agent.model, tmp_path)
        requests = [lane.witness.seen for lane in lanes]
        refused = await both_visits(agent, lanes, "refuses", tmp_path)
        refusals = [lane.witness.seen for lane in lanes]
    same = all(one == other for one, other in (turn, refused, requests, refusals))
    measured = f"turn and error {'alike' if same else 'differ'}; {len(requests[0])} requests a turn"
    figures.record(19, agent.name, measured, "same transcript, same error", same)

    assert turn[0] == turn[1]
    assert requests[0] == requests[1]
    assert refused[0] == refused[1]
    assert refusals[0] == refusals[1]
    assert has_worked(agent, turn[0], requests[0])
    assert "temperature must not be negative" in str(refused[0])


async def both(
    sdk: Sdk, urls: tuple[str, str], scenarios: tuple[Scenario, ...], home: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two transcripts: direct, and through the gateway."""
    async with asyncio.TaskGroup() as group:
        direct, through = (group.create_task(lead(sdk, url, scenarios, home)) for url in urls)
    return direct.result(), through.result()


def only_kind(told: dict[str, Any]) -> dict[str, Any]:
    """A transcript whose exception keeps its class and status; the words are the gateway's own."""
    return {**told, "error": {key: told["error"][key] for key in ("class", "status")}}


def kinds(errors: list[Any]) -> list[str]:
    return sorted({str(error["class"]) for error in errors if error})


def error_class(told: dict[str, Any]) -> str:
    return str(told["error"]["class"]) if told["error"] else ""


def words(scenarios: tuple[Scenario, ...], direct: dict[str, Any], through: dict[str, Any]) -> str:
    """Which exceptions were raised: the direct one, and the gateway's where it is another."""
    pairs = [(error_class(direct[one.name]) or "none", error_class(through[one.name]) or "none") for one in scenarios]
    return ", ".join(one if one == other else f"{one} -> {other}" for one, other in pairs)


def has_worked(agent: Agent, told: list[Any], requests: list[Seen]) -> bool:
    if agent.model == "edits":
        return EDIT.splitlines()[2] in str(told)
    output = COMMAND.removeprefix("echo ")
    return TEXT in str(told) and any(output in result for request in requests for result in request.results)


async def both_visits(agent: Agent, lanes: tuple[Lane, Lane], model: str, folder: Path) -> tuple[list[Any], list[Any]]:
    async with asyncio.TaskGroup() as group:
        direct, through = (group.create_task(visit(agent, lane, model, folder)) for lane in lanes)
    return direct.result(), through.result()


async def visit(agent: Agent, lane: Lane, model: str, folder: Path) -> list[Any]:
    """One run of an agent, in the home that it has on this lane and a directory of its own: exit status and report."""
    place = folder / lane.url.rpartition(":")[2]
    visit = Visit(lane.url, model, place / "home", place / model)
    visit.home.mkdir(parents=True, exist_ok=True)
    visit.work.mkdir()
    command = agent.command(visit)
    status, output, errors = await run(command.argv, {"HOME": str(visit.home), **command.environment}, visit.work)
    return [status, *agent.told(output + errors, visit)]
