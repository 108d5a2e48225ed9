"""The `warmlane` command: each command reads its arguments and hands over. What it needs is imported only then.

Exit codes: 0 done; 2 wrong usage or configuration, with one clear line on stderr; 1 anything else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gateway.core.settings import POLICY_NAMES
from gateway.doctor_command import ADMIN_KEY, doctor, key_in
from gateway.outlet import outlet
from gateway.plan_command import plan
from gateway.top_command import top
from loadtests.options import Options, as_command

if TYPE_CHECKING:
    from gateway.config import Config

DONE, FAILED, WRONG_USAGE = 0, 1, 2
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Whatever typer raises for arguments that it cannot read; it has no public name of its own in all versions."""

cli = typer.Typer(
    name="warmlane",
    help="KV-cache-aware routing gateway in front of vLLM replicas.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (TOML).")]
Host = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; beats the file.")]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", metavar="PORT", min=0, max=65_535, help="Port to listen on, 0 for a free one; beats the file."
    ),
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", help="See `warmlane presets`; what suits this machine's GPUs when absent."
    ),
]
ProfileName = Annotated[
    str, typer.Option("--profile", metavar="NAME", help="One that the preset has: see `warmlane presets`.")
]
VllmPath = Annotated[str | None, typer.Option("--vllm", metavar="PATH", help="The vllm executable; else from PATH.")]
VllmVersion = Annotated[
    str | None, typer.Option("--vllm-version", metavar="X.Y.Z", help="Of that vllm; it is asked when absent.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model to load instead of the preset's.")
]
ExtraFlags = Annotated[
    list[str] | None, typer.Argument(metavar="-- FLAG", help="More flags of the engine; they beat the preset's.")
]
Register = Annotated[
    str | None,
    typer.Option(
        "--register",
        metavar="REDIS",
        envvar="WARMLANE_REGISTER",
        help="Redis in which gateways look for replicas (redis://HOST). Needs the secret of the fleet.",
    ),
]
GatewayUrl = Annotated[str, typer.Option("--url", metavar="URL", help="The gateway, e.g. http://127.0.0.1:8000.")]
AdminUrl = Annotated[str, typer.Option("--url", metavar="URL", help="Its admin listener, e.g. http://127.0.0.1:8001.")]
KeyVariable = Annotated[
    str, typer.Option("--key-env", metavar="NAME", help="Environment variable with the admin key, where one is needed.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

key = typer.Typer(help="API keys of clients.", rich_markup_mode=None)
cli.add_typer(key, name="key")


@cli.callback(invoke_without_command=True)
def warmlane(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print_version()
        raise typer.Exit(DONE)
    help_when_alone(context)


@key.callback(invoke_without_command=True)
def help_when_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(WRONG_USAGE)


class Refused(Exception):
    """Ends a command with a line on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int = WRONG_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: runs the command line (of the process by default). Nobody is made to wait by who reads stderr."""
    with outlet(sys.stderr) as stderr, contextlib.redirect_stderr(stderr):
        code = exit_code_of(arguments)
    sys.exit(code)


def exit_code_of(arguments: Sequence[str] | None) -> int:
    """Runs it, and turns every known failure into one line."""
    from gateway.config import ConfigError

    try:
        code = typer.main.get_command(cli).main(arguments, prog_name="warmlane", standalone_mode=False)
    except UsageError as error:
        code = complain(error.format_message(), WRONG_USAGE)  # type: ignore[attr-defined]
    except ConfigError as error:
        code = complain(str(error), WRONG_USAGE)
    except Refused as error:
        code = complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = DONE  # stopped before there was anything to stop
    except BrokenPipeError:
        code = FAILED  # the reader of our output left, as `head` does
    return code if isinstance(code, int) else DONE


def complain(message: str, exit_code: int) -> int:
    print(f"warmlane: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


@cli.command()
def serve(
    config: ConfigFile = None,
    replica: Annotated[
        list[str] | None,
        typer.Option("--replica", metavar="URL", help="A vLLM server; may be repeated. Beats the file."),
    ] = None,
    host: Host = None,
    port: Port = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help=f"{', '.join(POLICY_NAMES)}; beats the file.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=32, help="Processes that serve; beats the file."),
    ] = None,
) -> int:
    """Run the gateway in front of vLLM servers that are already there."""
    chosen = configured(config, replicas=replica or (), host=host, port=port, policy=policy, workers=workers)
    if not chosen.replicas and not chosen.discovery.names_any and not chosen.admin.allow:
        raise Refused("no replicas: give --replica URL, or [[replicas]] or [discovery] in the file")
    from gateway import app
    from gateway.listeners import StartError, heard_at
    from gateway.stderr_log import log_to_stderr

    processes = chosen.server.workers
    several = f", {processes} workers" if processes > 1 else ""

    def on_ready(url: str) -> None:
        say(f"listening on {heard_at(url, chosen.server.host)}, policy {chosen.routing.policy}{several}")

    log_to_stderr()
    try:
        if processes > 1:
            from gateway.several import parent

            return parent.run(chosen, app.check, on_ready)
        return app.run(chosen, on_ready=on_ready)
    except StartError as error:
        raise Refused(str(error), FAILED) from error


@cli.command(context_settings={"allow_interspersed_args": False})
def up(
    preset: PresetName = None,
    profile: ProfileName = "recommended",
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            metavar="N",
            min=1,
            max=64,
            help="How many; 2 when embedded, 1 of a named preset, else as many as the cards allow.",
        ),
    ] = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    vllm: VllmPath = None,
    vllm_version: VllmVersion = None,
    model: ModelName = None,
    register: Register = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the replicas' commands, run nothing.")] = False,
    extra: ExtraFlags = None,
) -> int:
    """Run replicas and the gateway together; Ctrl-C stops all."""
    chosen = configured(config, host=host, port=port)
    from gateway import registering
    from gateway import up as together
    from gateway.stderr_log import log_to_stderr
    from workers.launch import LaunchError, Request
    from workers.presets import PresetError

    log_to_stderr()
    if chosen.server.workers > 1:
        say("server.workers does not count here: with `up` one process serves")
    request = Request(preset, profile, vllm, vllm_version, model, tuple(extra or ()), must_run=not dry_run)
    try:
        fleet = together.plan_fleet(request, replicas)
        if dry_run:
            return together.print_dry_run(fleet)
        redis = chosen.redis
        announcer = None if register is None else registering.announcer(register, redis.name, redis.secret_env)
        return together.run(chosen, fleet, announcer)
    except (PresetError, LaunchError) as error:
        raise Refused(str(error)) from error


@cli.command()
def route(
    url: GatewayUrl,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Request body; stdin when absent.")] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="As `x-session-id` of the request.")
    ] = None,
    key_env: KeyVariable = ADMIN_KEY,
    as_json: Json = False,
) -> int:
    """Ask a gateway where it would send a request, and why. Sends nothing to a replica."""
    from gateway import dry_run

    try:
        body = file.read_bytes() if file is not None else sys.stdin.buffer.read()
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error
    with asking(key_env) as key:
        answer = dry_run.ask(url, body, session, key)
        print(answer.decode("utf-8", "replace") if as_json else dry_run.table(answer))
    return DONE


@cli.command()
def replicas(url: GatewayUrl, key_env: KeyVariable = ADMIN_KEY, as_json: Json = False) -> int:
    """Show the replicas of a gateway: health, load, what drains, who is registered but stays out."""
    from gateway import operate

    with asking(key_env) as key:
        answer = operate.list_replicas(url, key)
        print(answer.decode("utf-8", "replace") if as_json else operate.table(answer))
    return DONE


@cli.command()
def drain(
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its URL, HOST:PORT, or name.")],
    url: AdminUrl,
    key_env: KeyVariable = ADMIN_KEY,
) -> int:
    """Give a replica no new requests; those that run there finish."""
    return switch_drain(url, replica, key_env, True)


@cli.command()
def undrain(
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its URL, HOST:PORT, or name.")],
    url: AdminUrl,
    key_env: KeyVariable = ADMIN_KEY,
) -> int:
    """Give a drained replica requests again."""
    return switch_drain(url, replica, key_env, False)


def switch_drain(url: str, replica: str, key_env: str, draining: bool) -> int:
    import msgspec

    from gateway import operate

    try:
        with asking(key_env) as key:
            answer = operate.drain(url, replica, key, draining=draining)
        now = msgspec.json.decode(answer, type=operate.Replica)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(str(error), FAILED) from error
    print(f"{now.replica}: {'draining' if now.draining else now.health}, {now.requests} requests there")
    return DONE


@cli.command()
def restart(
    url: AdminUrl,
    replica: Annotated[
        str | None, typer.Argument(metavar="REPLICA", help="Its name, URL, or HOST:PORT; with --all none.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them, one after the other.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Also where no other stands in: requests fail then.")] = False,
    key_env: KeyVariable = ADMIN_KEY,
) -> int:
    """Renew replicas of a running `warmlane up`: drain, wait, start again, next."""
    if every is (replica is not None):
        raise Refused("which one? Name a replica, or all of them with --all")
    from gateway import operate

    with asking(key_env) as key:
        problem = operate.restart(url, replica, key, alone=alone, say=partial(print, flush=True))
    if problem:
        raise Refused(f"stopped: {problem}", FAILED)
    return DONE


@cli.command()
def presets(
    measured: Annotated[
        bool, typer.Option("--measured", help="What starts measured, here and elsewhere, beside what was planned.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List the presets, or what was measured with them."""
    import msgspec

    from workers import measurements
    from workers.presets import load_all

    found = load_all()
    if measured:
        from workers import starts

        rows = measurements.rows(found, starts.read(starts.file_for(os.environ)))
        print(measurements.as_json(rows) if as_json else measurements.as_text(rows))
        return DONE
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return DONE
    for name, preset in found.items():
        print(f"{name:32} {preset.title}")
        shipped = "; ".join(measurements.hardware(one) for one in preset.measured) or "not yet"
        print(f"{'':32} profiles: {', '.join(preset.profiles)}; measured: {shipped}")
    return DONE


@cli.command(context_settings={"allow_interspersed_args": False})
def replica(
    preset: PresetName = None,
    profile: ProfileName = "recommended",
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=1, max=65_535, help="Port to listen on.")] = 8101,
    vllm: VllmPath = None,
    vllm_version: VllmVersion = None,
    model: ModelName = None,
    register: Register = None,
    register_as: Annotated[
        str | None,
        typer.Option("--register-as", metavar="URL", help="Where gateways reach it; not said: its own address."),
    ] = None,
    fleet: Annotated[
        str, typer.Option("--fleet", metavar="NAME", help="Of the gateways: their [redis] name.")
    ] = "warmlane",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command line, run nothing.")] = False,
    extra: ExtraFlags = None,
) -> int:
    """Run one vLLM server with the flags of a preset."""
    from workers.launch import Request, run_replica

    check_host(host)
    presence = None
    if register is not None and not dry_run:
        from gateway import registering
        from gateway.stderr_log import log_to_stderr

        log_to_stderr()
        announcer = registering.announcer(register, fleet)
        presence = registering.Registered(announcer, registering.announced_url(host, port, register, register_as))
    request = Request(preset, profile, vllm, vllm_version, model, tuple(extra or ()), must_run=not dry_run)
    return run_replica(request, host=host, port=port, presence=presence)


def replay(options: Options) -> int:
    """Simulate traffic under several policies, side by side with what is possible."""
    from loadtests import replay as replaying

    try:
        print(replaying.run(options))
    except replaying.Refused as error:
        raise Refused(str(error)) from error
    return DONE


cli.command("replay")(as_command(replay))
cli.command()(plan)
cli.command()(doctor)
cli.command()(top)


@key.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; logs and metrics say it.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="T", help="Whom it counts for; NAME when not given.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Make a key. It is printed once and kept nowhere: its hash goes into the keys file."""
    import json

    from gateway import keys

    secret = keys.new_secret()
    entry = keys.new_entry(name, secret, tenant)
    if as_json:
        print(json.dumps({"key": secret, "entry": entry}))
    else:
        print(f"{secret}\n\nThe key above is for the client, shown this once. For the keys file:\n\n{entry}", end="")
    return DONE


@cli.command()
def version() -> int:
    """Print the version."""
    print_version()
    return DONE


def print_version() -> None:
    from importlib.metadata import version as installed

    print(f"warmlane {installed('warmlane')}")


@contextlib.contextmanager
def asking(key_env: str) -> Iterator[str | None]:
    """Gives the admin key that a gateway is asked with, if there is one. Raises `Refused` also for what it answers."""
    from gateway.dry_run import Unanswered

    key = key_in(key_env)
    if key is None and key_env in os.environ:
        raise Refused(f"${key_env} is empty")
    try:
        yield key
    except Unanswered as error:
        hint = ""
        if error.status == 401:
            state = "is not set" if key is None else "holds another key"
            hint = f" ${key_env} {state}: --key-env names the variable with the admin key."
        raise Refused(f"{error}{hint}", FAILED) from error


def configured(
    path: Path | None,
    *,
    replicas: list[str] | tuple[()] = (),
    host: str | None = None,
    port: int | None = None,
    policy: str | None = None,
    workers: int | None = None,
) -> Config:
    """The configuration file, if any, with what the command line says instead. Raises `ConfigError`."""
    import msgspec

    from gateway import config as configuration

    if host is not None:
        check_host(host)
    chosen = configuration.load(path) if path is not None else configuration.Config()
    server = msgspec.structs.replace(
        chosen.server,
        host=chosen.server.host if host is None else host,
        port=chosen.server.port if port is None else port,
        workers=chosen.server.workers if workers is None else workers,
    )
    routing = chosen.routing
    if policy is not None:
        routing = msgspec.structs.replace(routing, policy=configuration.policy_name(policy))
    listed = [configuration.Replica(url) for url in replicas] or chosen.replicas
    return configuration.checked(
        msgspec.structs.replace(chosen, server=server, routing=routing, replicas=listed),
    )


def check_host(host: str) -> None:
    """Raises `Refused` for what no machine can listen on. A name is looked up by who listens."""
    import ipaddress
    import re

    if not re.fullmatch(r"[0-9.]*|.*:.*", host):
        is_right = re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host) is not None
    else:
        try:
            is_right = bool(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            is_right = False
    if not is_right:
        raise Refused(f"--host {host}: not an IP address or host name")


def say(message: str) -> None:
    print(f"warmlane: {message}", file=sys.stderr, flush=True)
