"""The systemd units: what they start exists, and their limits fit the program's."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from gateway.cli import cli
from gateway.config import Config, load
from tests.deploy.host import DEPLOY
from workers import presets
from workers.worker import STOP_GRACE_SECONDS

UNITS = DEPLOY / "systemd"
GATEWAY, REPLICA = "warmlane.service", "warmlane-replica@.service"


def settings(unit: str) -> dict[str, str]:
    """The last value of each key; those in question are there once."""
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", (UNITS / unit).read_text(), re.MULTILINE))


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("unit", [GATEWAY, REPLICA])
def test_the_command_has_the_options_that_the_unit_gives_it(unit):
    _, name, *words = shlex.split(settings(unit)["ExecStart"])
    command = typer.main.get_command(cli).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_variables_of_the_replica_have_values():
    used = set(re.findall(r"\$\{([A-Z]+)\}", settings(REPLICA)["ExecStart"]))
    given = variables((UNITS / "replica.env").read_text())
    assert used == set(given)
    presets.load(given["PRESET"]).profile(given["PROFILE"])


def test_the_gateway_has_time_to_drain():
    server = Config().server
    assert float(settings(GATEWAY)["TimeoutStopSec"]) > server.drain_delay_seconds + server.drain_seconds
    assert str(round(server.drain_delay_seconds + server.drain_seconds)) in (UNITS / GATEWAY).read_text()


def test_a_replica_has_time_to_stop():
    assert float(settings(REPLICA)["TimeoutStopSec"]) > STOP_GRACE_SECONDS


def test_the_gateway_may_open_what_it_is_configured_for():
    config = Config()
    wanted = config.server.max_connections + config.routing.max_in_flight
    assert int(settings(GATEWAY)["LimitNOFILE"]) > wanted


def test_a_wrong_configuration_is_not_tried_again():
    for unit in (GATEWAY, REPLICA):
        assert settings(unit)["RestartPreventExitStatus"] == "2"


def test_the_configuration_that_is_installed_loads_and_knows_the_replica():
    config = load(UNITS / "warmlane.toml")
    assert [replica.url for replica in config.replicas] == ["http://127.0.0.1:8101"]
