"""The pack: a bundle exported for devices, a folder that is hosted as it is and verified on every read.

    pack.json            description, the SHA-256 of every other file and of itself
    model.onnx           the network with its numeric preparation, float32
    model-int8.onnx      the same in 8 bits, if that was smaller and as accurate
    golden.safetensors   recorded inputs and outputs
    pack.sig             the signature, if the pack is signed
    web/                 the app that runs it in a browser
    index/               written by `penstock index`; not verified with the pack

This module handles files and arrays; `penstock.export` makes packs and `penstock.device` runs them.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

import numpy as np

from penstock.core.agreement import Agreement, RowSets, scales_of
from penstock.core.dense import Dense
from penstock.core.errors import ApplicationError, BundleCorrupt, PackCorrupt, PackError
from penstock.core.example_arrays import read_examples
from penstock.core.golden import raw_names
from penstock.core.json_record import json_bytes, read_record, record_json
from penstock.core.pack_tensors import PackTensors, rows_of
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.record import ChunkSpec, RecordSpec, chunk_spec
from penstock.core.signature import key_text, verify_signature
from penstock.core.spec import PROTOCOL_DATATYPES, Array, TensorSpec
from penstock.core.text import ByteText, fits_text
from penstock.core.verified_folder import FolderFiles

SCHEMA_VERSION = 2
DESCRIPTION = "pack.json"
SIGNATURE = "pack.sig"
GOLDEN = "golden.safetensors"
MODEL = "model.onnx"
MODEL_INT8 = "model-int8.onnx"
INDEX = "index"
WEB = "web"
# Inputs of a golden example as JSON by name.
EXAMPLE = "web/example.json"
FP32, INT8 = "fp32", "int8"
# The name of an input of any size.
RAW = "raw"
_FILES = FolderFiles(PackCorrupt, "pack", "export the bundle again", SCHEMA_VERSION)
# Fields of a pack that pack.json holds under the same names.
_SAME = (
    "name",
    "description",
    "licence",
    "made",
    "kind",
    "outputs",
    "answers",
    "recognition",
    "dense",
    "live",
    "models",
)
# pack.json's own hash is computed over its bytes with these zeros in place of the hash.
_NO_HASH = "0" * 64
_MALFORMED = (ApplicationError, AttributeError, BundleCorrupt, KeyError, OverflowError, TypeError, ValueError)
_SHA256 = re.compile("[0-9a-f]{64}")

Kind = Literal["oneshot", "live"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackState:
    """One tensor of a stream's state: an input of a step, and the output that feeds the next step.

    Args:
        input: Its name among the graph's inputs.
        output: Its name among the graph's outputs.
        dtype: A NumPy dtype name.
        shape: Including the batch dimension of one.
        initial: Value of every element before a stream's first chunk.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    initial: bool | float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLive:
    """Inputs and outputs of a live graph.

    Args:
        rate_hz: Frames of the signal per second.
        chunk: Frames of a chunk.
        states: State from one chunk to the next.
        length: Input for the number of valid frames of the chunk, int64 `[1]`.
        last: Input for whether the stream ends with this chunk, bool `[1]`.
        output_length: Output for the number of valid output frames, int64 `[1]`.
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

    def feeds(self, input_name: str, chunk_T: Array, states: Mapping[str, Array], *, last: bool) -> dict[str, Array]:
        """The graph's inputs for one step.

        Args:
            input_name: Name of the chunk's input.
            chunk_T: Up to `chunk` frames; fewer are padded with zeros.
            states: By the graph's inputs.
            last: Whether the stream ends with this chunk.
        """
        padded_T = np.zeros((self.chunk, *chunk_T.shape[1:]), chunk_T.dtype)
        padded_T[: len(chunk_T)] = chunk_T
        length, ends = np.array([len(chunk_T)], np.int64), np.array([last])
        return {input_name: padded_T[None], self.length: length, self.last: ends, **states}

    def next_states(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """The states for the next step, from the graph's outputs behind the first two."""
        return dict(zip((state.input for state in self.states), outputs, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackModel:
    """One graph of the network.

    Args:
        file: Its name in the pack.
        ms: Milliseconds for one input on one thread of the exporting machine.
        agreement: Share of golden answers with the bundle's likeliest entry; None if the output has no labels.
        accuracy: Share of validation examples answered correctly; None without validation examples.
    """

    file: str
    ms: float
    agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackGolden:
    """Recorded inputs and outputs.

    Args:
        inputs: The inputs without a batch dimension, one array or record each; for a live pack, whole signals.
        outputs: The bundle's answers, `[N, ...]`; records where there are several outputs or lengths vary.
        tolerance: Largest allowed absolute difference from `outputs`.
        output: One answer; needed for `sets` only.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
    """

    inputs: tuple[Array, ...]
    outputs: Array
    tolerance: float
    output: ChunkSpec | None = None
    sets: RowSets | None = None

    @property
    def agreement(self) -> Agreement:
        """The rule by which answers agree with `outputs`."""
        return Agreement(output=self.output, sets=self.sets, tolerance=self.tolerance, scales=scales_of(self.outputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A pack whose files were all verified.

    Args:
        folder: The pack's folder.
        name: The application's name.
        description: One sentence for people.
        licence: Licence of the network; empty if not stated.
        made: Versions of the packages that made it, the content hash of its bundle, and the time.
        kind: `"oneshot"`, or `"live"` for streams.
        raw: The graph's input where the application has a `prepare`: an array of any size, without a batch dimension;
            None otherwise.
        inputs: The graph's inputs without a batch dimension; empty with a `raw`.
        outputs: The graph's outputs without batch dimension: the answers, then the embedding if there is one.
        answers: The number of outputs that are the application's.
        recognition: Turns the answer into a label; None if the application has none.
        dense: The geometry of its tiles and maps, for a network that is applied to large pictures; None for others.
        live: Inputs and outputs of a live graph; None for one-shot packs.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
        tolerance: Largest difference allowed on the golden examples.
        golden_count: Number of golden examples.
        models: Graphs by precision, `"fp32"` and maybe `"int8"`.
        files: SHA-256 and size in bytes of each file, by its path in the folder.
        text: How a text becomes the input; None where the application takes no text.
        signed_by: The public key, 32 bytes, that signed it; None if it is not signed.
    """

    folder: Path
    name: str
    description: str
    licence: str
    made: dict[str, str]
    kind: Kind
    outputs: tuple[TensorSpec, ...]
    recognition: Recognition | None
    live: PackLive | None
    tolerance: float
    golden_count: int
    models: dict[str, PackModel]
    files: dict[str, tuple[str, int]]
    raw: RawSpec | None = None
    inputs: tuple[TensorSpec, ...] = ()
    answers: int = 1
    dense: Dense | None = None
    text: ByteText | None = None
    sets: RowSets | None = None
    signed_by: bytes | None = None

    @property
    def tensors(self) -> PackTensors:
        """The inputs and outputs of the graph of a one-shot pack."""
        return PackTensors(input=self.input, outputs=self.outputs, answers=self.answers)

    @property
    def input(self) -> RawSpec | ChunkSpec:
        """One input: the raw array, one tensor of fixed size, or a record of several or varying ones."""
        return chunk_spec(self.inputs) if self.raw is None else self.raw

    @property
    def output(self) -> ChunkSpec:
        """One answer: one tensor of fixed size, or a record of several or varying ones."""
        return chunk_spec(self.outputs[: self.answers])

    def model(self, precision: str = FP32) -> Path:
        """The file of the graph in a precision.

        Raises:
            PackError: The pack does not have it.
        """
        if precision not in self.models:
            raise PackError(f"the pack {self.folder} has no {precision} model; it has {', '.join(self.models)}.")
        return self.folder / self.models[precision].file

    def golden(self) -> PackGolden:
        """Read the recorded examples.

        Raises:
            PackCorrupt: They do not match this pack.
        """
        file = self.folder / GOLDEN
        if self.raw is None:
            inputs = rows_of(read_examples(_FILES, file, "inputs", chunk_spec(self.inputs)))
        else:
            inputs = tuple(_FILES.arrays(file, raw_names(self.golden_count)))
        outputs = read_examples(_FILES, file, "outputs", self.output)
        if not len(inputs) == len(outputs) == self.golden_count:
            raise PackCorrupt(f"{file} does not hold {self.golden_count} examples; export the bundle again.")
        return PackGolden(inputs=inputs, outputs=outputs, tolerance=self.tolerance, output=self.output, sets=self.sets)

    def to_json(self) -> dict[str, Any]:
        """The content of pack.json without its own hash."""
        fields = record_json(self)
        # Left out where there is none, as in packs of earlier versions.
        text = {} if self.text is None else {"text": fields["text"]}
        sets = {} if self.sets is None else {"sets": fields["sets"]}
        return (
            {name: fields[name] for name in _SAME}
            | text
            | sets
            | {
                "schema_version": SCHEMA_VERSION,
                "inputs": fields["inputs"] if self.raw is None else [{"name": self.raw.name, **fields["raw"]}],
                "golden": {"tolerance": self.tolerance, "count": self.golden_count},
                "models": {
                    name: {key: value for key, value in model.items() if value is not None}
                    for name, model in fields["models"].items()
                },
                "files": {path: {"sha256": sha256, "bytes": size} for path, (sha256, size) in self.files.items()},
            }
        )

    @classmethod
    def from_json(cls, folder: Path, given: Any) -> Self:
        """Read what `to_json` wrote.

        Raises:
            PackCorrupt: Another schema version, or a field is missing or of another type.
        """
        _FILES.check_version(folder / DESCRIPTION, given)
        try:
            golden = given["golden"]
            others = {
                "folder": folder,
                **_given_inputs(given["inputs"]),
                "sets": given.get("sets"),
                "tolerance": float(golden["tolerance"]),
                "golden_count": int(golden["count"]),
                "text": given.get("text"),
                "files": {path: (file["sha256"], file["bytes"]) for path, file in given["files"].items()},
            }
            pack = read_record(cls, others | {name: given[name] for name in _SAME})
            _check(pack)
        except _MALFORMED as error:
            raise _FILES.unusable(folder / DESCRIPTION, f"{type(error).__name__}: {error}".rstrip(".")) from None
        return pack


def _given_inputs(inputs: Any) -> dict[str, Any]:
    if len(inputs) != 1 or "max_shape" not in inputs[0]:
        return {"inputs": inputs}
    raw = dict(inputs[0])
    if raw.pop("name") != RAW:
        raise ValueError(f"an input of any size is not named {RAW!r}")
    return {"raw": raw}


def chunks_of(signal_T: Array, chunk: int) -> Iterator[tuple[Array, bool]]:
    """The chunks of a signal and whether each is the last; one of no frames for a signal of none."""
    for start in range(0, max(len(signal_T), 1), chunk):
        yield signal_T[start : start + chunk], start + chunk >= len(signal_T)


def read_pack(folder: str | Path, key: bytes | None = None) -> Pack:
    """Read a pack and verify its files and its signature.

    Args:
        folder: The pack's folder.
        key: The public key, 32 bytes, of the required signer, see `core.signature.read_public_key`. Without one, a
            signature is verified if there is one, but not required.

    Raises:
        PackError: There is no pack, or it is not signed by the key.
        PackCorrupt: A file is missing or altered, the signature does not match, or the schema is another.
    """
    folder = Path(folder)
    if not os.path.isfile(folder / DESCRIPTION):
        raise PackError(f"{folder} is not a pack (no {DESCRIPTION}); 'penstock export BUNDLE --to DIR' writes one.")
    data = _FILES.read(folder / DESCRIPTION)
    signed_by = _signed_by(folder, data, key)
    pack = Pack.from_json(folder, _parse(folder / DESCRIPTION, data))
    for path, (sha256, size) in pack.files.items():
        _FILES.verify(folder / path, sha256, size)
    object.__setattr__(pack, "signed_by", signed_by)
    return pack


def pack_json(pack: Pack) -> bytes:
    """The bytes of pack.json."""
    without_hash = json_bytes(pack.to_json() | {"sha256": _NO_HASH}, ascii=False)
    return json_bytes(pack.to_json() | {"sha256": hashlib.sha256(without_hash).hexdigest()}, ascii=False)


def digest(data: bytes) -> tuple[str, int]:
    """SHA-256 and size of a file's content, as in pack.json."""
    return hashlib.sha256(data).hexdigest(), len(data)


def _parse(file: Path, data: bytes) -> Any:
    given = _FILES.parse(file, data)
    sha256 = given.get("sha256") if isinstance(given, dict) else None
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise PackCorrupt(f"{file} does not state its own SHA-256; copy the pack again.")
    if hashlib.sha256(data.replace(sha256.encode(), _NO_HASH.encode())).hexdigest() != sha256:
        raise _FILES.altered(file, len(data))
    return given


def _signed_by(folder: Path, data: bytes, key: bytes | None) -> bytes | None:
    file = folder / SIGNATURE
    if not file.exists():
        if key is not None:
            raise PackError(
                f"{folder} is not signed, but must be signed by {key_text(key)}; get the pack from its maker."
            )
        return None
    public = verify_signature(data, _FILES.read(file), str(file))
    if key is not None and public != key:
        raise PackError(
            f"{folder} is signed by {key_text(public)}, not by {key_text(key)}; get the pack from its maker."
        )
    return public


def _check(pack: Pack) -> None:
    """Raise ValueError unless the fields are consistent."""
    if (pack.kind == "live") != (pack.live is not None):
        raise ValueError(f"kind is {pack.kind!r}")
    if pack.live is not None:
        _check_live(pack.live)
        if not isinstance(pack.input, TensorSpec) or not isinstance(pack.output, TensorSpec):
            raise ValueError("a live pack has one input and one output of fixed size")
    if not 1 <= pack.answers <= len(pack.outputs) or not (pack.inputs or pack.raw):
        raise ValueError("no input or no output")
    # Raises where a name or a dimension is given twice.
    RecordSpec((*pack.inputs, *pack.outputs))
    if pack.text is not None and not fits_text(pack.input, pack.text):
        raise ValueError("the text has another input")
    if FP32 not in pack.models or pack.golden_count < 1:
        raise ValueError("no fp32 model or no golden example")
    if pack.recognition is not None and pack.outputs[0].shape != (len(pack.recognition.labels),):
        raise ValueError("the recognition has other labels than the first output")
    if pack.dense is not None:
        pack.dense.check(chunk_spec(pack.inputs), pack.output)
    for path in pack.files:
        parts = PurePosixPath(path)
        foreign = parts.is_absolute() or ".." in parts.parts or "\\" in path or not path.isprintable()
        if foreign or path in (DESCRIPTION, SIGNATURE):
            raise ValueError(f"the file {path!r} cannot be in a pack")
    for name in (GOLDEN, *(model.file for model in pack.models.values())):
        if name not in pack.files:
            raise ValueError(f"the file {name!r} is not named")


def _check_live(live: PackLive) -> None:
    states = all(min(state.shape, default=0) >= 0 and state.dtype in PROTOCOL_DATATYPES for state in live.states)
    if not states or live.chunk < 1 or not live.rate_hz > 0:
        raise ValueError("a field of live is missing or out of range")
