"""A bundle made ready for a device: a folder that is hosted as it is, and verified whenever it is read.

    pack.json            what it is, the SHA-256 of every other file and of itself
    model.onnx           the network with everything numeric before it, float32
    model-int8.onnx      the same in 8 bits, where that was smaller and as good
    golden.safetensors   recorded inputs and outputs
    pack.sig             who made it, where it is signed
    web/                 the app that runs it in a browser
    index/               what `penstock index` put beside it; not part of what is verified

This module knows files and arrays; `penstock.export` makes packs and `penstock.device` runs them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from penstock.core.errors import ApplicationError, BundleCorrupt, PackCorrupt, PackError
from penstock.core.parts import reading, verify_part
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.signature import key_in_words, signer
from penstock.core.spec import PROTOCOL_DATATYPES, Array, TensorSpec

SCHEMA_VERSION = 1
DESCRIPTION = "pack.json"
SIGNATURE = "pack.sig"
GOLDEN = "golden.safetensors"
MODEL = "model.onnx"
MODEL_INT8 = "model-int8.onnx"
INDEX = "index"
WEB = "web"
FP32, INT8 = "fp32", "int8"
# The hash of pack.json is that of its bytes with zeros where the hash stands.
_UNSEALED = "0" * 64
_SHA256 = re.compile("[0-9a-f]{64}")

Kind = Literal["oneshot", "live"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackState:
    """One leaf of a stream's state: what goes into a step and what comes of it for the next one.

    Args:
        input: Its name among the graph's inputs.
        output: Its name among the outputs.
        dtype: A NumPy dtype name.
        shape: With the batch of one first.
        initial: What all of it is before a stream's first chunk.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    initial: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLive:
    """How a live signal goes through the graph.

    Args:
        rate_hz: Frames of the signal in a second.
        chunk: Frames of a chunk.
        states: What is remembered from one chunk to the next.
        length: The input that says how many frames of the chunk are valid, int64 `[1]`.
        last: The input that says whether the stream ends with this chunk, bool `[1]`.
        output_length: The output that says how many of its frames are valid, int64 `[1]`.
    """

    rate_hz: float
    chunk: int
    states: tuple[PackState, ...]
    length: str
    last: str
    output_length: str

    def initial_states(self) -> dict[str, Array]:
        """The state of a stream before its first chunk, by the graph's inputs."""
        return {state.input: np.full(state.shape, state.initial, state.dtype) for state in self.states}

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """What `dataclasses.asdict` made of it.

        Raises:
            KeyError, TypeError: A field is missing or unknown.
        """
        states: list[dict[str, Any]] = [{**state, "shape": tuple(state["shape"])} for state in fields["states"]]
        others: dict[str, Any] = {key: value for key, value in fields.items() if key != "states"}
        return cls(states=tuple(PackState(**state) for state in states), **others)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackModel:
    """One graph of the network.

    Args:
        file: Its name in the pack.
        ms: Milliseconds for one input on one thread of the machine that exported it.
        agreement: The share of golden answers whose likeliest entry is the bundle's; None where the output has no
            labels.
        accuracy: The share of validation examples that it answers rightly; None where there were none to ask.
    """

    file: str
    ms: float
    agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackGolden:
    """Recorded inputs and outputs.

    Args:
        inputs: One array each, as it goes into the graph but without a batch dimension; of a live signal whole signals.
        outputs: What the bundle answered, `[N, ...]`.
        tolerance: The largest absolute difference that still counts as the same answer.
    """

    inputs: tuple[Array, ...]
    outputs: Array
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A pack whose every file was found to be the one that was written.

    Args:
        folder: Where it is.
        name: The application's name.
        description: One sentence for people.
        licence: Under which it may be used; empty if nobody said.
        made: By which versions, of which bundle (its content hash) and when.
        kind: `"oneshot"`, or `"live"` for streams.
        input: What goes into the graph: any size where a dimension is None, and then without a batch dimension.
        input_name: Of the graph's input.
        outputs: What comes of it, each without its batch dimension: the answer first, the embedding where there is one.
        recognition: How the answer becomes a label, None where it does not.
        live: Of streams, how they go through the graph.
        tolerance: The largest difference allowed on the golden examples.
        golden_count: How many there are.
        models: The graphs by precision, `"fp32"` and maybe `"int8"`.
        files: The SHA-256 and the size in bytes of each file, by its path in the folder.
        signed_by: The public key, 32 bytes, that signed it; None where it is not signed.
    """

    folder: Path
    name: str
    description: str
    licence: str
    made: dict[str, str]
    kind: Kind
    input: RawSpec
    input_name: str
    outputs: tuple[TensorSpec, ...]
    recognition: Recognition | None
    live: PackLive | None
    tolerance: float
    golden_count: int
    models: dict[str, PackModel]
    files: dict[str, tuple[str, int]]
    signed_by: bytes | None = None

    @property
    def varies(self) -> bool:
        """Whether inputs of several sizes are taken."""
        return None in self.input.shape

    def model(self, precision: str = FP32) -> Path:
        """The file of the graph in a precision.

        Raises:
            PackError: The pack has none of it.
        """
        if precision not in self.models:
            raise PackError(f"the pack {self.folder} has no {precision} model; it has {', '.join(self.models)}.")
        return self.folder / self.models[precision].file

    def golden(self) -> PackGolden:
        """Its recorded examples.

        Raises:
            PackCorrupt: They are not those of this pack.
        """
        file = self.folder / GOLDEN
        try:
            arrays: dict[str, Array] = load_arrays(_read(file))
            names = [f"raw.{index}" for index in range(self.golden_count)] if self.varies else []
            inputs = tuple(arrays[name] for name in names) if names else tuple(arrays["inputs"])
            golden = PackGolden(inputs=inputs, outputs=arrays["outputs"], tolerance=self.tolerance)
        except (SafetensorError, KeyError) as error:
            raise PackCorrupt(f"{file} is not readable ({error}); export the bundle again.") from None
        if not len(golden.inputs) == len(golden.outputs) == self.golden_count:
            raise PackCorrupt(f"{file} does not hold {self.golden_count} examples; export the bundle again.")
        return golden

    def to_json(self) -> dict[str, Any]:
        """What stands in pack.json, its own hash left out."""
        live = None if self.live is None else asdict(self.live)
        models = {name: _without_none(asdict(model)) for name, model in self.models.items()}
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "description": self.description,
            "licence": self.licence,
            "made": self.made,
            "kind": self.kind,
            "input": {"name": self.input_name, **self.input.to_json()},
            "outputs": [output.to_json() for output in self.outputs],
            "recognition": None if self.recognition is None else self.recognition.to_json(),
            "live": live,
            "golden": {"tolerance": self.tolerance, "count": self.golden_count},
            "models": models,
            "files": {path: {"sha256": sha256, "bytes": size} for path, (sha256, size) in self.files.items()},
        }

    @classmethod
    def from_json(cls, folder: Path, fields: Any) -> Self:
        """The pack that `to_json` wrote.

        Raises:
            PackCorrupt: Another schema version, or a field is missing or of another type.
        """
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise PackCorrupt(
                f"{folder / DESCRIPTION} has schema version {version!r}; this penstock reads {SCHEMA_VERSION}. "
                f"Export the bundle again with this version."
            )
        try:
            recognition, live = fields["recognition"], fields["live"]
            pack = cls(
                folder=folder,
                input=RawSpec.from_json({key: value for key, value in fields["input"].items() if key != "name"}),
                input_name=fields["input"]["name"],
                outputs=tuple(TensorSpec.from_json(output) for output in fields["outputs"]),
                recognition=None if recognition is None else Recognition.from_json(recognition),
                live=None if live is None else PackLive.from_json(live),
                tolerance=float(fields["golden"]["tolerance"]),
                golden_count=int(fields["golden"]["count"]),
                models={name: PackModel(**model) for name, model in fields["models"].items()},
                files={path: (str(file["sha256"]), int(file["bytes"])) for path, file in fields["files"].items()},
                **{key: fields[key] for key in ("name", "description", "licence", "made", "kind")},
            )
            _check(pack)
        except (
            ApplicationError,
            AttributeError,
            BundleCorrupt,
            KeyError,
            OverflowError,
            TypeError,
            ValueError,
        ) as error:
            cause = f"{type(error).__name__}: {error}".rstrip(".")
            raise PackCorrupt(f"{folder / DESCRIPTION} is not readable ({cause}); export the bundle again.") from None
        return pack


def read_pack(folder: str | Path, key: bytes | None = None) -> Pack:
    """The pack in a folder, every file of it verified, and its signature where it has one.

    Args:
        folder: Where it is.
        key: The public key, 32 bytes, of who must have signed it; see `core.signature.read_public_key`. Without one, a
            signature that is there is verified, and none is asked for.

    Raises:
        PackError: There is no pack, or it is not signed by the key.
        PackCorrupt: A file is missing or altered, a signature is not of these files, or the schema is another.
    """
    folder = Path(folder)
    if not os.path.isfile(folder / DESCRIPTION):
        raise PackError(f"{folder} is not a pack (no {DESCRIPTION}); 'penstock export BUNDLE --to DIR' writes one.")
    data = _read(folder / DESCRIPTION)
    signed_by = _signed_by(folder, data, key)
    fields = _unsealed(folder / DESCRIPTION, data)
    pack = Pack.from_json(folder, fields)
    for path, (sha256, size) in pack.files.items():
        verify_part(folder / path, sha256, PackCorrupt, "pack", size)
    object.__setattr__(pack, "signed_by", signed_by)
    return pack


def sealed(pack: Pack) -> bytes:
    """The bytes of pack.json."""
    unsealed = _dumped(pack.to_json() | {"sha256": _UNSEALED})
    return _dumped(pack.to_json() | {"sha256": hashlib.sha256(unsealed).hexdigest()})


def digest(data: bytes) -> tuple[str, int]:
    """What pack.json says of a file's content."""
    return hashlib.sha256(data).hexdigest(), len(data)


def _dumped(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _unsealed(file: Path, data: bytes) -> Any:
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PackCorrupt(f"{file} is not JSON ({error}); copy the pack again.") from None
    seal = fields.get("sha256") if isinstance(fields, dict) else None
    if not isinstance(seal, str) or not _SHA256.fullmatch(seal):
        raise PackCorrupt(f"{file} does not say its own SHA-256; copy the pack again.")
    if hashlib.sha256(data.replace(seal.encode(), _UNSEALED.encode())).hexdigest() != seal:
        raise PackCorrupt(f"{file} is not the file that was written ({len(data):,} bytes); copy the pack again.")
    return fields


def _signed_by(folder: Path, data: bytes, key: bytes | None) -> bytes | None:
    file = folder / SIGNATURE
    if not file.exists():
        if key is not None:
            raise PackError(
                f"{folder} is not signed, and was to be by {key_in_words(key)}; get the pack from who made it."
            )
        return None
    public = signer(data, _read(file), str(file))
    if key is not None and public != key:
        raise PackError(
            f"{folder} is signed by {key_in_words(public)}, not by {key_in_words(key)}; get the pack from who made it."
        )
    return public


def _read(file: Path) -> bytes:
    with reading(file, PackCorrupt, "pack"):
        return file.read_bytes()


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _check(pack: Pack) -> None:
    """Raise ValueError or TypeError unless the fields go together."""
    words = (pack.name, pack.description, pack.licence, pack.input_name, *pack.made.keys(), *pack.made.values())
    if not all(isinstance(word, str) for word in words):
        raise TypeError("a field is of another type")
    if pack.kind not in ("oneshot", "live") or (pack.kind == "live") != (pack.live is not None):
        raise ValueError(f"kind is {pack.kind!r}")
    if pack.live is not None:
        _check_live(pack.live)
    if not pack.outputs or FP32 not in pack.models or pack.golden_count < 1:
        raise ValueError("no output, no fp32 model or no golden example")
    if pack.recognition is not None and pack.outputs[0].shape != (len(pack.recognition.labels),):
        raise ValueError("the recognition has other labels than the first output")
    for path in pack.files:
        parts = PurePosixPath(path)
        foreign = parts.is_absolute() or ".." in parts.parts or "\\" in path or not path.isprintable()
        if foreign or path in (DESCRIPTION, SIGNATURE):
            raise ValueError(f"the file {path!r} cannot be in a pack")
    for name in (GOLDEN, *(model.file for model in pack.models.values())):
        if name not in pack.files:
            raise ValueError(f"the file {name!r} is not named")


def _check_live(live: PackLive) -> None:
    names = [live.length, live.last, live.output_length]
    names += [name for state in live.states for name in (state.input, state.output)]
    sizes = [live.chunk, *(size for state in live.states for size in state.shape)]
    numbers = [live.rate_hz, *(state.initial for state in live.states)]
    if (
        not all(isinstance(name, str) for name in names)
        or not all(type(size) is int and size >= 0 for size in sizes)
        or not all(isinstance(number, int | float) for number in numbers)
        or not all(state.dtype in PROTOCOL_DATATYPES for state in live.states)
        or live.chunk < 1
        or not live.rate_hz > 0
    ):
        raise ValueError("live is not what a stream needs")
