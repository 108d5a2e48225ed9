"""Limits of a key over the worker processes of one gateway."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path

from tests.chaos.rig import EmbeddedReplica
from tests.several.conftest import Several

SECRETS = {"alice": "wl-alice-0123456789", "watch": "wl-watch-0123456789"}
WORKERS = 3
PER_MINUTE = 30


def test_a_key_has_one_limit_in_all_workers(tmp_path: Path, replicas: list[EmbeddedReplica]) -> None:
    more = {"alice": f"requests_per_minute = {PER_MINUTE}", "watch": ""}
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n{more[name]}\n'
            for name, secret in SECRETS.items()
        )
    )
    several = Several(tmp_path, replicas, SECRETS["watch"], server={"workers": WORKERS}, auth={"keys_file": str(keys)})
    try:
        clients = [several.new_client(SECRETS["alice"]) for _ in range(2 * WORKERS)]  # handed out evenly
        began = time.monotonic()
        statuses = Counter(
            several.chat(f"question {turn}", client, max_tokens=1).status_code
            for turn in range(15)
            for client in clients
        )
        for client in clients:
            client.close()
        came_back = (time.monotonic() - began) * PER_MINUTE / 60
        assert set(statuses) == {200, 429}
        assert PER_MINUTE <= statuses[200] <= PER_MINUTE + came_back + WORKERS
    finally:
        several.stop()
