"""The folder that training leaves and everything else takes: written whole or not at all, verified whenever it is read.

    manifest.json         what it is, and the SHA-256 of the other files
    weights.safetensors   the network's parameters and buffers
    golden.safetensors    recorded `inputs` and `outputs`

No pickle, no code. This module knows files and arrays; `penstock.runtime.bundle` adds the network.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from penstock.core.application import FoundApplication
from penstock.core.errors import BundleCorrupt, BundleError, SourcesChanged
from penstock.core.golden import Golden
from penstock.core.spec import Array, TensorSpec

SCHEMA_VERSION = 1
WEIGHTS = "weights.safetensors"
GOLDEN = "golden.safetensors"
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a bundle says of itself.

    Args:
        name: The application's name.
        reference: What finds the application again, see `find_application`; empty if it was made in a notebook.
        sources: The SHA-256 of each of the application's source files.
        input: One raw input chunk.
        output: One output chunk.
        files: The SHA-256 of each file beside the manifest.
        tolerance: The largest difference allowed on the golden examples.
        metrics: Validation metrics by name.
        versions: The libraries that wrote it.
        parameters: How many numbers the network learned.
        schema_version: The layout of this record.
    """

    name: str
    reference: str
    sources: dict[str, str]
    input: TensorSpec
    output: TensorSpec
    files: dict[str, str]
    tolerance: float
    metrics: dict[str, float]
    versions: dict[str, str]
    parameters: int
    schema_version: int = SCHEMA_VERSION

    @property
    def content_hash(self) -> str:
        """Names the content: the same weights, examples, specs and sources give the same hash anywhere."""
        content = {key: value for key, value in self.to_json().items() if key not in ("reference", "versions")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain JSON values."""
        return asdict(self) | {"input": self.input.to_json(), "output": self.output.to_json()}

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """The manifest that `to_json` wrote.

        Raises:
            BundleCorrupt: Another schema version, or a field is missing or unknown.
        """
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleCorrupt(
                f"{MANIFEST} has schema version {version!r}; this penstock reads {SCHEMA_VERSION}. "
                f"Write the bundle again with this version."
            )
        specs: dict[str, Any] = {side: TensorSpec.from_json(fields.get(side, {})) for side in ("input", "output")}
        try:
            return cls(**{**fields, **specs})
        except TypeError as error:
            raise BundleCorrupt(f"{MANIFEST} is not readable ({error}); write the bundle again.") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFiles:
    """A bundle on disk whose files were all found to be the ones that its manifest names.

    Args:
        folder: Where it is.
        manifest: What it says of itself.
        golden: Its recorded examples.
    """

    folder: Path
    manifest: Manifest
    golden: Golden

    @property
    def weights(self) -> Path:
        """The file of weights, in safetensors."""
        return self.folder / WEIGHTS

    def check_sources(self, found: FoundApplication, *, accept_changed: bool = False) -> None:
        """Refuse an application whose sources or specs are not those that the bundle was made with.

        Raises:
            SourcesChanged: A source file differs and `accept_changed` is false.
            BundleError: The specs differ, which cannot be accepted.
        """
        application, manifest = found.application, self.manifest
        if (application.input, application.output) != (manifest.input, manifest.output):
            raise BundleError(
                f"the bundle takes {manifest.input.describe()} and gives {manifest.output.describe()}, but application "
                f"{application.name!r} now declares other specs; train it again."
            )
        now = found.source_sha256()
        changed = sorted(
            file for file in now.keys() | manifest.sources.keys() if now.get(file) != manifest.sources.get(file)
        )
        if changed and manifest.reference and not accept_changed:
            raise SourcesChanged(
                f"{', '.join(changed)} of application {application.name!r} changed since the bundle was made; "
                f"train again, or pass --accept-changed-app (accept_changed=True) if the network is the same."
            )


def read_bundle(folder: str | Path) -> BundleFiles:
    """The bundle in a folder, every file of it verified.

    Raises:
        BundleError: There is no bundle.
        BundleCorrupt: A file is missing or altered, or the schema is another.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        nested = folder / "bundle"
        hint = (
            f"; there is one in {nested}"
            if (nested / MANIFEST).is_file()
            else "; 'penstock train' writes one to RUN/bundle"
        )
        raise BundleError(f"{folder} is not a bundle (no {MANIFEST}){hint}.")
    try:
        manifest = Manifest.from_json(json.loads((folder / MANIFEST).read_bytes()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BundleCorrupt(f"{folder / MANIFEST} is not JSON ({error}); copy the bundle again.") from None
    contents = {name: _verified(folder / name, manifest.files.get(name)) for name in (WEIGHTS, GOLDEN)}
    return BundleFiles(folder=folder, manifest=manifest, golden=_golden(contents[GOLDEN], manifest))


def write_bundle(folder: str | Path, manifest: Manifest, weights: bytes, golden: Golden) -> BundleFiles:
    """Write a bundle beside its place and rename it there, so that nobody ever sees half of one.

    Args:
        folder: Where it goes; a bundle that is already there is replaced.
        manifest: All but its `files`, which are filled in here.
        weights: A safetensors file's bytes.
        golden: The recorded examples.

    Raises:
        BundleError: The place is taken by something that is not a bundle.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise BundleError(f"{folder} is there already and is not a bundle; choose another place.")
    contents = {WEIGHTS: weights, GOLDEN: save_arrays({"inputs": golden.inputs, "outputs": golden.outputs})}
    fields = manifest.to_json() | {"files": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}}
    contents[MANIFEST] = (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        beside.chmod(0o755)
        for name, data in contents.items():
            _write_through(beside / name, data)
        if folder.exists():
            old = beside.with_name(beside.name + "-old")
            folder.rename(old)
            beside.rename(folder)
            shutil.rmtree(old)
        else:
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return read_bundle(folder)


def _write_through(file: Path, data: bytes) -> None:
    with file.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())


def _verified(file: Path, sha256: str | None) -> bytes:
    if sha256 is None:
        raise BundleCorrupt(f"{file.parent / MANIFEST} does not name {file.name}; write the bundle again.")
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise BundleCorrupt(f"{file} is missing; copy the bundle again.") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleCorrupt(f"{file} is not the file that was written ({len(data):,} bytes); copy the bundle again.")
    return data


def _golden(data: bytes, manifest: Manifest) -> Golden:
    try:
        arrays: dict[str, Array] = load_arrays(data)
        return Golden(inputs=arrays["inputs"], outputs=arrays["outputs"], tolerance=manifest.tolerance)
    except (SafetensorError, KeyError) as error:
        raise BundleCorrupt(f"{GOLDEN} is not readable ({error}); write the bundle again.") from None
