"""What is wrong with a configuration, in the words of TOML: msgspec's validation messages with the path of the key in
front, as it is written in the file, and the nearest key where one is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<table>.*)`)?$")
_MISSING_KEY = re.compile(r"Object missing required field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<table>.*)`)?$")
_NO_CHOICE = re.compile(r"Invalid enum value (?P<value>.*) - at `\$\.?(?P<key>.*)`$")
_WRONG_TYPE = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `\$\.?(?P<key>.*)`)?$")
_WRONG_SIZE = re.compile(r"Expected `(?P<wanted>[^`]*)` (?P<sign>>=|<=|>|<) (?P<limit>\S+) - at `\$\.?(?P<key>.*)`$")
_NO_MATCH = re.compile(r"Expected `str` matching regex .* - at `\$\.?(?P<key>.*)`$")
_WRONG_VALUE = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<key>.*)`$")

WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "array": "a list",
    "object": "a table",
}
"""For msgspec's names of types. Its `null` has no word: TOML has none, a key is left out."""
SIGNS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def explained(message: str, root: type[Struct]) -> str:
    """msgspec's message about what was to become a `root`, for the person who wrote it."""
    if found := _UNKNOWN_KEY.match(message):
        table = found["table"] or ""
        near = nearest(found["key"], table, root)
        return f"unknown key {dotted(table, found['key'])}" + (f"; did you mean {near}?" if near else "")
    if found := _MISSING_KEY.match(message):
        return f"{dotted(found['table'] or '', found['key'])}: missing, and needed"
    if found := _NO_CHOICE.match(message):
        return f"{found['key']}: {found['value']} is none of {', '.join(choices_at(found['key'], root))}"
    if found := _WRONG_TYPE.match(message):
        return wrong_type(found["key"] or "", found["wanted"], found["got"])
    if found := _WRONG_SIZE.match(message):
        limit = found["limit"].removesuffix(".0")
        return f"{found['key']}: expected {words(found['wanted'])} {SIGNS[found['sign']]} {limit}"
    if (found := _NO_MATCH.match(message)) and (described := description_at(found["key"], root)):
        return f"{found['key']}: expected {described}"
    if found := _WRONG_VALUE.match(message):
        return f"{found['key']}: {found['problem'][0].lower()}{found['problem'][1:]}"
    return message


def wrong_type(key: str, wanted: str, got: str) -> str:
    at_top = bool(key) and "." not in key and "[" not in key
    if at_top and (wanted, got) == ("array", "object"):
        return f"{key}: write [[{key}]], with two brackets on each side: there may be several"
    if at_top and (wanted, got) == ("object", "array"):
        return f"{key}: write [{key}], with one bracket on each side: there is one"
    where = f"{key}: " if key else ""
    return f"{where}expected {words(wanted)}, not {words(got)}"


def words(types: str) -> str:
    """For `int | null` and its like."""
    return " or ".join(WORDS.get(name, name) for name in types.split(" | ") if name != "null") or "nothing"


def dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def nearest(key: str, table: str, root: type[Struct]) -> str | None:
    """The known key in this table that is written most like it, else one of another table."""
    if here := get_close_matches(key, keys_of(kind_at(table, root)), 1):
        return here[0]
    if table:
        return None
    elsewhere = {name: other for other in reversed(keys_of(root)) for name in keys_of(kind_at(other, root))}
    near = get_close_matches(key, elsewhere, 1)
    return f"{near[0]} in [{elsewhere[near[0]]}]" if near else None


def keys_of(kind: Any) -> list[str]:
    """Of a table; none of anything else."""
    kind = next((one for one in plain(kind) if isinstance(one, type) and issubclass(one, Struct)), None)
    return [] if kind is None else [field.name for field in msgspec.structs.fields(kind)]


def choices_at(key: str, root: type[Struct]) -> tuple[str, ...]:
    """What may stand at the path of a key: `routing.policy`, or `routing.shadow[1]` in a list."""
    return tuple(one for kind in plain(kind_at(key, root)) if get_origin(kind) is Literal for one in get_args(kind))


def description_at(key: str, root: type[Struct]) -> str | None:
    """What the type at this path says about its text."""
    for kind in plain(kind_at(key, root), annotated=True):
        if get_origin(kind) is Annotated:
            return next((meta.description for meta in get_args(kind)[1:] if isinstance(meta, Meta)), None)
    return None


def kind_at(key: str, root: type[Struct]) -> Any:
    """The type at the path of a key, of an element where it is a list's."""
    kind: Any = root
    for name in filter(None, re.sub(r"\[[^]]*\]", "", key).split(".")):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
        kind = get_args(kind)[0] if get_origin(kind) in (list, tuple) else kind
    return kind


def plain(kind: Any, annotated: bool = False) -> Iterator[Any]:
    """The types of which it may be one, without what is said about them unless `annotated`."""
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        yield one if annotated or get_origin(one) is not Annotated else get_args(one)[0]
