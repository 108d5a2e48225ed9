"""One secret of the gateway's own: from a variable of the environment or from a file, never from the configuration.

What is wrong with it is said with the place where it should be, never with any of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.config import ConfigError


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    text: str
    """Printable ASCII without spaces: it can stand in a header."""
    place: str
    """Key of the configuration, and what it names: for messages."""


def read_secret(called: str, variable: str | None, file: str | None, environ: Mapping[str, str]) -> Secret | None:
    """The secret that the keys `{called}_env` and `{called}_file` name; `None` where both are not set. Raises
    `ConfigError`."""
    if variable is not None and file is not None:
        raise ConfigError(f"{called}_env or {called}_file, not both")
    if variable is not None:
        place, text = f"{called}_env: ${variable}", environ.get(variable, "")
    elif file is not None:
        place = f"{called}_file: {file}"
        try:
            text = Path(file).read_text(encoding="ascii")
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: holds what cannot stand in a header") from error
    else:
        return None
    text = text.strip()
    if not text:
        raise ConfigError(f"{place}: is empty or not there")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{place}: holds what cannot stand in a header")
    return Secret(text, place)
