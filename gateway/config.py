"""Configuration: one TOML file, typed, every key with its default and reason; an unknown key is refused with its path.

A class is its table: `[server]` is `Server`, `[[replicas]]` a list of `Replica`. Reading happens once, at start-up.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from gateway.config_errors import explained
from gateway.core.replica import MINIMUM_CACHE_TOKENS
from gateway.core.settings import RoutingSettings

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
TokensPerSecond = Annotated[float, Meta(gt=0, le=1e9)]
PolicyName = Literal[
    "round-robin", "random", "least-requests", "least-work", "session-hash", "prefix-only", "cache-cost"
]
EngineName = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "ollama", "openai"]

CORE = RoutingSettings()
"""Defaults of the core, stated once there."""


class ConfigError(Exception):
    """The configuration cannot be used. The message is one clear line for the person who wrote it."""


class Server(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`: where clients connect."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000
    workers: Annotated[int, Meta(ge=1, le=32)] = 1
    """Processes that serve, with one view (`gateway.several`). One is busy with some thousand requests a second; each
    more wants a core of its own. Limits of this table, and of keys, count in each of them."""
    max_body_mib: Annotated[int, Meta(ge=1, le=4_096)] = 64
    """Larger request bodies get 413 unread. 64 MiB holds several base64 images."""
    max_bodies_mib: Annotated[int, Meta(ge=1)] = 1_024
    """Request bodies in memory, of all clients: while they come, and until their replica begins to answer. Beyond it
    503 with `Retry-After`. As many requests as may run and wait (`max_in_flight`, `max_waiting`) with 200 KB, some
    50,000 tokens, each; or sixteen of the largest."""
    header_timeout_seconds: Seconds = 15.0
    """A client that has not sent its whole head by then is cut off, also when it never began with its first: heads come
    in one piece, or are an attack."""
    body_timeout_seconds: Seconds = 60.0
    """A client that has not sent its whole request by then is cut off."""
    keep_alive_seconds: Seconds = 75.0
    """Idle client connections live this long after an answer: more than the 60 s of common load balancers, which then
    close first."""
    stall_timeout_seconds: Seconds = 300.0
    """A client that takes not one byte of its waiting answer for so long is cut off. Slow readers are not."""
    drain_delay_seconds: Annotated[float, Meta(ge=0, le=3_600)] = 1.0
    """After SIGTERM `/ready` answers 503 at once, but new requests are served so long: until load balancers that look
    at it each second have seen it. Those that look less often, or Kubernetes' endpoints, need 5 to 10 s."""
    drain_seconds: Seconds = 30.0
    """After that running requests get this long to finish."""
    max_connections: Annotated[int, Meta(ge=1)] = 12_000
    """Client connections. When more come, one at rest is closed for each; where there is none, they are answered 503.
    Fewer where the process may not have as many open files."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain: clients then speak HTTPS. Read again when it changes."""
    tls_key: str | None = None
    """PEM file with its key; not set: it is in the same file."""
    http: Literal["fast", "asgi"] = "fast"
    """`fast` serves inference requests straight from the connection; with `asgi` they take the plain ASGI way."""
    log: Literal["json", "off"] = "json"
    """One JSON record for each request on stdout, without prompt text."""
    log_blocks: bool = False
    """Records also say which earlier request had the same first prefix blocks, so that a replay repeats it."""
    decision_log_file: str | None = None
    """File that gets one JSON record for each request that was sent to a replica: as in the log, and with the costs of
    the candidates. `warmlane replay --trace` reads it."""
    decision_log_mib: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """It is rotated at this size: some 35,000 requests of a fleet of four."""
    decision_log_kept: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """So many files are kept, the one being written too."""
    dashboard: bool = True
    """The live page, its stream and the ring of decisions; without it none of their paths is there."""


class Replica(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[replicas]]`: one server, vLLM as a rule."""

    url: str
    prefill_rate: TokensPerSecond | None = None
    """Uncached prompt tokens per second when known (a preset's measured value); learned from traffic otherwise."""
    engine: EngineName | None = None
    """What runs there (`gateway/feeds/dialects.py`). Not set: recognised. `openai` is for all that are not listed."""
    cache_tokens: Annotated[int, Meta(ge=MINIMUM_CACHE_TOKENS, le=10**12)] | None = None
    """Size of its KV cache, for an engine whose metrics do not tell it."""


class Discovery(Struct, frozen=True, forbid_unknown_fields=True):
    """`[discovery]`: replicas that come and go: behind a DNS name, or listed in a file (`gateway/feeds/sources.py`)."""

    dns: str | None = None
    """URL whose host name is resolved, each address one replica (a headless Kubernetes service, say), e.g.
    `http://vllm.default.svc:8000`. `srv://NAME` asks for service records, which bring their ports; with
    `srv+https://NAME` the replicas speak TLS."""
    nameserver: str | None = None
    """`ADDRESS[:PORT]` that service records are asked of; not set: those of `/etc/resolv.conf`."""
    replicas_file: str | None = None
    """TOML with `[[replicas]]` as here; a change counts after `interval_seconds`."""
    redis: bool = False
    """Take in replicas that announce themselves in the Redis of `[redis]` (`warmlane replica --register`), from the
    networks of `[admin] allow`."""
    interval_seconds: Seconds = 2.0
    """A look-up of a name costs next to nothing, and a replica that moved should be found within 5 s."""
    longest_interval_seconds: Seconds = 5.0
    """A service record that may be kept for longer (its TTL) is asked for again after it, but no later than this."""

    @property
    def names_any(self) -> bool:
        """Replicas may come that the configuration does not list."""
        return self.redis or self.dns is not None or self.replicas_file is not None


class Routing(Struct, frozen=True, forbid_unknown_fields=True):
    """`[routing]`: who decides. Sizes of the core: see `gateway/core/settings.py` for the reasons."""

    policy: PolicyName = "cache-cost"
    shadow: tuple[PolicyName, ...] = ()
    """Policies that are asked beside the live one and only counted (`gateway.shadow`)."""
    index_memory_mib: Annotated[int, Meta(ge=1)] = CORE.index_memory_mib
    default_cache_tokens: Annotated[int, Meta(ge=1_024)] = CORE.default_cache_tokens
    default_prefill_rate: TokensPerSecond = CORE.default_prefill_rate
    hold: bool | None = CORE.hold
    """Late binding: a request waits here while the replica of its choice could not begin with it. Not set: with
    `cache-cost` it does, with the other policies it does not."""
    max_in_flight: Annotated[int, Meta(ge=1)] = CORE.max_in_flight
    max_waiting: Annotated[int, Meta(ge=0)] = CORE.max_waiting
    max_wait_seconds: Seconds = CORE.max_wait_seconds

    def settings(self) -> RoutingSettings:
        table = msgspec.structs.asdict(self)
        del table["shadow"]  # the core need not know who else would have decided what
        return RoutingSettings(**table)


class Upstream(Struct, frozen=True, forbid_unknown_fields=True):
    """`[upstream]`: connections to replicas."""

    connect_timeout_seconds: Seconds = 2.0
    first_byte_timeout_seconds: Seconds = 600.0
    """From the request sent to the first byte of the answer: a long prefill in a queue is silent for minutes."""
    idle_timeout_seconds: Seconds = 120.0
    """Between two pieces of an answer. A stream that stalls longer is ended with an error."""
    pool_idle_seconds: Seconds = 4.0
    """An idle connection is not reused after this: uvicorn, hence vLLM, closes its side after 5 s."""
    deadline_seconds: Seconds | None = None
    """For a request as a whole, waiting included; then it ends with an error, and the replica's work with it. Clients
    may ask for less (`x-request-timeout`). Not set: an agent's answer may take an hour, and silence has its own
    limits."""
    replay: bool = True
    """A stateless request whose connection was lost before any byte of an answer is sent to another replica, once and
    within a budget. `false`: never twice, whatever it costs the client."""
    ca_file: str | None = None
    """PEM file with the authorities that `https://` replicas are verified against; not set: those of the system."""
    tls_server_name: str | None = None
    """Name in the certificates of `https://` replicas, where it is not the host of their URL (addresses from DNS)."""
    api_key_env: str | None = None
    """Environment variable with the key that replicas ask for (vLLM's `--api-key`)."""
    api_key_file: str | None = None
    """The same from a file, read at start-up."""


class Feeds(Struct, frozen=True, forbid_unknown_fields=True):
    """`[feeds]`: how often replicas are asked about themselves."""

    probe_interval_seconds: Seconds = 1.0
    probe_timeout_seconds: Seconds = 1.5
    """Three that fail in a row eject: a frozen server is found within 6 s. A busy vLLM answers far sooner."""
    scrape_interval_seconds: Seconds = 0.5
    scrape_timeout_seconds: Seconds = 2.0
    scrape_max_bytes: Annotated[int, Meta(ge=65_536)] = 4 * 1024 * 1024
    """A `/metrics` page above this is not read to its end and counts as missing."""
    tokenize: bool = True
    """The first three prompts of each model are also sent to their replica's `/tokenize`, to know early how many bytes
    a token has."""


class Admin(Struct, frozen=True, forbid_unknown_fields=True):
    """`[admin]`: who may look at the replicas from elsewhere, and change which there are. Off without a port and
    a key."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    """Where changes of state are taken, on a listener of their own; not set, none are."""
    key_env: str | None = None
    """Environment variable with the admin key, or with `sha256:` and the 64 hex digits of its digest."""
    key_file: str | None = None
    """File with the same, instead."""
    allow: tuple[str, ...] = ()
    """Networks in which replicas may be registered while the gateway runs; empty, none may."""
    allow_existing_models: bool = False
    """A registered replica may serve a model that others serve already. Without it, it stays out, and the view says
    why."""


class Workers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[workers]`: how `warmlane up` keeps the replicas that it starts running."""

    remedies: Literal["propose", "apply"] = "propose"
    """After a replica ran out of memory: say which flag to change, or start it again with that flag. Smaller limits
    are felt by clients, so nobody is given them unasked."""
    max_failed_starts: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """In a row, then a replica is given up. With the default pauses that is after 15 s and five starts."""
    first_back_off_seconds: Seconds = 1.0
    """Before a replica that ended is started again; twice as long each time ..."""
    longest_back_off_seconds: Seconds = 60.0
    """... up to this: a large model takes longer to load anyway."""
    calm_seconds: Seconds = 300.0
    """After a replica was ready for so long, pauses start small again."""
    ready_seconds: Seconds | None = None
    """From a start until the replica answers; then it is ended, as a failed start. Not set: 60 s for embedded
    replicas, half an hour for vLLM, which may have 65 GB to fetch."""
    silent_seconds: Seconds = 60.0
    """A replica that has not answered on `/health` for so long is ended and started again. The gateway stops sending
    it requests much sooner."""
    drain_seconds: Seconds = 600.0
    """In a rolling restart running requests get this long to finish: an agent's answer may take minutes."""
    stop_seconds: Seconds = 10.0
    """From SIGTERM to SIGKILL. An idle vLLM is gone in 2.5 s."""


class Auth(Struct, frozen=True, forbid_unknown_fields=True):
    """`[auth]`: who may come in. Everybody, until there are keys in a file or in `WARMLANE_API_KEYS`."""

    required: bool = False
    """Do not start without keys."""
    keys_file: str | None = None
    """TOML with `[[keys]]` (`gateway/keys.py`); a change counts within a second."""
    isolate_tenants: bool = False
    """Prefix caches are not shared between tenants: bodies get a `cache_salt` (`gateway/isolation.py`)."""
    isolation_secret_env: str = "WARMLANE_ISOLATION_SECRET"
    """Environment variable with what the salts are made of: the same for all gateways of a fleet. Random when empty."""


class Redis(Struct, frozen=True, forbid_unknown_fields=True):
    """`[redis]`: several gateways in front of the same replicas share what they know. Off without a URL."""

    url: str | None = None
    """`redis://`, `rediss://` or `unix://`, with user and password where there are any."""
    secret_env: str = "WARMLANE_REDIS_SECRET"
    """Environment variable with what entries are sealed by, the same for all gateways of a fleet. Without it whoever
    writes to Redis can steer requests."""
    name: Annotated[str, Meta(min_length=1, max_length=64)] = "warmlane"
    """Of the fleet: gateways that share a Redis and no replicas need different ones."""
    memory_mib: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """The stream is cut at this. It is also what a gateway that starts learns from: 64 MiB are some 80,000 prompts of
    10,000 tokens."""


class Tracing(Struct, frozen=True, forbid_unknown_fields=True):
    """`[tracing]`: spans of each request for an OpenTelemetry collector. Needs the extra `otel`."""

    enabled: bool | None = None
    """Not set: on where an `endpoint` is set here. `true` without one: where OpenTelemetry's variables say."""
    endpoint: str | None = None
    """OTLP over HTTP, `http://collector:4318`; without a path it gets OTLP's own, `/v1/traces`."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Part of the requests that come without a trace context; those with one go by it. Not set: as
    `OTEL_TRACES_SAMPLER` says, else all of them."""
    service_name: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    """Not set: `OTEL_SERVICE_NAME`, else `warmlane`."""

    @property
    def is_on(self) -> bool:
        return self.endpoint is not None if self.enabled is None else self.enabled


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    server: Server = Server()
    replicas: list[Replica] = []
    discovery: Discovery = Discovery()
    routing: Routing = Routing()
    upstream: Upstream = Upstream()
    feeds: Feeds = Feeds()
    admin: Admin = Admin()
    workers: Workers = Workers()
    auth: Auth = Auth()
    redis: Redis = Redis()
    tracing: Tracing = Tracing()


def load(path: Path) -> Config:
    """Read and check a TOML file. Raises `ConfigError` with the file and the path of the offending key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not TOML: nested too deeply") from error
    except ValueError as error:  # also a number of some thousand digits
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return checked(beside(path, msgspec.convert(table, Config)))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explained(str(error), Config)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


FILES = {
    "server": ("tls_certificate", "tls_key", "decision_log_file"),
    "upstream": ("ca_file", "api_key_file"),
    "admin": ("key_file",),
    "auth": ("keys_file",),
    "discovery": ("replicas_file",),
}
"""Keys whose values are paths, by table."""


def beside(path: Path, config: Config) -> Config:
    """The configuration in the file at `path`, with relative paths in it taken from the file's folder."""
    tables = {}
    for name, keys in FILES.items():
        table = getattr(config, name)
        found = {key: str(path.parent / file) for key in keys if (file := getattr(table, key))}
        tables[name] = msgspec.structs.replace(table, **found)
    return msgspec.structs.replace(config, **tables)


def checked(config: Config) -> Config:
    """The same configuration with normalised URLs. Raises `ConfigError` for a wrong URL, or what is listed twice."""
    replicas = checked_replicas(config.replicas)
    discovery = checked_discovery(config.discovery)
    if config.server.tls_key is not None and config.server.tls_certificate is None:
        raise ConfigError("server.tls_key: there is no server.tls_certificate that it belongs to")
    if config.server.max_bodies_mib < config.server.max_body_mib:
        raise ConfigError("server.max_bodies_mib: less than one body may have (server.max_body_mib)")
    if repeated := [name for name in config.routing.shadow if config.routing.shadow.count(name) > 1]:
        raise ConfigError(f"routing.shadow: {repeated[0]} is listed twice")
    if config.workers.first_back_off_seconds > config.workers.longest_back_off_seconds:
        raise ConfigError("workers.first_back_off_seconds: is above longest_back_off_seconds")
    if config.redis.url is not None:
        check_redis(config.redis.url)
    if discovery.redis and config.redis.url is None:
        raise ConfigError("discovery.redis: there is no Redis to look at; set redis.url")
    if discovery.redis and not config.admin.allow:
        raise ConfigError("discovery.redis: no network is allowed; set admin.allow")
    check_admin(config.admin, discovery.redis)
    tracing = config.tracing
    if tracing.endpoint is not None:
        tracing = msgspec.structs.replace(tracing, endpoint=traces_url(tracing.endpoint))
    check_listeners(config.server, config.admin)
    return msgspec.structs.replace(config, replicas=replicas, discovery=discovery, tracing=tracing)


def checked_replicas(listed: list[Replica]) -> list[Replica]:
    """The same with normalised URLs. Raises `ConfigError` for a wrong one, or one that is listed twice."""
    replicas = [msgspec.structs.replace(replica, url=replica_url(replica.url)) for replica in listed]
    seen: set[str] = set()
    for replica in replicas:
        url = replica.url.replace(".:", ":")  # a final dot hardly makes another server
        if url in seen:
            raise ConfigError(f"replicas: {url} is listed twice")
        seen.add(url)
    return replicas


def checked_discovery(discovery: Discovery) -> Discovery:
    """Raises `ConfigError`."""
    dns = discovery.dns
    if discovery.nameserver is not None:
        endpoint(discovery.nameserver)
        if service_name(dns) is None:
            raise ConfigError('discovery.nameserver: only service records are asked of it; set dns = "srv://NAME"')
    if dns is not None and "srv" in dns.partition("://")[0]:
        if service_name(dns) is None:
            raise ConfigError(f"discovery.dns {dns!r}: expected srv://NAME or srv+https://NAME, without a port")
    elif dns is not None:
        dns = replica_url(dns, "discovery.dns")
    return msgspec.structs.replace(discovery, dns=dns)


def service_name(dns: str | None) -> tuple[str, str] | None:
    """Scheme of the replicas, and the name whose service records say where they are; `None` for other URLs."""
    prefix, _, name = (dns or "").partition("://")
    scheme = SERVICE_SCHEMES.get(prefix)
    return (scheme, name) if scheme is not None and is_host(name) and ":" not in name else None


def endpoint(text: str) -> tuple[str, int]:
    """Address and port of a name server. Raises `ConfigError`."""
    try:
        parts = urlsplit(f"//{text}")
        return str(ipaddress.ip_address(parts.hostname or "")), parts.port or DNS_PORT
    except ValueError as error:
        raise ConfigError(f"discovery.nameserver {text!r}: expected ADDRESS[:PORT]") from error


def check_admin(admin: Admin, announced: bool) -> None:
    """Raises `ConfigError`: who changes the fleet needs a key, and networks are networks."""
    if admin.key_env is not None and admin.key_file is not None:
        raise ConfigError("admin.key_file: there is a key_env already; one key, one place")
    if admin.port is not None and admin.key_env is None and admin.key_file is None:
        raise ConfigError("admin.port: changes of state need a key; set admin.key_env or admin.key_file")
    if admin.allow and admin.port is None and not announced:
        raise ConfigError(
            "admin.allow: registrations come in on a listener of their own, or through Redis; "
            "set admin.port or discovery.redis"
        )
    for position, network in enumerate(admin.allow):
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ConfigError(f"admin.allow[{position}]: {error}") from error


def check_redis(url: str, called: str = "redis.url") -> None:
    """Raises `ConfigError`, without the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigError(f"{called}: begins with redis://, rediss:// or unix://")
        if not (parts.path if parts.scheme == "unix" else parts.hostname) or parts.port == 0:
            raise ConfigError(f"{called}: names no server")
    except ValueError as error:
        raise ConfigError(f"{called}: is no URL") from error


def traces_url(text: str) -> str:
    """Where traces are posted to. Raises `ConfigError`, without the URL: it may hold a password."""
    try:
        parts = urlsplit(text)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.port == 0:
            raise ConfigError("tracing.endpoint: expected http://HOST[:PORT] or https://HOST[:PORT]")
    except ValueError as error:
        raise ConfigError("tracing.endpoint: is no URL") from error
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/v1/traces"


def check_listeners(server: Server, admin: Admin) -> None:
    """Raises `ConfigError` when both would listen at the same place. Port 0 is another one each time."""
    overlap = server.host == admin.host or not EVERYWHERE.isdisjoint((server.host, admin.host))
    if admin.port and admin.port == server.port and overlap:
        raise ConfigError(f"admin.port: {admin.port} is the port of the gateway itself (server.port, --port) already")


def policy_name(text: str) -> PolicyName:
    """The policy that is called so. Raises `ConfigError`."""
    for name in get_args(PolicyName):
        if name == text:
            return name  # type: ignore[no-any-return]
    raise ConfigError(f"unknown policy {text!r}; policies: {', '.join(get_args(PolicyName))}")


EVERYWHERE = frozenset(("0.0.0.0", "::", ""))
DEFAULT_PORTS = {"http": 80, "https": 443}
SERVICE_SCHEMES = {"srv": "http", "srv+https": "https"}
DNS_PORT = 53
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")


def is_host(text: str) -> bool:
    """An IPv6 address or a name (or IPv4 address) that can be resolved: labels of 1 to 63 characters."""
    return bool((_HOST if ":" in text else _NAME).fullmatch(text))


def replica_url(text: str, called: str = "replica URL") -> str:
    """Normalised base URL of a replica: `http(s)://host:port`, no trailing slash. Raises `ConfigError`, with what the
    URL is `called`."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{called} {text!r}: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or not is_host(parts.hostname) or port == 0:
        raise ConfigError(f"{called} {text!r}: expected http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"{called} {text!r}: only {parts.scheme}://HOST[:PORT], without path, query or user")
    try:
        host = one_spelling(parts.hostname)
    except OSError as error:
        raise ConfigError(f"{called} {text!r}: {parts.hostname} is no IPv6 address") from error
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORTS[parts.scheme]}"


def one_spelling(host: str) -> str:
    """Of a host in lower case: addresses as the resolver writes them, so that one replica is one however it was
    written. A name keeps its final dot, which changes where it is looked up. Raises `OSError` for a wrong IPv6
    address."""
    if ":" in host:
        address, percent, zone = host.partition("%")
        if zone.startswith("25") and len(zone) > 2:  # the percent sign itself, escaped as in a URL
            zone = zone[2:]
        return f"[{socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, address))}{percent}{zone}]"
    bare = host.removesuffix(".")
    try:
        return socket.inet_ntoa(socket.inet_aton(bare))  # 127.1 and 0x7f000001 as well, as the resolver reads them
    except OSError:
        return bare if bare == "localhost" else host
