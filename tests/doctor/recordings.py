"""Recorded answers of real servers, in `data/`, and how to record them: pages of vLLM 0.32.0 on a CPU (preset
`cpu-tiny`, most with a smaller cache) and of the gateway in front of it. Only families that the doctor reads are kept;
lines are as they came. States that were not to be had are made by editing single values where a test needs them.

    python -m tests.doctor.recordings URL SECONDS LOOKS > tests/doctor/data/NAME.txt
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from gateway.doctor.looking import publishes, version_of
from gateway.doctor.page import FAMILIES, name_of, read_page
from gateway.doctor.window import Gateway, Look, Replica
from gateway.feeds.dialects import VLLM
from gateway.feeds.probes import read_models
from gateway.operate import Fleet

DATA = Path(__file__).parent / "data"
KEPT = FAMILIES | {name.decode() for name in VLLM.families.wanted}
ONCE = ("/version", "/v1/models", "/kv_event_sources", "/is_paused", "/warmlane/replicas")
FAILED = "FAILED "
"""In place of an answer that did not come, followed by the reason."""

Edit = Callable[[int, str], str]
"""Number of the look and its page -> the page to use."""


@dataclass(frozen=True)
class Recording:
    once: dict[str, str]
    """Answers by path."""
    pages: list[tuple[float, str]]

    def looks(self, *edits: Edit) -> Iterator[Look]:
        for number, (at, text) in enumerate(self.pages):
            if text.startswith(FAILED):
                yield Look(at, None, text.removeprefix(FAILED).strip())
                continue
            for edit in edits:
                text = edit(number, text)
            yield Look(at, read_page(text.encode(), at))

    def replica(self, url: str, *edits: Edit, version: str | None = None, models: str | None = None) -> Replica:
        paused = msgspec.json.decode(self.once["/is_paused"]) if "/is_paused" in self.once else {}
        return Replica(
            url,
            tuple(self.looks(*edits)),
            engine="vllm",
            version=version or version_of(msgspec.json.decode(self.once["/version"])),
            models=read_models((models or self.once["/v1/models"]).encode()),
            kv_events=publishes(msgspec.json.decode(self.once["/kv_event_sources"])),
            paused=paused.get("is_paused"),
        )

    def gateway(self, url: str, *edits: Edit) -> Gateway:
        fleet = msgspec.json.decode(self.once["/warmlane/replicas"], type=Fleet)
        return Gateway(url, tuple(self.looks(*edits)), fleet)


def recording(name: str) -> Recording:
    text = (DATA / f"{name}.txt").read_text(encoding="utf-8")
    once, pages = {}, []
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        at, path = head.split()
        if path == "/metrics":
            pages.append((float(at), body))
        else:
            once[path] = body.strip()
    return Recording(once, pages)


# -- edits


def setting(family: str, values: list[float], **labels: str) -> Edit:
    """Another value for each look on the lines of a family with these labels."""

    def edit(number: int, text: str) -> str:
        lines = text.splitlines()
        chosen = {line for line in lines if is_of(line, family, labels)}
        assert chosen
        return "".join(
            f"{line.rpartition(' ')[0]} {values[number]}\n" if line in chosen else f"{line}\n" for line in lines
        )

    return edit


def labelled(family: str, label: str, value: str) -> Edit:
    """Another label on all lines of a family."""

    def edit(_: int, text: str) -> str:
        edited = re.sub(rf'^({family}{{.*?\b{label}=")[^"]*', rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert edited != text
        return edited

    return edit


def is_of(line: str, family: str, labels: dict[str, str]) -> bool:
    return name_of(line.encode()) == family and all(f'{name}="{value}"' in line for name, value in labels.items())


# -- recording


def kept(page: str) -> str:
    return "".join(f"{line}\n" for line in page.splitlines() if name_of(line.encode()) in KEPT)


def record(url: str, seconds: float, looks: int) -> Iterator[str]:
    began = time.monotonic()
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in ONCE:
            answer = client.get(path)
            if answer.status_code == 200:
                yield f"== 0.00 {path}\n{answer.text}\n"
        for number in range(looks):
            time.sleep(max(0.0, began + number * seconds / (looks - 1) - time.monotonic()))
            try:
                page = kept(client.get("/metrics").text)
            except httpx.HTTPError as error:
                page = f"{FAILED}{error}\n"
            yield f"== {time.monotonic() - began:.2f} /metrics\n{page}"


if __name__ == "__main__":
    sys.stdout.writelines(record(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
