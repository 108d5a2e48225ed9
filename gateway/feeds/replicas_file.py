"""A file that lists replicas, as the configuration does: `[[replicas]]` with the same keys. It is read again and again,
so it counts whoever replaces it, and however. Whatever is wrong with it, the replicas from before stay.

A file without `replicas` is wrong, for it may be half written; `replicas = []` says that there are none.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.config import ConfigError, Replica, checked_replicas
from gateway.config_errors import explained
from gateway.core.model import ReplicaId
from gateway.feeds.engines import Said
from gateway.feeds.sources import Found, SourceFailed
from gateway.regular_file import read_regular


class Listed(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    replicas: list[Replica]


class ReplicasFile:
    """A source. `say` hears what the file says of engines."""

    label = "file"

    def __init__(self, file: Path, say: Callable[[Mapping[ReplicaId, Said]], None]) -> None:
        """Raises `ConfigError`: a gateway does not start with a file that it cannot read."""
        self.place = str(file)
        self._file = file
        self._say = say
        try:
            self.known = self._use(self._read()).replicas
        except OSError as error:
            raise ConfigError(f"discovery.replicas_file: {file}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"discovery.replicas_file: {file}: {error}") from error

    async def look(self) -> Found:
        try:
            return self._use(await asyncio.to_thread(self._read))  # also to understand much of it takes a while
        except OSError as error:
            raise SourceFailed(error.strerror or "cannot be read") from error
        except ConfigError as error:
            raise SourceFailed(str(error)) from error

    def _read(self) -> list[Replica]:
        """Raises `OSError` and `ConfigError`."""
        return read_replicas(read_regular(self._file))

    def _use(self, replicas: list[Replica]) -> Found:
        self._say({ReplicaId(one.url): Said(one.engine, one.cache_tokens) for one in replicas})
        return Found({ReplicaId(one.url): one.prefill_rate for one in replicas})


def read_replicas(content: bytes) -> list[Replica]:
    """Raises `ConfigError`."""
    try:
        table = tomllib.loads(content.decode())
        return checked_replicas(msgspec.convert(table, Listed).replicas)
    except RecursionError as error:
        raise ConfigError("not TOML: nested too deeply") from error
    except ValueError as error:  # also a number of some thousand digits
        raise ConfigError(f"not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(explained(str(error), Listed)) from error
