"""Make a pack of a bundle: the graph from the exporter process, and the files that a device needs beside it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files as resources_of
from pathlib import Path
from typing import Any

from safetensors.numpy import save as save_arrays

from penstock.core.application import Application
from penstock.core.bundles.bundle import WEIGHTS, BundleFiles, read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import PackCorrupt, PackError
from penstock.core.json_record import read_record
from penstock.core.machine.versions import versions_of
from penstock.core.packs.pack import (
    BEGIN,
    FP32,
    GOLDEN,
    INDEX,
    MODEL,
    SIGNATURE,
    WEB,
    Pack,
    PackModel,
    digest,
    pack_json,
    read_pack,
)
from penstock.core.packs.pack_golden import PackGolden
from penstock.core.packs.pack_tensors import rows_of
from penstock.core.packs.signature import sign
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.storage.atomic_write import replace_folder
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from penstock.core.subwords import Subwords
from penstock.core.texts.subword_text import DECLARED_TEXT, SubwordReply, SubwordText
from penstock.export.golden_choice import golden_arrays, with_few_examples
from penstock.export.graph_report import GraphReport
from penstock.export.pack_session import Validation, measure
from penstock.runtime.onnx.exporter_process import run_exporter

# A longer text is not one to edit.

_OPERATOR = re.compile(r"op='([\w.:]+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """Result of an export.

    Args:
        pack: The pack, read back.
        difference: Largest difference from the bundle's answers, in those of the largest output.
        allowed: Largest allowed difference of that output.
        int8: Outcome of the quantization in a sentence; empty if it was not requested.
    """

    pack: Pack
    difference: float
    allowed: float
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
) -> ExportResult:
    """Make a pack of a bundle, written beside its place and renamed there, so that no reader sees half of one.

    Args:
        bundle: The bundle's folder.
        to: The pack's folder; an existing pack is replaced.
        app: Reference of the application, if it moved.
        accept_changed: Accept changed sources of the application, as long as the golden examples agree.
        licence: Licence of the network.
        key: The private key, PEM, that signs the pack; see `core.packs.signature.new_key`.
        int8: Also quantize to 8 bits.
        validation: Returns validation examples to measure the loss of int8 with; None if there are none.

    Raises:
        BundleError: The bundle is damaged, its application changed, or its answers did.
        PackError: The network cannot be exported, the graph disagrees with it, or the place is taken or not writable.
    """
    files = read_bundle(bundle)
    found = bundle_application(files, app, accept_changed=accept_changed)
    if files.changed_sources(found):
        # Imported here: it loads torch. Before the export, which takes long.
        from penstock.runtime.load_weights import check_weights

        check_weights(found.model, files.weights)
    if key is not None:
        # A bad key fails before the export, which takes long.
        sign(b"", key)
    place = Path(os.path.realpath(to))
    options = [f"--app={app}"] * (app is not None) + ["--accept-changed-app"] * accept_changed
    try:
        # Checked again before the rename: an index may have been made there meanwhile.
        with replace_folder(place, _refuse_taken) as beside:
            graph = beside / (MODEL if found.application.generate is None else BEGIN)
            report = _write_graph(files, graph, options)
            golden = PackGolden(
                inputs=files.golden.raws or rows_of(files.golden.inputs),
                outputs=files.golden.outputs,
                tolerance=files.golden.tolerance,
            )
            can_measure = report.generate is None and report.tensors.is_plain
            known = validation(found) if int8 and can_measure else None
            models, outcome = _models(report, graph, golden, known, int8)
            few = with_few_examples(files, sum(file.stat().st_size for file in beside.glob("*.onnx")))
            (beside / GOLDEN).write_bytes(save_arrays(golden_arrays(few)))
            _copy_web(beside / WEB, found.application)
            texts = _write_vocabularies(beside, found.application)
            pack = replace(_pack(few, found.application, report, models, beside, licence), **texts)
            (beside / PACK_DESCRIPTION).write_bytes(pack_json(pack))
            if key is not None:
                (beside / SIGNATURE).write_bytes(sign(pack_json(pack), key))
            read_pack(beside)
    except OSError as error:
        # The error of a copied folder is a list of what was said of each file.
        listed = re.search(r"\[Errno \d+\] ([^:]+)", str(error))
        reason = error.strerror or (listed[1] if listed else error)
        raise PackError(f"{to} cannot be written ({reason}); mend that or choose another place.") from error
    shown = files.golden.shown
    return ExportResult(
        pack=read_pack(place),
        difference=report.difference * shown,
        allowed=files.golden.tolerance * shown,
        int8=outcome,
    )


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
            f"{place} holds an index of the pack there, which a new model cannot use; delete "
            f"{place / INDEX} and index again after the export, or choose another place."
        )
    # Only what penstock wrote is ever deleted.
    if PACK_DESCRIPTION not in names:
        raise PackError(f"{place} is not empty and no pack; choose another place.")
    try:
        written = {PACK_DESCRIPTION, SIGNATURE, *read_pack(place).files}
    except PackCorrupt as error:
        raise PackError(f"{place} holds a pack that is damaged ({error}) Delete it, or choose another place.") from None
    found = {file.relative_to(place).as_posix() for file in place.rglob("*") if not file.is_dir()}
    if found - written:
        raise PackError(f"{place} holds {min(found - written)!r}, which is no part of a pack; choose another place.")


def _write_graph(files: BundleFiles, graph: Path, options: list[str]) -> GraphReport:
    failure = run_exporter("penstock.export.pack_graph", files.folder, graph, options)
    if failure is not None:
        reason = failure.reason
        raise PackError(_not_exportable(files.manifest.name, reason) if failure.not_exportable else reason)
    made = graph.with_suffix(".json")
    report = read_record(GraphReport, json.loads(made.read_bytes()))
    made.unlink()
    return report


def _not_exportable(name: str, cause: str) -> str:
    operator = _OPERATOR.search(cause)
    if operator is not None:
        return (
            f"the network of {name!r} uses {operator[1]}, which has no equivalent in ONNX; write that part with other "
            f"operations of torch, or move it to `reply`."
        )
    if "data-dependent" in cause:
        return (
            f"the network of {name!r} branches on tensor values (an if, int() or item() of a tensor), which a graph "
            f"cannot ({cause.rstrip('.')}); use torch.where."
        )
    return f"the network of {name!r} cannot be exported to ONNX ({cause.rstrip('.')}); rewrite that part."


def _models(
    report: GraphReport, graph: Path, golden: PackGolden, validation: Validation | None, int8: bool
) -> tuple[dict[str, PackModel], str]:
    fp32 = measure(report.network(graph), graph.name, golden, validation, report.answer)
    if not int8:
        return {FP32: fp32}, ""
    # Imported here, because it imports all of onnx.
    from penstock.export.int8 import quantize

    return quantize(report, graph, fp32, golden, validation)


def _copy_web(to: Path, application: Application) -> None:
    web = resources_of("penstock").joinpath("device", WEB)
    if not web.is_dir():
        return
    shutil.copytree(str(web), to)
    # Packs on one phone are apps of different names.
    manifest = to / "manifest.webmanifest"
    fields = json.loads(manifest.read_bytes())
    fields |= {"name": application.name, "short_name": application.name}
    fields["description"] = application.description or fields["description"]
    manifest.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_vocabularies(folder: Path, application: Application) -> dict[str, Any]:
    """Write the vocabularies of declared texts, all fields; return the texts with these files, by the pack's fields."""
    text, reply = application.decode, application.reply
    found: dict[str, Any] = {"text": text if isinstance(text, DECLARED_TEXT) else None}
    names = {"text": "vocabulary.json", "reply": "reply-vocabulary.json"}
    if isinstance(text, SubwordText):
        Subwords.read(text.vocabulary).write(folder / names["text"])
        found["text"] = replace(text, vocabulary=folder / names["text"])
    if isinstance(reply, SubwordReply):
        is_same = isinstance(text, SubwordText) and text.vocabulary.read_bytes() == reply.vocabulary.read_bytes()
        file = folder / names["text" if is_same else "reply"]
        Subwords.read(reply.vocabulary).write(file)
        found["reply"] = replace(reply, vocabulary=file)
    return found


def _pack(
    files: BundleFiles,
    application: Application,
    report: GraphReport,
    models: dict[str, PackModel],
    folder: Path,
    licence: str,
) -> Pack:
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    made = versions_of("penstock", "torch", "onnx")
    made |= {"bundle": files.manifest.content_hash, "weights": files.manifest.files[WEIGHTS]}
    made |= {"when": datetime.now(UTC).isoformat(timespec="seconds")}
    return Pack(
        folder=folder,
        name=application.name,
        description=application.description,
        licence=licence,
        made=made,
        kind=report.kind,
        raw=report.raw,
        inputs=report.inputs,
        outputs=report.outputs,
        answers=report.answers,
        recognition=application.recognition,
        dense=application.dense,
        shows=application.shows,
        live=report.live,
        generate=report.generate,
        sets=report.sets,
        tolerance=files.golden.tolerance,
        golden_count=len(files.golden.inputs),
        models=models,
        files={file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in written},
    )
