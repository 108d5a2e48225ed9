"""What a client told its program, in order: the part that the Python drivers share.

A driver is run as `driver.py BASE_URL SCENARIOS`; each scenario is a JSON object with `name`, `model`, `stream`,
`temperature` and `retries`. It prints one JSON object: for each name the steps and the exception, if it ended in one.
Ids stay out: an embedded replica makes new ones each time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 30.0
"""Far more than any scripted answer takes: a client that hangs is a failure with a name, not a lost run."""
QUESTION = "How is the weather in Oslo?"
RESULT = "rain"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Transcript:
    def __init__(self) -> None:
        self.steps: list[list[Any]] = []

    def add(self, kind: str, value: Any) -> None:
        """Text of one kind in a row is one step: where it was cut between events does not matter."""
        if value is None or value == "":
            return
        if self.steps and self.steps[-1][0] == kind and isinstance(value, str):
            self.steps[-1][1] += value
        else:
            self.steps.append([kind, value])


def describe(error: Exception) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return {
        "class": type(error).__name__,
        "status": getattr(error, "status_code", None),
        "code": getattr(error, "code", None),
        "retry_after": None if response is None else response.headers.get("retry-after"),
        "message": str(error),
    }


def lead(talk: Callable[[dict[str, Any], Transcript], None]) -> None:
    told = {}
    for scenario in json.loads(sys.argv[2]):
        transcript = Transcript()
        error = None
        try:
            talk(scenario, transcript)
        except Exception as raised:  # whatever a client raises is what is asked here
            error = describe(raised)
        told[scenario["name"]] = {"steps": transcript.steps, "error": error}
    print(json.dumps(told))
