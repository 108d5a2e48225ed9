"""Test 29, the part about keys: nothing reaches a replica without one, and how long a refusal takes tells nothing."""

from __future__ import annotations

import hashlib
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.keys import new_secret
from tests.chaos.conftest import Figures
from tests.chaos.rig import SHORT, Rig, eventually, standing
from tests.proxy.test_access import BAD_KEYS, KEY, METHODS, PATHS

SAMPLES = 2_000 if SHORT else 10_000
SIGNIFICANT = 3.29
"""Standard deviations: one honest run in a thousand lies beyond."""
LEAK_NANOSECONDS = 20
"""What comparing byte by byte would tell at most, for each right byte: the test must be able to see it."""
BODY = b'{"model":"m","messages":[]}'


async def keyed_gateway(rig: Rig, folder: Path, secret: str, http: str) -> None:
    """One gateway that knows one key. `rig` asks for its state without one, so only readiness is waited for."""
    file = folder / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n')
    config = {"auth": {"keys_file": str(file), "required": True}, "server": {"http": http, "log": "off"}}
    gateway = await rig.add_gateway(config, wait=False)

    async def ready() -> bool:
        return (await gateway.get("/ready")).status_code == 200

    await eventually(ready, "the gateway is ready")


def exchange(port: int, method: bytes, target: bytes, headers: bytes) -> bytes:
    """The answer to one request on a connection of its own."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as client:
        body = BODY if method in (b"POST", b"PUT", b"PATCH") else b""
        length = b"content-length: %d\r\n" % len(body) if body else b""
        head = b"%b %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\n%b%b\r\n" % (method, target, headers, length)
        client.sendall(head + body)
        answer = b""
        while piece := client.recv(65_536):
            answer += piece
        return answer


@pytest.mark.parametrize("http", ["fast", "asgi"])
async def test_29_auth_matrix(tmp_path: Path, figures: Figures, http: str) -> None:
    """O-21: paths and their encodings x methods x key states."""
    matrix = list(product(METHODS, PATHS, BAD_KEYS.values()))
    if SHORT:
        matrix = random.Random(29).sample(matrix, 1_500)
    async with standing(tmp_path, replicas=1, gateways=0) as rig:
        await keyed_gateway(rig, tmp_path, KEY, http)
        statuses: Counter[bytes] = Counter()
        for method, target, headers in matrix:
            answer = exchange(rig.gateway.port, method, target, headers)
            statuses[answer.split(b" ", 2)[1] if answer else b"closed"] += 1
        reached = len(rig.replicas[0].received())
        good = b"authorization: Bearer " + KEY.encode() + b"\r\n"
        assert exchange(rig.gateway.port, b"POST", b"/v1/chat/completions", good).startswith(b"HTTP/1.1 200 ")
        assert len(rig.replicas[0].received()) == reached + 1, "the record of the replica works"
    counts = ", ".join(f"{count:,} x {status.decode()}" for status, count in sorted(statuses.items()))
    figures.record(
        29,
        f'auth matrix, http = "{http}"',
        f"{reached} of {len(matrix):,} requests at a replica ({counts})",
        "0 without a valid key",
        reached == 0,
    )
    assert reached == 0
    assert set(statuses) <= {b"400", b"401"}, statuses


def rank_correlation(groups: Sequence[int], values: Sequence[float]) -> float:
    """Spearman's, in standard deviations of what independent values would give."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        at = 0
        while at < len(order):
            end = at
            while end < len(order) and values[order[end]] == values[order[at]]:
                end += 1
            for place in order[at:end]:
                found[place] = (at + end - 1) / 2
            at = end
        return found

    x, y = ranks([float(one) for one in groups]), ranks(values)
    middle = (len(x) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(sum((a - middle) ** 2 for a in x) * sum((b - middle) ** 2 for b in y))
    return covariance / spread * math.sqrt(len(x) - 1)


def refusal_times(port: int, keys: Sequence[bytes]) -> list[float]:
    """Nanoseconds until each of these keys was refused, on one connection."""
    found: list[float] = []
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for key in keys:
            request = b"GET /v1/models HTTP/1.1\r\nhost: g\r\nauthorization: Bearer %b\r\n\r\n" % key
            began = time.perf_counter_ns()
            client.sendall(request)
            answer = client.recv(65_536)
            while not answer.endswith(b"}}"):  # head and body may come apart
                answer += client.recv(65_536)
            found.append(float(time.perf_counter_ns() - began))
            assert answer.startswith(b"HTTP/1.1 401 ")
    return found


async def test_29_wrong_key_timing(tmp_path: Path, figures: Figures) -> None:
    """Wrong keys that agree with the right one in their first 0 to all but one bytes."""
    rng = random.Random(29)
    secret = new_secret()
    lengths = [rng.choice(range(len(secret))) for _ in range(SAMPLES)]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"

    def wrong(length: int) -> bytes:
        other = rng.choice([letter for letter in letters if letter != secret[length]])
        rest = "".join(rng.choices(letters, k=len(secret) - length - 1))
        return (secret[:length] + other + rest).encode()

    keys = [wrong(length) for length in lengths]
    async with standing(tmp_path, replicas=1, gateways=0) as rig:
        await keyed_gateway(rig, tmp_path, secret, "fast")
        refusal_times(rig.gateway.port, keys[:200])
        times = refusal_times(rig.gateway.port, keys)
    seen = rank_correlation(lengths, times)
    leaking = [time + LEAK_NANOSECONDS * length for time, length in zip(times, lengths, strict=True)]
    control = rank_correlation(lengths, leaking)
    median = sorted(times)[len(times) // 2] / 1_000
    figures.record(
        29,
        "wrong-key timing",
        f"{SAMPLES:,} samples, median {median:.0f} us, correlation with the matching prefix {seen:+.1f} sigma "
        f"({LEAK_NANOSECONDS} ns a byte would show as {control:+.1f})",
        f"no significant difference (below {SIGNIFICANT} sigma)",
        abs(seen) < SIGNIFICANT,
    )
    assert abs(seen) < SIGNIFICANT
    if not SHORT:
        assert control > SIGNIFICANT, "this run was too noisy to see anything"


@pytest.mark.parametrize(("slope", "leaks"), [(0.0, False), (1.0, True)])
def test_29_the_statistic_sees_a_leak(slope: float, leaks: bool) -> None:
    rng = random.Random(3)
    lengths: list[Any] = [rng.randrange(46) for _ in range(2_000)]
    values = [rng.expovariate(1 / 50) + slope * length for length in lengths]
    assert (rank_correlation(lengths, values) > SIGNIFICANT) is leaks


async def test_29_isolated_tenants_share_no_cache(tmp_path: Path, figures: Figures) -> None:
    """The engine itself says how much of a prompt it had: all of one's own, nothing of another tenant's."""
    file = tmp_path / "keys.toml"
    secrets = {name: new_secret() for name in ("alice", "bob")}
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
        for name, secret in secrets.items()
    ]
    file.write_text("".join(entries))
    config = {"auth": {"keys_file": str(file), "isolate_tenants": True}}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "The sea. " * 900}]}
    async with standing(tmp_path, replicas=0, embedded=1, gateways=0) as rig:
        gateway = await rig.add_gateway(config, wait=False)

        async def ready() -> bool:
            return (await gateway.get("/ready")).status_code == 200

        await eventually(ready, "the gateway is ready")
        cached: list[int] = []
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as client:
            for name in ("alice", "alice", "bob", "bob"):
                headers = {"Authorization": f"Bearer {secrets[name]}"}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
                cached.append((details or {}).get("cached_tokens") or 0)
    figures.record(
        29,
        "isolated tenants",
        f"cached tokens of one prompt, twice by each of two tenants: {cached}",
        "0 of another tenant's",
        cached[0] == cached[2] == 0,
    )
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
