"""The order to export a network, from a server to the process of `penstock.runtime.onnx.export_ahead`."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self, final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOrder:
    """A bundle whose network is exported before an engine loads it.

    Args:
        bundle: The bundle's folder.
        cache: The folder of exported graphs.
        app: The application, if it moved.
        accept_changed: Accept an application whose sources changed.
        devices: Devices of the engines, any of which may be `"auto"`.
        choice: See `Execution`.
        stall_s: See `run_exporter`.
    """

    bundle: str
    cache: str
    app: str | None
    accept_changed: bool
    devices: tuple[str, ...]
    choice: str
    stall_s: float

    def to_json(self) -> str:
        """Encode for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportWord:
    """A line that the process writes.

    Args:
        activity: The present step; empty in the last line.
        failure: In the last line, why the network was not exported; empty if it was.
        on_cpu: Whether any engine runs on a CPU; otherwise nothing was to be exported.
    """

    activity: str = ""
    failure: str = ""
    on_cpu: bool = True

    def to_line(self) -> bytes:
        """Encode as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Decode what `to_line` wrote."""
        return cls(**json.loads(line))
