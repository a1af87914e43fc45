"""A bundle into a pack: the graph from a process of its own, and beside it what a device needs."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files as resources_of
from pathlib import Path

from safetensors.numpy import save as save_arrays

from penstock.core.application import Application, FoundApplication
from penstock.core.bundle import BundleFiles, found_for, read_bundle
from penstock.core.durable import folder_beside, put_folder, sync_folder, write_through
from penstock.core.errors import PackCorrupt, PackError
from penstock.core.pack import (
    DESCRIPTION,
    FP32,
    GOLDEN,
    INDEX,
    MODEL,
    SIGNATURE,
    WEB,
    Pack,
    PackGolden,
    PackModel,
    digest,
    read_pack,
    sealed,
)
from penstock.core.signature import sign
from penstock.export.described import Described
from penstock.export.packed import Validation, measured
from penstock.runtime.graph import EXPORT_S, NOT_EXPORTABLE

_OPERATOR = re.compile(r"op='([\w.:]+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What came of an export.

    Args:
        pack: As it was read back.
        difference: The largest difference from the bundle's answers.
        int8: What became of the model in 8 bits, in a sentence; empty where none was asked for.
    """

    pack: Pack
    difference: float
    int8: str


def export_pack(
    bundle: str | Path,
    to: str | Path,
    *,
    app: str | None = None,
    accept_changed: bool = False,
    licence: str = "",
    key: Path | None = None,
    int8: bool = False,
    validation: Callable[[FoundApplication], Validation | None] = lambda _: None,
) -> Exported:
    """Make a pack of a bundle. It is written beside its place and renamed there: a place never holds half of one.

    Args:
        bundle: The bundle's folder.
        to: The pack's folder; a pack that is there already is replaced.
        app: Where the application is now, if it moved.
        accept_changed: Take an application whose sources changed, as long as the golden examples agree.
        licence: Under which the pack may be used.
        key: The private key, PEM, that signs it; see `core.signature.new_key`.
        int8: Also try 8 bits.
        validation: Gives examples with right answers, to see what 8 bits lose; None where there are none.

    Raises:
        BundleError: The bundle is damaged, its application changed, or its answers did.
        PackError: Its network cannot be exported or answers otherwise then, or the place is taken or cannot be written.
    """
    files = read_bundle(bundle)
    found = found_for(files, app)
    files.check_sources(found, accept_changed=accept_changed)
    if key is not None:
        # Before anything that takes long.
        sign(b"", key)
    place = Path(os.path.realpath(to))
    _refuse_taken(place)
    options = [f"--app={app}"] * (app is not None) + ["--accept-changed-app"] * accept_changed
    try:
        with folder_beside(place) as beside:
            described = _write_graph(files, beside / MODEL, options)
            golden = PackGolden(
                inputs=files.golden.raws or tuple(files.golden.inputs),
                outputs=files.golden.outputs,
                tolerance=files.golden.tolerance,
            )
            models, became = _models(described, beside / MODEL, golden, validation(found) if int8 else None, int8)
            (beside / GOLDEN).write_bytes(_golden(files))
            _copy_web(beside / WEB, found.application)
            pack = _pack(files, found.application, described, models, beside, licence)
            (beside / DESCRIPTION).write_bytes(sealed(pack))
            if key is not None:
                (beside / SIGNATURE).write_bytes(sign(sealed(pack), key))
            read_pack(beside)
            _bring_to_disk(beside)
            # Somebody may have made an index there meanwhile.
            _refuse_taken(place)
            put_folder(beside, place)
            sync_folder(place.parent)
    except OSError as error:
        raise PackError(
            f"{to} cannot be written ({error.strerror or error}); mend that or choose another place."
        ) from error
    return Exported(pack=read_pack(place), difference=described.difference, int8=became)


def _refuse_taken(place: Path) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise PackError(f"{place} is a file; choose another place for the pack.")
    names = {entry.name for entry in place.iterdir()}
    if not names:
        return
    if INDEX in names:
        raise PackError(
            f"{place} holds an index of the pack that is there, which another model could not read; delete "
            f"{place / INDEX} and index again behind the export, or choose another place."
        )
    # Nothing but what penstock wrote is ever deleted.
    if DESCRIPTION not in names:
        raise PackError(f"{place} is not empty and no pack; choose another place.")
    try:
        written = {DESCRIPTION, SIGNATURE, *read_pack(place).files}
    except PackCorrupt as error:
        raise PackError(f"{place} holds a pack that is damaged ({error}) Delete it, or choose another place.") from None
    there = {file.relative_to(place).as_posix() for file in place.rglob("*") if not file.is_dir()}
    if there - written:
        raise PackError(f"{place} holds {min(there - written)!r}, which is no part of a pack; choose another place.")


def _write_graph(files: BundleFiles, graph: Path, options: list[str]) -> Described:
    command = [sys.executable, "-m", "penstock.export.graph", str(files.folder), str(graph), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PackError(
            f"the export of {files.folder} took longer than {EXPORT_S} s; export a smaller network."
        ) from None
    if done.returncode == 0:
        made = graph.with_suffix(".json")
        described = Described.from_json(json.loads(made.read_bytes()))
        made.unlink()
        return described
    said = (done.stderr.strip().splitlines() or [f"the exporter ended with status {done.returncode}"])[-1]
    raise PackError(_not_exportable(files.manifest.name, said) if done.returncode == NOT_EXPORTABLE else said)


def _not_exportable(name: str, cause: str) -> str:
    """What cannot be exported, and what to do about it."""
    operator = _OPERATOR.search(cause)
    if operator is not None:
        return (
            f"the network of {name!r} uses {operator[1]}, for which ONNX has nothing; write that part with other "
            f"operations of torch, or leave it to `reply`."
        )
    if "data-dependent" in cause:
        return (
            f"the network of {name!r} asks its numbers which way to go (an if, int() or item() of a tensor), which no "
            f"graph can ({cause.rstrip('.')}); write that with torch.where."
        )
    return f"the network of {name!r} cannot be exported to ONNX ({cause.rstrip('.')}); write that part otherwise."


def _golden(files: BundleFiles) -> bytes:
    golden = files.golden
    raws = {f"raw.{number}": raw for number, raw in enumerate(golden.raws)}
    return save_arrays((raws or {"inputs": golden.inputs}) | {"outputs": golden.outputs})


def _models(
    described: Described, graph: Path, golden: PackGolden, validation: Validation | None, int8: bool
) -> tuple[dict[str, PackModel], str]:
    labelled = bool(described.outputs[0].labels)
    fp32 = measured(described.network(graph), MODEL, golden, validation, labelled=labelled)
    if not int8:
        return {FP32: fp32}, ""
    # Only here: it brings the whole of onnx.
    from penstock.export.int8 import with_int8

    return with_int8(described, graph, fp32, golden, validation)


def _copy_web(to: Path, application: Application) -> None:
    web = resources_of("penstock").joinpath("device", WEB)
    if not web.is_dir():
        return
    shutil.copytree(str(web), to)
    # Two packs on one phone are two apps of different names.
    manifest = to / "manifest.webmanifest"
    fields = json.loads(manifest.read_bytes())
    fields |= {"name": application.name, "short_name": application.name}
    fields["description"] = application.description or fields["description"]
    manifest.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pack(
    files: BundleFiles,
    application: Application,
    described: Described,
    models: dict[str, PackModel],
    folder: Path,
    licence: str,
) -> Pack:
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    made = {package: _version(package) for package in ("penstock", "torch", "onnx")}
    made |= {"bundle": files.manifest.content_hash, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    return Pack(
        folder=folder,
        name=application.name,
        description=application.description,
        licence=licence,
        made=made,
        kind="oneshot" if described.live is None else "live",
        input=described.input,
        input_name=described.input_name,
        outputs=described.outputs,
        recognition=application.recognition,
        live=described.live,
        tolerance=files.golden.tolerance,
        golden_count=len(files.golden.inputs),
        models=models,
        files={file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in written},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"


def _bring_to_disk(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        if entry.is_dir():
            sync_folder(entry)
        else:
            write_through(entry, entry.read_bytes())
    sync_folder(folder)
