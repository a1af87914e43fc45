"""`penstock inspect` and `penstock apps`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documented import documented, documented_with_urls
from penstock.cli.printing import Format, print_rows
from penstock.cli.remote_arguments import bundle_at
from penstock.core.errors import ApplicationError, BundleError, PenstockError, ServeError
from penstock.core.remote.cache_variables import expanded_cache
from penstock.core.spec import Spec

if TYPE_CHECKING:
    from penstock.core.bundles.bundle import BundleFiles
    from penstock.core.prepare import RawSpec
    from penstock.core.record import ChunkSpec
    from penstock.core.source_files.find_application import FoundApplication
    from penstock.core.spec import TensorSpec

MAX_NAMED = 5


@documented_with_urls("folder")
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    app: str | None = None,
    run: Annotated[bool, typer.Option("--run")] = False,
    accept_changed_app: Annotated[bool, typer.Option("--accept-changed-app")] = False,
    cache: Annotated[Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE")] = Path("~/.cache/penstock"),
    format: Format = Format.TEXT,
) -> None:
    """Verify a bundle and show its content, without importing its application unless --run is given.

    Damage or a different answer exits with status 2.

    Args:
        folder: A bundle's folder, such as RUN/bundle, or its URL.
        app: The application, if it moved.
        run: Import the application if its sources are the recorded ones, and run the network on its golden examples.
        accept_changed_app: With --run, accept an application whose sources changed.
        cache: The folder of exported networks and of downloads.
        format: A table, or JSON for programs.
    """
    import json

    from penstock.core.bundles.bundle import read_bundle
    from penstock.core.bundles.bundle_application import bundle_application, compare_sources

    cache = expanded_cache(cache)
    place = bundle_at(folder, cache)
    _refuse_folder_of_bundles(place)
    files = read_bundle(place)
    report = _report(files)
    report["on_a_cpu"] = _on_a_cpu(files, cache)
    problem: PenstockError | None = None
    try:
        report["application"]["changed"] = compare_sources(files.folder, files.manifest, app).changed
        if run:
            found = bundle_application(files, app, accept_changed=accept_changed_app)
            report["golden"]["difference"] = _largest_difference(files, found)
    except BundleError as error:
        problem = error
        report["problem"] = str(error)
    except ApplicationError as error:
        # The bundle is intact, but its network cannot be made here.
        report["application"]["missing"] = str(error)
    if format is Format.JSON:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(files, report)
    if problem is not None:
        raise problem


@documented
def apps(format: Format = Format.TEXT) -> None:
    """List the applications that come with penstock.

    Args:
        format: A table, or JSON for programs.
    """
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.core.source_files.find_application import application_names, find_application

    rows = []
    for name in application_names():
        application = find_application(name).application
        rows.append((name, application.description, _described(application.input), _described(application.output)))
    if format is Format.JSON:
        typer.echo(
            json.dumps([dict(zip(("name", "description", "input", "output"), row, strict=True)) for row in rows])
        )
        return
    table = Table("name", "what it does", "input", "output")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _refuse_folder_of_bundles(folder: Path) -> None:
    """Name the bundles in the folders of a folder that is none itself, such as a folder of runs."""
    from penstock.core.bundles.bundle import MANIFEST

    if (folder / MANIFEST).is_file() or (folder / "bundle" / MANIFEST).is_file():
        return
    below = sorted(str(file.parent) for depth in ("*", "*/bundle") for file in folder.glob(f"{depth}/{MANIFEST}"))
    if below:
        shown = [*below[:MAX_NAMED], *["..."] * (len(below) > MAX_NAMED)]
        raise BundleError(f"{folder} is not a bundle, and has bundles below it; name one: {', '.join(shown)}.")


def _report(files: "BundleFiles") -> dict[str, Any]:
    manifest = files.manifest
    fields = manifest.to_json()
    sha256 = fields.pop("files")
    return {
        "name": fields.pop("name"),
        "content_hash": manifest.content_hash,
        "application": {"reference": fields.pop("reference"), "sources": fields.pop("sources"), "changed": None},
        **fields,
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256.get(file.name)}
            for file in sorted(files.folder.iterdir())
        },
        "golden": {"examples": len(files.golden.inputs), "difference": None},
    }


def _largest_difference(files: "BundleFiles", found: "FoundApplication") -> float:
    from penstock.runtime.load import make_predictor
    from penstock.runtime.onnx.prepare_session import open_prepare

    open_prepare(files)
    return make_predictor(files, found).difference


def _show(files: "BundleFiles", report: dict[str, Any]) -> None:
    manifest, application = files.manifest, report["application"]
    rows = {
        "content hash": manifest.content_hash,
        "application": application["reference"] or "none (made of an object)",
        "its sources": _sources_in_words(files, application),
        **({} if manifest.raw is None else {"prepared of": _described(manifest.raw)}),
        "input": _described(manifest.input),
        "output": _described(manifest.output),
        "metrics": "\n".join(f"{name} {value:g}" for name, value in sorted(manifest.metrics.items()))
        or "none recorded",
        "parameters": f"{manifest.parameters:,}",
        "golden examples": _golden_in_words(report, files.golden.shown),
        "on a CPU": report["on_a_cpu"],
        "files": "\n".join(f"{name}  {entry['bytes']:,} bytes" for name, entry in report["files"].items()),
        "written with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
    }
    print_rows(rows, title=f"Bundle {manifest.name}")


def _on_a_cpu(files: "BundleFiles", cache: Path) -> str:
    """Say what runs the network where it is served on a CPU, as far as earlier starts found out."""
    from penstock.runtime.onnx.onnx_cache import is_cached, refusal

    if files.manifest.generate is not None:
        return "torch: its answers take steps"
    try:
        if reason := refusal(files, cache):
            return f"torch, often slower, because ONNX Runtime cannot: {reason}"
        exported = is_cached(files, cache)
    except ServeError as error:
        return f"torch, often slower, because {error}"
    return "ONNX Runtime" if exported else "not known yet: the first server or export on this machine finds out"


def _sources_in_words(files: "BundleFiles", application: dict[str, Any]) -> str:
    if "missing" in application:
        return f"not compared: {application['missing']}"
    if application["changed"] is None:
        return "not compared"
    if not files.manifest.sources:
        return "none were recorded"
    changed = application["changed"]
    return f"changed since: {', '.join(changed)}" if changed else f"unchanged ({', '.join(files.manifest.sources)})"


def _golden_in_words(report: dict[str, Any], shown: float) -> str:
    golden = report["golden"]
    count = f"{golden['examples']:,}"
    if golden["difference"] is not None:
        difference, allowed = f"{golden['difference'] * shown:.3g}", f"{report['tolerance'] * shown:.3g} is allowed"
        return f"{count}, all answers as recorded; the largest difference is {difference} ({allowed})"
    return f"{count}, {report['problem']}" if "problem" in report else f"{count}, not run"


def _described(spec: "ChunkSpec | RawSpec") -> str:
    tensors = (spec,) if isinstance(spec, Spec) else spec.tensors
    return "\n".join(map(_of_tensor, tensors))


def _of_tensor(spec: "TensorSpec | RawSpec") -> str:
    units = f", {spec.units}" if spec.units else ""
    return f"{getattr(spec, 'name', 'raw')}: {spec.describe()}, {spec.meaning}{units}"
