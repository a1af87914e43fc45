"""The pack: a bundle exported for devices, a folder that is hosted as it is and verified on every read.

    pack.json            description, the SHA-256 of every other file and of itself
    model.onnx           the network with its numeric preparation, float32
    model-int8.onnx      the same in 8 bits, if that was smaller and as accurate
    begin.onnx           instead of model.onnx where answers take steps, with
    step.onnx            the network's step
    golden.safetensors   recorded inputs and outputs
    pack.sig             the signature, if the pack is signed
    web/                 the app that runs it in a browser
    index/               written by `penstock index`; not verified with the pack

This module handles files and arrays; `penstock.export` makes packs and `penstock.device` runs them.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from penstock.core.agreement import RowSets
from penstock.core.bundles.example_arrays import read_examples
from penstock.core.bundles.golden import raw_names
from penstock.core.errors import ApplicationError, BundleCorrupt, PackCorrupt, PackError
from penstock.core.generate import Generate, whole_answer
from penstock.core.json_record import json_bytes, read_record, record_json
from penstock.core.packs.pack_golden import PackGolden
from penstock.core.packs.pack_live import PackLive, check_live
from penstock.core.packs.pack_tensors import PackTensors, rows_of
from penstock.core.packs.signature import key_text, verify_signature
from penstock.core.pictures.boxes import Boxes
from penstock.core.pictures.dense import Dense
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.record import ChunkSpec, RecordSpec, chunk_spec
from penstock.core.spec import TensorSpec
from penstock.core.storage.regular_file import MAX_TEXT_BYTES
from penstock.core.storage.verified_folder import PACK_DESCRIPTION, FolderFiles
from penstock.core.texts.subword_text import DeclaredText, SubwordReply
from penstock.core.texts.text import ByteText

SCHEMA_VERSION = 2
SIGNATURE = "pack.sig"
GOLDEN = "golden.safetensors"
MODEL, MODEL_INT8 = "model.onnx", "model-int8.onnx"
# Of a network whose answer takes steps.
BEGIN, STEP = "begin.onnx", "step.onnx"
INDEX, WEB = "index", "web"
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
VOCABULARY = "vocabulary"
# Left out of pack.json where they are None.
_OPTIONAL = ("generate", "sets", "shows", "text", "reply")
# Fields with the name of a file.
_WITH_FILES = ("text", "reply")
# pack.json's own hash is computed over its bytes with these zeros in place of the hash.
_NO_HASH = "0" * 64
_MALFORMED = (ApplicationError, AttributeError, BundleCorrupt, KeyError, OverflowError, TypeError, ValueError)
_SHA256 = re.compile("[0-9a-f]{64}")

Kind = Literal["oneshot", "live", "generate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackModel:
    """The network in one precision.

    Args:
        file: Name of its graph in the pack; where answers take steps, of the graph of `begin`.
        ms: Milliseconds for one input on one thread of the exporting machine; where answers take steps, of `begin`.
        agreement: Share of golden answers with the bundle's likeliest entry; None if the output has no labels.
        accuracy: Share of validation examples answered correctly; None without validation examples.
        step: Name of the graph of `step`; None where answers take one step.
        step_ms: Milliseconds for the first step of an answer, as `ms`.
    """

    file: str
    ms: float
    agreement: float | None = None
    accuracy: float | None = None
    step: str | None = None
    step_ms: float | None = None

    @property
    def files(self) -> list[str]:
        """Names of the graphs in the pack."""
        return [self.file, *([] if self.step is None else [self.step])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A pack whose files were all verified.

    Args:
        folder: The pack's folder.
        name: The application's name.
        description: One sentence for people.
        licence: Licence of the network; empty if not stated.
        made: Versions of the packages that made it, the content hash of its bundle, and the time.
        kind: `"oneshot"`, `"live"` for streams, or `"generate"` for answers that take steps.
        raw: The graph's input where the application has a `prepare`: an array of any size, without a batch dimension;
            None otherwise.
        inputs: The graph's inputs without a batch dimension; empty with a `raw`.
        outputs: The graph's outputs without batch dimension: the answers, then the embedding if there is one; where
            answers take steps, the outputs of one step.
        answers: The number of outputs that are the application's.
        recognition: Turns the answer into a label; None if the application has none.
        dense: The geometry of its tiles and maps, for a network that is applied to large pictures; None for others.
        shows: Outputs that are boxes in the picture; None for others.
        live: Inputs and outputs of a live graph; None for one-shot packs.
        generate: The state of an answer that takes steps; None for answers of one step.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
        tolerance: Largest difference allowed on the golden examples.
        golden_count: Number of golden examples.
        models: Graphs by precision, `"fp32"` and maybe `"int8"`.
        files: SHA-256 and size in bytes of each file, by its path in the folder.
        text: How a text becomes the input; None where the application takes no text.
        reply: How the answer becomes a text; None where it is none.
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
    generate: Generate | None = None
    shows: Boxes | None = None
    text: DeclaredText | None = None
    reply: SubwordReply | None = None
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
        """One whole answer: one tensor of fixed size, or a record of several or varying ones."""
        if self.generate is not None:
            return whole_answer(self.outputs, self.generate.max_steps)
        return chunk_spec(self.outputs[: self.answers])

    def model(self, precision: str = FP32) -> Path:
        """The file of the graph in a precision; where answers take steps, of `begin`.

        Raises:
            PackError: The pack does not have it.
        """
        return self.graphs(precision)[0]

    def graphs(self, precision: str = FP32) -> list[Path]:
        """The files of the graphs in a precision: one, or those of `begin` and `step`.

        Raises:
            PackError: The pack does not have it.
        """
        if precision not in self.models:
            raise PackError(f"the pack {self.folder} has no {precision} model; it has {', '.join(self.models)}.")
        return [self.folder / name for name in self.models[precision].files]

    @property
    def needed(self) -> list[str]:
        """Names of the files that a pack cannot be without: graphs, golden examples, vocabularies."""
        texts = [text.vocabulary.name for text in (self.text, self.reply) if not isinstance(text, ByteText | None)]
        return [GOLDEN, *(name for model in self.models.values() for name in model.files), *texts]

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
        return PackGolden(
            inputs=inputs,
            outputs=outputs,
            tolerance=self.tolerance,
            output=self.output,
            sets=self.sets,
            exact_whole=self.generate is not None,
        )

    def to_json(self) -> dict[str, Any]:
        """The content of pack.json without its own hash."""
        fields = record_json(self)
        optional = {name: fields[name] for name in _OPTIONAL if fields[name] is not None}
        for name in _WITH_FILES:
            if VOCABULARY in optional.get(name, {}):
                optional[name][VOCABULARY] = optional[name][VOCABULARY].name
                optional[name] = {key: value for key, value in optional[name].items() if value is not None}
        return (
            {name: fields[name] for name in _SAME}
            | optional
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
        _FILES.check_version(folder / PACK_DESCRIPTION, given)
        try:
            golden = given["golden"]
            others = {
                "folder": folder,
                **_given_inputs(given["inputs"]),
                **{name: _with_file(folder, given.get(name)) for name in _OPTIONAL},
                "tolerance": float(golden["tolerance"]),
                "golden_count": int(golden["count"]),
                "files": {path: (file["sha256"], file["bytes"]) for path, file in given["files"].items()},
            }
            pack = read_record(cls, others | {name: given[name] for name in _SAME})
            _check(pack)
        except _MALFORMED as error:
            raise _FILES.unusable(folder / PACK_DESCRIPTION, f"{type(error).__name__}: {error}".rstrip(".")) from None
        return pack


def _given_inputs(inputs: Any) -> dict[str, Any]:
    if len(inputs) != 1 or "max_shape" not in inputs[0]:
        return {"inputs": inputs}
    raw = dict(inputs[0])
    if raw.pop("name") != RAW:
        raise ValueError(f"an input of any size is not named {RAW!r}")
    return {"raw": raw}


def _with_file(folder: Path, given: Any) -> Any:
    """Return a field with the path of the file that it names."""
    if not isinstance(given, dict) or VOCABULARY not in given:
        return given
    name = given[VOCABULARY]
    if not isinstance(name, str) or PurePosixPath(name).name != name:
        raise ValueError(f"{name!r} is no name of a vocabulary")
    return {**given, VOCABULARY: folder / name}


def read_pack(folder: str | Path, key: bytes | None = None) -> Pack:
    """Read a pack and verify its files and its signature.

    Args:
        folder: The pack's folder.
        key: The public key, 32 bytes, of the required signer, see `core.packs.signature.read_public_key`. Without one,
            a signature is verified if there is one, but not required.

    Raises:
        PackError: There is no pack, or it is not signed by the key.
        PackCorrupt: A file is missing or altered, the signature does not match, or the schema is another.
    """
    folder = Path(folder)
    if not os.path.isfile(folder / PACK_DESCRIPTION):
        raise PackError(
            f"{folder} is not a pack (no {PACK_DESCRIPTION}); 'penstock export BUNDLE --out DIR' writes one."
        )
    data = _FILES.read(folder / PACK_DESCRIPTION, MAX_TEXT_BYTES)
    signed_by = _signed_by(folder, data, key)
    pack = Pack.from_json(folder, _parse(folder / PACK_DESCRIPTION, data))
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
    public = verify_signature(data, _FILES.read(file, MAX_TEXT_BYTES), str(file))
    if key is not None and public != key:
        raise PackError(
            f"{folder} is signed by {key_text(public)}, not by {key_text(key)}; get the pack from its maker."
        )
    return public


def _check(pack: Pack) -> None:
    """Raise ValueError unless the fields are consistent."""
    kinds = {"live": pack.live is not None, "generate": pack.generate is not None}
    if any((pack.kind == kind) != is_one for kind, is_one in kinds.items()):
        raise ValueError(f"kind is {pack.kind!r}")
    if pack.generate is not None:
        _check_generate(pack, pack.generate)
    if pack.live is not None:
        check_live(pack.live)
        if not isinstance(pack.input, TensorSpec) or not isinstance(pack.output, TensorSpec):
            raise ValueError("a live pack has one input and one output of fixed size")
    if not 1 <= pack.answers <= len(pack.outputs) or not (pack.inputs or pack.raw):
        raise ValueError("no input or no output")
    # Raises where a name or a dimension is given twice.
    RecordSpec((*pack.inputs, *pack.outputs))
    if pack.text is not None and not pack.text.fits(pack.input):
        raise ValueError("the text has another input")
    if pack.reply is not None and not pack.reply.fits(pack.output):
        raise ValueError("the text has another output")
    if FP32 not in pack.models or pack.golden_count < 1:
        raise ValueError("no fp32 model or no golden example")
    if pack.recognition is not None and pack.outputs[0].shape != (len(pack.recognition.labels),):
        raise ValueError("the recognition has other labels than the first output")
    if pack.dense is not None:
        pack.dense.check(chunk_spec(pack.inputs), pack.output)
    if pack.shows is not None:
        pack.shows.check({spec.name: spec for spec in pack.outputs})
    for path in pack.files:
        parts = PurePosixPath(path)
        foreign = parts.is_absolute() or ".." in parts.parts or "\\" in path or not path.isprintable()
        if foreign or path in (PACK_DESCRIPTION, SIGNATURE):
            raise ValueError(f"the file {path!r} cannot be in a pack")
    for name in pack.needed:
        if name not in pack.files:
            raise ValueError(f"the file {name!r} is not named")


def _check_generate(pack: Pack, generate: Generate) -> None:
    by_name = ({spec.name: spec for spec in side} for side in (pack.inputs, pack.outputs))
    generate.check(pack.name, *by_name)
    if pack.answers != len(pack.outputs) or any(model.step is None for model in pack.models.values()):
        raise ValueError("an answer takes steps and has an embedding or no graph of a step")
