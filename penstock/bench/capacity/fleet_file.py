"""The servers of a fleet from a TOML file, and those that are assumed without one."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penstock.bench.capacity.server_model import ServerModel
from penstock.core.errors import BenchError

# One H200 with 16 cores, two of them for the engine and the system, and 25 Gbit/s.
# Pictures: ResNet-50 in bf16, compiled, one CUDA graph for each size; 75,408 requests/s of 150,528 bytes on nine
# front-ends with a network that does next to nothing. Speech: a GRU of 5 layers of 2,560 in bf16, chunks of 80 ms,
# gather and scatter included; 21,750 streams on twelve front-ends.
PICTURES = ServerModel(
    rows=(1, 8, 32, 64, 128, 256),
    ms=(0.551, 0.801, 1.732, 2.995, 5.578, 10.612),
    frontend_us=119.0,
    frontend_cores=14,
    message_bytes=150_700,
)
SPEECH = ServerModel(
    rows=(1, 64, 256, 1024, 4096, 8192),
    ms=(0.34, 0.42, 0.82, 3.0, 11.6, 23.7),
    frontend_us=44.0,
    frontend_cores=14,
    message_bytes=2_700,
)
SECTIONS = ("pictures", "speech")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetServers:
    """The servers of both services.

    Args:
        pictures: A server of pictures.
        speech: A server of live streams.
    """

    pictures: ServerModel = PICTURES
    speech: ServerModel = SPEECH


def read_fleet(file: Path | None) -> FleetServers:
    """Read the servers of a fleet.

    Args:
        file: TOML with the tables `[pictures]` and `[speech]`, whose keys are the fields of `ServerModel`; what is
            missing stays as it is without a file.

    Raises:
        BenchError: The file cannot be read, or has something else in it.
    """
    if file is None:
        return FleetServers()
    try:
        sections = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"--fleet {file} is not readable ({reason}); name a TOML file.") from None
    unknown = sorted(sections.keys() - set(SECTIONS))
    if unknown:
        raise BenchError(f"{file} has {', '.join(unknown)}; its tables are [pictures] and [speech].")
    servers = FleetServers()
    found = {name: _server(file, name, getattr(servers, name), sections.get(name, {})) for name in SECTIONS}
    return FleetServers(**found)


def _server(file: Path, name: str, assumed: ServerModel, entries: object) -> ServerModel:
    if not isinstance(entries, Mapping):
        raise BenchError(f"{name} in {file} is {entries!r}; write it as a table, [{name}].")
    known = [field.name for field in fields(ServerModel)]
    given: dict[str, Any] = {}
    for key, value in entries.items():
        if key not in known:
            raise BenchError(f"[{name}] in {file} has {key!r}; its keys are {', '.join(known)}.")
        given[key] = _numbers(file, name, str(key), value)
    if ("rows" in given) != ("ms" in given):
        raise BenchError(f"[{name}] in {file} has only one of rows and ms; copy both from 'costs' of /v1/stats.")
    try:
        return replace(assumed, **given)
    except BenchError as error:
        raise BenchError(f"[{name}] in {file}: {error}") from None


def _numbers(file: Path, name: str, key: str, value: object) -> object:
    listed = key in ("rows", "ms")
    values = value if isinstance(value, list) else [value]
    kind = int if key == "rows" else int | float
    right = isinstance(value, list) == listed and all(
        isinstance(each, kind) and not isinstance(each, bool) for each in values
    )
    if not right:
        what = "a list of whole numbers" if key == "rows" else "a list of numbers" if listed else "a number"
        raise BenchError(f"{key} of [{name}] in {file} is {value!r}; give {what}.")
    return value
