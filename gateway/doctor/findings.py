"""What the doctor says: a finding, and the rule behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.doctor.window import Replica, Window


class Severity(StrEnum):
    """Worst first."""

    ERROR = "error"
    """Requests fail or hang, or the gateway cannot do what it is for."""
    WARNING = "warning"
    """It works, slower or dearer than it could."""
    NOTE = "note"
    """To be known."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """What a rule saw."""

    subject: str
    """URL of a server, the replicas of a model, or models at a gateway."""
    evidence: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """The same for programs; units are in the names."""
    change: str = ""
    """What to change, where that depends on what was seen; else the rule's."""


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    """Fixed, so that scripts can rely on it; its heading in docs/troubleshooting.md."""
    severity: Severity
    symptoms: Callable[[Window], Iterable[Symptom]]
    change: str
    flags: tuple[str, ...] = ()
    """Of vLLM, in the order in which to try them."""


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    severity: Severity
    subject: str
    evidence: str
    figures: Mapping[str, float]
    change: str
    flags: tuple[str, ...]

    @property
    def docs(self) -> str:
        return f"docs/troubleshooting.md#{self.code}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def each_replica(look: Callable[[Replica], Symptom | None]) -> Callable[[Window], Iterator[Symptom]]:
    """A rule about one replica as a rule about all of them."""

    def symptoms(window: Window) -> Iterator[Symptom]:
        for replica in window.replicas:
            symptom = look(replica)
            if symptom is not None:
                yield symptom

    return symptoms
