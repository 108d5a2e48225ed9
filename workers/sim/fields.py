"""Shapes of request bodies: which fields must be there, and of which kind, with vLLM's (pydantic's) words for a fault.

Only fields that a replica acts on are listed; anything else passes, as it does in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workers.sim.errors import Fault, InvalidBody

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class WrongKind(Exception):
    """A value is not of its kind: pydantic's error type and message."""


def _integer(value: Any) -> int:
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise WrongKind("int_from_float", "Input should be a valid integer, got a number with a fractional part")
        return int(value)
    if not isinstance(value, str):
        raise WrongKind("int_type", "Input should be a valid integer")
    try:
        return int(value)
    except ValueError:
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise WrongKind("int_parsing", message) from None


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    if not isinstance(value, str):
        raise WrongKind("float_type", "Input should be a valid number")
    try:
        return float(value)
    except ValueError:
        message = "Input should be a valid number, unable to parse string as a number"
        raise WrongKind("float_parsing", message) from None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        truth = _TRUTH.get(str(value).lower())
        if truth is not None:
            return truth
        raise WrongKind("bool_parsing", "Input should be a valid boolean, unable to interpret input")
    raise WrongKind("bool_type", "Input should be a valid boolean")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongKind("string_type", "Input should be a valid string")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WrongKind("list_type", "Input should be a valid list")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongKind("dict_type", "Input should be a valid dictionary")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise WrongKind("string_type", "Input should be a valid string")


def _integers(value: Any) -> list[int]:
    return [_integer(item) for item in _list(value)]


def _anything(value: Any) -> Any:
    return value


Kind = Callable[[Any], Any]
INTEGER, NUMBER, BOOLEAN, STRING, LIST = _integer, _number, _boolean, _string, _list
OBJECT, STRINGS, INTEGERS, ANYTHING = _object, _strings, _integers, _anything


def check(body: Mapping[str, Any], kinds: Mapping[str, Kind], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The listed fields that are present and not null, as their kinds. Raises InvalidBody with every fault."""
    values: dict[str, Any] = {}
    faults = []
    for name, kind in kinds.items():
        value = body.get(name)
        if value is None and (name not in required or name in body):
            if name not in required:
                continue
        elif value is None:
            faults.append(Fault("missing", f"body.{name}", "Field required", body))
            continue
        try:
            values[name] = kind(value)
        except WrongKind as wrong:
            faults.append(Fault(wrong.args[0], f"body.{name}", wrong.args[1], value))
    if faults:
        raise InvalidBody(*faults)
    return values
