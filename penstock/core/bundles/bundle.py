"""The bundle: the folder that training writes and everything else reads, verified on every read.

    manifest.json         description, and the SHA-256 of the other files and of itself
    weights.safetensors   the network's parameters and buffers
    golden.safetensors    recorded `inputs` and `outputs`, `raw.0`, `raw.1`, ... where inputs are prepared, and
                          `network` where the network's outputs are finished
    prepare.onnx          the application's `prepare`, exported; only where it has one
    language.safetensors  the language model of the endpoint beam; only where it has one

No pickle, no code. This module handles files and arrays; `penstock.runtime.bundle_writer` adds the network.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from safetensors.numpy import save as save_arrays

from penstock.core.agreement import RowSets
from penstock.core.application import Application
from penstock.core.bundles.example_arrays import example_arrays, read_examples
from penstock.core.bundles.golden import Golden, raw_names
from penstock.core.errors import (
    BundleCorrupt,
    BundleError,
    RequestError,
    SourcesChanged,
)
from penstock.core.generate import Generate, whole_answer
from penstock.core.initial import StartedFrom
from penstock.core.json_record import json_bytes, read_record, record_json
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec, chunk_spec
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import TensorSpec
from penstock.core.storage.atomic_write import replace_folder, write_through
from penstock.core.storage.regular_file import MAX_TEXT_BYTES
from penstock.core.storage.remote_folder import url_of
from penstock.core.storage.verified_folder import PACK_DESCRIPTION, FolderFiles

SCHEMA_VERSION = 2
WEIGHTS = "weights.safetensors"
GOLDEN = "golden.safetensors"
PREPARE = "prepare.onnx"
LANGUAGE = "language.safetensors"
MANIFEST = "manifest.json"
# The inputs of `finish`, in golden.safetensors.
NETWORK = "network"
_FILES = FolderFiles(BundleCorrupt, "bundle", "write the bundle again", SCHEMA_VERSION)
_SELF = "sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a bundle.

    Args:
        name: The application's name.
        reference: Finds the application again, see `find_application`; empty if it was made in a notebook.
        sources: The SHA-256 of each of the application's source files.
        inputs: The tensors of one raw input chunk.
        outputs: The tensors of one output chunk.
        files: The SHA-256 of each file beside the manifest.
        tolerance: The largest difference allowed on the golden examples.
        metrics: Validation metrics by name; in JSON, one that is NaN or infinite is null.
        versions: Versions of the libraries that wrote it.
        parameters: Number of trained parameters.
        rate_hz: Frames per second of a live signal; None for one-shot requests.
        raw: The raw array that `prepare` takes; None without a `prepare`.
        generate: The state and the limits of answers that take steps; None for answers of one step.
        initial: The weights that its training started from; None for random ones.
        network: The tensors that the network gives to `finish`; empty without a `finish`.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
        schema_version: Layout of this record.
    """

    name: str
    reference: str
    sources: dict[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: dict[str, str]
    tolerance: float
    metrics: dict[str, float]
    versions: dict[str, str]
    parameters: int
    rate_hz: float | None = None
    raw: RawSpec | None = None
    generate: Generate | None = None
    initial: StartedFrom | None = None
    network: tuple[TensorSpec, ...] = ()
    sets: RowSets | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def input(self) -> ChunkSpec:
        """One raw input chunk."""
        return chunk_spec(self.inputs)

    @property
    def output(self) -> ChunkSpec:
        """One output chunk."""
        return chunk_spec(self.outputs)

    @property
    def answer(self) -> ChunkSpec:
        """One whole answer, see `Application.answer`."""
        return self.output if self.generate is None else whole_answer(self.outputs, self.generate.max_steps)

    @property
    def content_hash(self) -> str:
        """Hash of the content: the same weights, examples, specs and sources give the same hash anywhere."""
        content = {key: value for key, value in self.to_json().items() if key not in ("reference", "versions")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        fields = record_json(self) | {"metrics": metrics}
        for name in ("raw", "generate", "initial"):
            if fields[name] is None:
                # Left out, so that the hash is that of earlier bundles.
                del fields[name]
        if not self.network:
            del fields["network"], fields["sets"]
        return fields

    @classmethod
    def from_json(cls, given: Any) -> Self:
        """Read what `to_json` wrote.

        Raises:
            BundleCorrupt: Another schema version, or a field is missing or unknown.
        """
        _FILES.check_version(MANIFEST, given)
        try:
            metrics = {name: math.nan if value is None else value for name, value in given["metrics"].items()}
            return read_record(cls, given | {"metrics": metrics})
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _FILES.unusable(MANIFEST, error) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFiles:
    """A bundle on disk whose files were all verified against its manifest.

    Args:
        folder: The bundle's folder.
        manifest: Its description.
        golden: Its recorded examples.
    """

    folder: Path
    # Left out of what a notebook prints: thousands of numbers.
    manifest: Manifest = field(repr=False)
    golden: Golden = field(repr=False)

    @property
    def weights(self) -> Path:
        """The weights, in safetensors."""
        return self.folder / WEIGHTS

    @property
    def prepare(self) -> Path | None:
        """The ONNX graph that makes an input of one raw array; None if the application has none."""
        return None if self.manifest.raw is None else self.folder / PREPARE

    def check_specs(self, application: Application) -> None:
        """Check that an application declares the specs that the bundle was made with.

        Raises:
            BundleError: A spec differs.
        """
        manifest = self.manifest
        for side, now, then in (
            ("input", application.input, manifest.input),
            ("output", application.output, manifest.output),
        ):
            if now != then:
                raise BundleError(
                    f"the bundle's {side} is {then.describe()}, but application {application.name!r} now declares "
                    f"{now.describe()}{_other_fields(now, then)}; train it again."
                )
        raw = None if application.prepare is None else application.prepare.raw
        if raw != manifest.raw:
            raise BundleError(
                f"the bundle's inputs are {_prepared(manifest.raw)}, but those of application {application.name!r} are "
                f"now {_prepared(raw)}; train it again."
            )
        if _steps(application.generate) != _steps(manifest.generate):
            raise BundleError(
                f"the bundle was made for {_steps(manifest.generate)}, but application {application.name!r} now "
                f"declares {_steps(application.generate)}; train it again."
            )
        finish = application.finish
        if (() if finish is None else finish.tensors, application.row_sets) != (manifest.network, manifest.sets):
            raise BundleError(
                f"application {application.name!r} now declares another finish than the bundle was made with; train "
                f"it again."
            )
        rate_hz = None if application.live is None else application.live.rate_hz
        if rate_hz != manifest.rate_hz:
            raise BundleError(
                f"the bundle was made for {_rate(manifest.rate_hz)}, but application {application.name!r} now declares "
                f"{_rate(rate_hz)}; train it again."
            )

    def changed_sources(self, found: FoundApplication) -> list[str]:
        """Source files that were changed, added or removed since the bundle was made."""
        if not self.manifest.reference:
            return []
        now, then = found.source_sha256(), self.manifest.sources
        return sorted(file for file in now.keys() | then.keys() if now.get(file) != then.get(file))

    def check_sources(self, found: FoundApplication, *, accept_changed: bool = False) -> None:
        """Check that an application has the sources and specs that the bundle was made with.

        Raises:
            SourcesChanged: A source file differs and `accept_changed` is false.
            BundleError: A spec differs.
        """
        self.check_specs(found.application)
        changed = self.changed_sources(found)
        if changed and not accept_changed:
            raise SourcesChanged(
                f"{', '.join(changed)} of application {found.application.name!r} changed since the bundle was made; "
                f"train again, or pass --accept-changed-app (accept_changed=True) if the network is the same."
            )


def _other_fields(now: ChunkSpec, then: ChunkSpec) -> str:
    if isinstance(now, RecordSpec) or isinstance(then, RecordSpec):
        return ""
    fields = [name for name, value in now.to_json().items() if value != then.to_json().get(name)]
    return f" with another {' and '.join(fields)}"


def _prepared(raw: RawSpec | None) -> str:
    if raw is None:
        return "taken as they are"
    return f"prepared of {raw.describe()} ({raw.meaning}), at most {list(raw.max_shape)}"


def _steps(generate: Generate | None) -> str:
    if generate is None:
        return "answers of one step"
    # Not the budgets, which change no answer.
    state = RecordSpec(tuple(generate.state[name] for name in sorted(generate.state))).describe()
    limit = f", lowered by {generate.max_steps_input!r}" if generate.max_steps_input else ""
    return f"answers of at most {generate.max_steps:,} steps{limit} with the state {state}"


def _rate(rate_hz: float | None) -> str:
    return "one-shot requests" if rate_hz is None else f"a live signal of {rate_hz:g} frames a second"


def read_bundle(folder: str | Path) -> BundleFiles:
    """Read and verify the bundle in a folder.

    Raises:
        BundleError: There is no bundle.
        BundleCorrupt: A file is missing or altered, or the schema is another.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    prepare = () if manifest.raw is None else (PREPARE,)
    language = (LANGUAGE,) if LANGUAGE in manifest.files else ()
    for name in (WEIGHTS, GOLDEN, *prepare, *language):
        _verify(folder / name, manifest)
    return BundleFiles(folder=folder, manifest=manifest, golden=_golden(folder / GOLDEN, manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in a folder; its other files are not verified.

    Raises:
        BundleError: There is no bundle.
        BundleCorrupt: The manifest is altered or cannot be read, or its schema is another.
    """
    try:
        is_there = (folder / MANIFEST).is_file()
    except OSError:
        # A folder that this user may not look into, or a file system that is gone: reading says why.
        is_there = True
    if not is_there:
        if not folder.exists():
            raise BundleError(f"there is no folder {folder}; 'penstock train' writes a bundle to RUN/bundle.")
        nested = folder / "bundle"
        hint = "; 'penstock train' writes one to RUN/bundle"
        if (nested / MANIFEST).is_file():
            hint = f"; there is one in {nested}"
        elif (folder / PACK_DESCRIPTION).is_file():
            hint = "; it is a pack, for devices and browsers. Name the bundle from which it was exported, RUN/bundle"
        raise BundleError(f"{folder} is not a bundle (no {MANIFEST}){hint}.")
    return _manifest(folder / MANIFEST)


def read_prepare(folder: Path, manifest: Manifest) -> bytes:
    """Read and verify the ONNX graph that makes an input of one raw array.

    Raises:
        BundleCorrupt: It is missing or altered.
    """
    _verify(folder / PREPARE, manifest)
    return _FILES.read(folder / PREPARE)


def write_bundle(
    folder: str | Path,
    manifest: Manifest,
    weights: bytes,
    golden: Golden,
    prepare: bytes | None = None,
    language: bytes | None = None,
) -> BundleFiles:
    """Write a bundle beside its place and rename it there, so that no reader sees half of one.

    An existing bundle is exchanged for the new one in one step: at every instant, and after a crash or a loss of power,
    one of the two is there whole. Only on a file system that cannot exchange two folders, a crash between two renames
    leaves none, and the old one in a hidden folder beside it. A reader that has just opened the old one may find files
    of both, which is refused as damage; it must open the bundle again.

    Args:
        folder: The destination.
        manifest: Without its `files`, which are filled in here.
        weights: Bytes of a safetensors file.
        golden: The recorded examples.
        prepare: The ONNX graph that makes an input of one raw array, if there is one.
        language: The language model of the endpoint beam, if there is one.

    Raises:
        BundleError: The place is taken by something that is not a bundle, or cannot be written.
    """
    if url_of(folder) is not None:
        raise BundleError(f"{url_of(folder)} is a URL; write to a folder, and 'penstock push FOLDER {url_of(folder)}'.")
    # A link to a bundle stays; its target is replaced.
    place = Path(os.path.realpath(folder))
    arrays = example_arrays("inputs", manifest.input, golden.inputs)
    arrays |= example_arrays("outputs", manifest.answer, golden.outputs)
    if golden.network is not None:
        arrays |= example_arrays(NETWORK, chunk_spec(manifest.network), golden.network)
    arrays |= zip(raw_names(len(golden.raws)), golden.raws, strict=True)
    optional = {PREPARE: prepare, LANGUAGE: language}
    contents = {WEIGHTS: weights, GOLDEN: save_arrays(arrays)}
    contents |= {name: data for name, data in optional.items() if data is not None}
    fields = manifest.to_json() | {"files": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}}
    contents[MANIFEST] = _with_hash(fields)
    try:
        with replace_folder(place, _refuse_taken) as beside:
            for name, data in contents.items():
                write_through(beside / name, data)
    except OSError as error:
        raise BundleError(
            f"{folder} cannot be written ({error.strerror or error}); mend that or choose another place."
        ) from error
    return read_bundle(folder)


def _refuse_taken(place: Path) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise BundleError(f"{place} is a file; choose another place for the bundle.")
    # Only folders that penstock wrote are ever deleted; other programs write a manifest.json too.
    names = {entry.name for entry in place.iterdir()}
    foreign = sorted(names - {MANIFEST, WEIGHTS, GOLDEN, PREPARE, LANGUAGE})
    if foreign:
        raise BundleError(f"{place} holds {foreign[0]!r}, so it is not a bundle to be replaced; choose another place.")
    if names and not {MANIFEST, WEIGHTS} <= names:
        raise BundleError(f"{place} holds only part of a bundle ({', '.join(sorted(names))}); choose another place.")


def _with_hash(fields: dict[str, Any]) -> bytes:
    return json_bytes(fields | {_SELF: hashlib.sha256(json_bytes(fields)).hexdigest()})


def _manifest(file: Path) -> Manifest:
    data = _FILES.read(file, MAX_TEXT_BYTES)
    given = _FILES.parse(file, data)
    known: dict[str, Any] = {key: given[key] for key in given if key != _SELF} if isinstance(given, dict) else {}
    manifest = Manifest.from_json(known)
    try:
        altered = _with_hash(manifest.to_json()) != data
    except (TypeError, ValueError, RecursionError):
        altered = True
    if altered:
        raise _FILES.altered(file, len(data))
    return manifest


def _verify(file: Path, manifest: Manifest) -> None:
    sha256 = manifest.files.get(file.name)
    if sha256 is None:
        raise BundleCorrupt(f"{file.parent / MANIFEST} does not name {file.name}; write the bundle again.")
    _FILES.verify(file, sha256)


def read_golden(folder: Path, manifest: Manifest) -> Golden:
    """Read the golden examples of a bundle alone.

    Raises:
        BundleError: They are missing, damaged or not those of the manifest.
    """
    _verify(folder / GOLDEN, manifest)
    return _golden(folder / GOLDEN, manifest)


def _golden(file: Path, manifest: Manifest) -> Golden:
    inputs, outputs = (
        read_examples(_FILES, file, side, spec)
        for side, spec in (("inputs", manifest.input), ("outputs", manifest.answer))
    )
    raws = () if manifest.raw is None else _FILES.arrays(file, raw_names(inputs.shape[0] if inputs.ndim else 0))
    network = None
    if manifest.network:
        network = read_examples(_FILES, file, NETWORK, chunk_spec(manifest.network))
    golden = Golden(
        inputs=inputs,
        outputs=outputs,
        tolerance=manifest.tolerance,
        raws=tuple(raws),
        exact_whole=manifest.generate is not None,
        output=manifest.answer,
        sets=manifest.sets,
        network=network,
    )
    for spec, array in ((manifest.input, inputs), (manifest.answer, outputs)):
        fits = spec.is_batch(array, any_frames=manifest.rate_hz is not None) and array.shape[0] == inputs.shape[0]
        if array.dtype != spec.numpy_dtype or not fits:
            raise BundleCorrupt(f"{file} holds {array.dtype}{list(array.shape)} for {spec.describe()}; write it again.")
    for raw in golden.raws:
        try:
            assert manifest.raw is not None
            manifest.raw.check(raw)
        except RequestError as error:
            raise BundleCorrupt(f"{file} holds another raw array ({error}); write the bundle again.") from None
    return golden
