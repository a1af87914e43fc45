"""Control messages between the supervisor and its processes, as records and as bytes.

They start, change and end things; requests go through the slot table.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from penstock.core.json_record import read_record

# `ModelState.reason` of a model whose engine died.
RESTARTING = "the engine is being started again"
# Begins the reason for a model that a restarted front-end could not attach.
NOT_ATTACHED = "a front-end that was started again cannot serve it"
# `ModelState.reason` of a model that a request loads.
ON_DEMAND = "loaded on first use"
# `ModelState.state` of a name that no model has after all.
WITHDRAWN = "WITHDRAWN"
# Seconds until a lost engine is back: the time that torch takes to import.
RESTART_S = 3.0
# Longest reason in a message: an error may quote a name or a value of any length.
MAX_TEXT = 4096
_REASONS = {"activity", "error", "fallback", "reason"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A control message."""

    kinds: ClassVar[dict[str, "type[Message]"]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState(Message):
    """To a front-end: the state of a model of the repository.

    Args:
        name: The name that requests use.
        version: The version that is served, or that failed to load.
        state: `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`, as in the Open Inference Protocol; or `WITHDRAWN`,
            after which the name has no state.
        reason: Why it is not ready.
        since_ns: Monotonic time, the same in all processes, at which the present step of loading began; 0 if none runs.
        on_demand_ns: Monotonic time from which a request for the model loads it; None if none does.
    """

    name: str
    version: str
    state: str
    reason: str = ""
    since_ns: int = 0
    on_demand_ns: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadModel(Message):
    """To an engine: load a model.

    Args:
        key: Identifies the table in all processes, for the life of the server.
        model: Identifies one version of a model; its replicas in several engines share it.
        name: The name that requests use; empty takes the application's own.
        version: Its number in the model directory.
        bundle: The bundle folder.
        several: Whether more versions of the model may be served.
        pinned: Folder of the copies that are read instead of the bundle and the application's files, see
            `PinnedContent`; empty if those are read.
        unexported: Why the network is not in the cache of exported ones, if it is not: the engine does not export it.
            Empty at the start of the server, when the engine may.
    """

    key: int
    model: int
    name: str
    version: str
    bundle: str
    several: bool = False
    pinned: str = ""
    unexported: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress(Message):
    """From an engine or a front-end: what it does to load or attach a model.

    Args:
        key: That of the command.
        activity: The present step.
    """

    key: int
    activity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportAhead(Message):
    """To a front-end: import the application of a model that an engine begins to load.

    Args:
        pinned: See `LoadModel.pinned`.
    """

    pinned: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStarted(Message):
    """To a front-end: every model of the start is loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendReady(Message):
    """From a front-end, after `ServerStarted`: it reports readiness, and its port of gRPC is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLoaded(Message):
    """From an engine, forwarded to the front-ends: a model is ready. The descriptor of its table comes along.

    Args:
        command: The command, with its name filled in.
        engine: Index of the engine.
        device: Device that runs the network.
        slots: Slots of the table.
        frontends: Front-ends that share the table.
        bundle_hash: Content hash of the bundle that was loaded.
        application: Reference of the application.
        runs_by: `"ONNX Runtime"` or `"torch"`.
        fallback: Why a faster way to run the network or decode its inputs was not taken; empty if none was refused.
        load_s: Seconds that loading took.
        memory_bytes: Growth of the engine's memory meanwhile, see `MemoryUse`; other models' work is in it.
        table_bytes: Size of the table.
        state_bytes: Bytes of a live stream's state that go through the table for tickets; 0 where none do.
        state_layout: See `Executor`.
    """

    command: LoadModel
    engine: int
    device: str
    slots: int
    frontends: int
    bundle_hash: str
    application: str
    runs_by: str = "torch"
    fallback: str = ""
    load_s: float = 0.0
    memory_bytes: int = 0
    table_bytes: int = 0
    state_bytes: int = 0
    state_layout: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadChain(Message):
    """To a front-end: serve a chain. The descriptor of its counts comes along.

    Args:
        key: Identifies the chain in all processes.
        reference: Reference of the chain.
        again: Whether it is served already, so that it waits for a part that is missing.
        pinned: Folder of the copies of its sources, see `PinnedModels`; empty without any.
        name: Its name, where it is served already.
    """

    key: int
    reference: str
    again: bool
    pinned: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLoaded(Message):
    """From a front-end: a chain is served.

    Args:
        key: As in `LoadChain`.
        name: Its name.
        parts: Names of its parts.
    """

    key: int
    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandFailed(Message):
    """The command for this key or token failed.

    Args:
        key: The key or token.
        error: Why.
        status: HTTP's, for a client that sent the command.
        of_bundle: Whether the bundle or its application is at fault.
    """

    key: int
    error: str
    status: int = 400
    of_bundle: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandDone(Message):
    """The command for this key or token is done."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadModel(Message):
    """To an engine: unload a model."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportUse(Message):
    """To an engine: reply `EngineUse` or `UseUnknown`."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UseUnknown(Message):
    """From an engine: its use cannot be measured, for this reason. The key is as in `ReportUse`."""

    key: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUse(Message):
    """From an engine: the use of its tables and of its device's memory.

    Args:
        key: As in `ReportUse`.
        tables: Keys of its tables.
        used_ns: For each table, monotonic time of its last batch; 0 if it ran none.
        busy: For each table, whether requests wait in it or live streams are open.
        used_bytes: Memory in use, see `MemoryUse`.
        total_bytes: Memory of the device.
    """

    key: int
    tables: tuple[int, ...]
    used_ns: tuple[int, ...]
    busy: tuple[bool, ...]
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RetireTable(Message):
    """To a front-end: submit nothing more to a table; reply `TableRetired` once no request waits for it."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRetired(Message):
    """From a front-end: no request waits for this table any more."""

    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed(Message):
    """From a process that was just started: it cannot serve, and ends."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropEngine(Message):
    """To a front-end: an engine has died, with all its tables."""

    engine: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartListening(Message):
    """To a front-end: accept connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOverListener(Message):
    """To a front-end: also accept connections of a front-end that died. Its listening socket comes along."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseListener(Message):
    """To a front-end: the front-end that died accepts its own connections again."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontendUse(Message):
    """From a front-end, each second: what it does.

    Args:
        busy: CPU time of its process over the time that passed since the last report.
        movable: Connections with a request since then that it may hand over, each after its present request.
        room: Further connections that it can take.
    """

    busy: float
    movable: int
    room: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOver(Message):
    """To a front-end: hand over connections to another one.

    Args:
        count: How many.
        target: Index of the other one.
    """

    count: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedOver(Message):
    """From a front-end, forwarded to another one: a client's connection between two requests. Its socket comes along.

    Args:
        target: Index of the front-end that takes it.
    """

    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Message):
    """To a front-end: be not ready from now on, and go on; `Drain` follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain(Message):
    """To a front-end: answer the accepted requests, then end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeModel(Message):
    """From a front-end: a client's request to load or unload a model. The reply carries the token as its key."""

    token: int
    name: str
    unload: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandModel(Message):
    """From a front-end: a request came for a model that is loaded on first use."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat(Message):
    """To the supervisor: the event loop of this process runs."""


def encode_message(message: Message) -> bytes:
    """Encode a message as JSON; reasons, such as an error's, are cut at `MAX_TEXT` characters."""
    fields = {name: value[:MAX_TEXT] if name in _REASONS else value for name, value in asdict(message).items()}
    return json.dumps([type(message).__name__, fields]).encode()


def decode_message(data: bytes) -> Message:
    """Decode what `encode_message` wrote."""
    kind, fields = json.loads(data)
    return read_record(Message.kinds[kind], fields)
