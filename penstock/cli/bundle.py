"""`penstock bundle`, `penstock inspect` and `penstock apps`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documented import documented
from penstock.cli.printing import print_rows
from penstock.core.errors import ApplicationError, BundleError, PenstockError
from penstock.core.spec import Dim, Spec

if TYPE_CHECKING:
    from penstock.core.bundle import BundleFiles
    from penstock.core.find_application import FoundApplication
    from penstock.core.prepare import RawSpec
    from penstock.core.record import ChunkSpec, RecordSpec
    from penstock.core.spec import Array, TensorSpec

EXAMPLES_SEED = 0
RANDOM_EXAMPLES = 32
RANDOM_RAWS = 8


@documented
def bundle(
    application: Annotated[str, typer.Argument(metavar="APP")],
    weights: Annotated[Path, typer.Option()],
    to: Annotated[Path, typer.Option("--to", "--out")],
    examples: Path | None = None,
    metrics: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
) -> None:
    """Make a bundle of a network that was trained by another program.

    Args:
        application: A name (digits), an import path, or your app.py.
        weights: A safetensors file with the keys of the network's state_dict.
        to: The bundle's folder; a bundle there is replaced.
        examples: Raw inputs [N, ...] for golden examples, an .npy or .npz file; several inputs by name, and the length
            of each row under the name of its Dim.
        metrics: A validation metric to record; may be repeated.
    """
    from penstock.core.find_application import find_application

    measured = dict(map(_metric, metrics or []))
    _refuse_pickle(weights)
    found = find_application(application)
    inputs, origin = _examples(found, examples)

    from penstock.runtime.bundle_writer import Bundle
    from penstock.runtime.load import load_weights, make_network

    network = make_network(found)
    load_weights(network, weights)
    written = Bundle.write(found, network, inputs, to=to, metrics=measured)
    typer.echo(f"Golden examples: {len(written.files.golden.inputs)}, {origin}.")
    typer.echo(f"Bundle: {to}  Content: {written.manifest.content_hash}")


@documented
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    app: str | None = None,
    run: Annotated[bool, typer.Option("--run/--no-run")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Verify a bundle and show its content. Damage or a different answer exits with status 2.

    Args:
        folder: A bundle's folder, such as RUN/bundle.
        app: The application, if it moved.
        run: Run the network on its golden examples.
        as_json: Print JSON, for programs.
    """
    import json

    from penstock.core.bundle import bundle_application, read_bundle

    files = read_bundle(folder)
    report = _report(files)
    problem: PenstockError | None = None
    try:
        found = bundle_application(files, app)
        files.check_specs(found.application)
        report["application"]["changed"] = files.changed_sources(found)
        if run:
            report["golden"]["difference"] = _largest_difference(files, found)
    except BundleError as error:
        problem = error
        report["problem"] = str(error)
    except ApplicationError as error:
        # The bundle is intact, but its network cannot be made here.
        report["application"]["missing"] = str(error)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(files, report)
    if problem is not None:
        raise problem


def apps() -> None:
    """List the applications that come with penstock."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.core.find_application import application_names, find_application

    table = Table("name", "what it does", "input", "output")
    for name in application_names():
        application = find_application(name).application
        cells = (name, application.description, _described(application.input), _described(application.output))
        table.add_row(*map(Text, cells))
    Console().print(table)


def _metric(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        equals, number = "", 0.0
    if not name or not equals:
        raise BundleError(f"--metrics has {text!r}; write NAME=NUMBER, such as accuracy=0.97.")
    return name, number


def _refuse_pickle(weights: Path) -> None:
    try:
        with weights.open("rb") as source:
            head = source.read(9)
    except OSError as error:
        raise BundleError(f"{weights} cannot be read ({error.strerror}); give a safetensors file.") from None
    # torch.save writes a zip or a bare pickle; a safetensors file is a length in 8 bytes and then JSON.
    if head.startswith((b"PK\x03\x04", b"\x80")) and head[8:] != b"{":
        raise BundleError(
            f"{weights} is a pickle, which can run any code when it is loaded, so penstock refuses it; if you trust "
            f"it, load it yourself and write its state_dict with safetensors.torch.save_file(state_dict, "
            f"'{weights.stem}.safetensors')."
        )
    if head[8:] != b"{":
        raise BundleError(
            f"{weights} is not a safetensors file; write one with safetensors.torch.save_file(network.state_dict(), "
            f"'{weights.stem}.safetensors')."
        )


def _examples(found: "FoundApplication", file: Path | None) -> tuple[Any, str]:
    if file is not None:
        spec = found.application.input
        return _array(file) if isinstance(spec, Spec) else _rows(file, spec), f"from {file}"
    if found.application.recipe is None:
        return _random(found), (
            f"random numbers (seed {EXAMPLES_SEED}), because {found.application.name!r} has no recipe with data; "
            f"real inputs are better: --examples FILE.npy"
        )
    from penstock.train.run_folder import check_raw_examples, golden_examples

    try:
        recipe = found.recipe()
        check_raw_examples(found, recipe)
        data = recipe.data()
        of = "validation data" if recipe.raw_examples is None else "raw examples"
        return golden_examples(found.application, recipe, data), f"from the recipe's {of}"
    except PenstockError:
        raise
    except Exception as error:
        raise ApplicationError(
            f"the recipe of {found.application.name!r} gives no data ({type(error).__name__}: {error}); "
            f"give raw inputs with --examples FILE.npy."
        ) from error


def _array(file: Path) -> "Array":
    import numpy as np

    try:
        loaded: Any = np.load(file, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            names = list(loaded.files)
            name = "inputs" if "inputs" in names else names[0] if len(names) == 1 else None
            if name is not None:
                return loaded[name]
    except (OSError, ValueError, EOFError) as error:
        raise BundleError(f"{file} is not an array that can be read ({error}); write it with numpy.save.") from None
    raise BundleError(f"{file} holds {', '.join(names) or 'nothing'}; call the array of raw inputs 'inputs'.")


def _rows(file: Path, spec: "RecordSpec") -> list[dict[str, "Array"]]:
    """Read one dictionary of arrays a row; each is cut to the lengths of the row that the file has."""
    import numpy as np

    try:
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is one array")
        with loaded:
            arrays: dict[str, Array] = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError) as error:
        raise BundleError(f"{file} has no arrays that can be read ({error}); write it with numpy.savez.") from None
    lengths = {name: arrays[name].tolist() for name in spec.dims if name in arrays}
    if not _is_rows(arrays, spec):
        held = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items())
        raise BundleError(
            f"{file} holds {held or 'nothing'}; write {', '.join(spec.by_name)}, as many rows of each, and lengths up "
            f"to their room."
        )

    def cut(tensor: "TensorSpec", row: int) -> "Array":
        names = (size.name if isinstance(size, Dim) else "" for size in tensor.shape)
        parts = (slice(lengths[name][row] if name in lengths else None) for name in names)
        return arrays[tensor.name][row][tuple(parts)]

    rows = range(len(arrays[spec.tensors[0].name]))
    return [{tensor.name: cut(tensor, row) for tensor in spec.tensors} for row in rows]


def _is_rows(arrays: "dict[str, Array]", spec: "RecordSpec") -> bool:
    """Check that arrays are rows of a spec's tensors, with lengths that they have room for."""
    lengths = {name: arrays[name] for name in spec.dims if name in arrays}
    tensors = {name: arrays[name] for name in spec.by_name if name in arrays}
    if len(tensors) != len(spec.by_name) or len(arrays) != len(tensors) + len(lengths):
        return False
    if any(array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any() for array in lengths.values()):
        return False
    if any(array.ndim != 1 + len(spec.by_name[name].shape) for name, array in tensors.items()):
        return False
    if len({len(array) for array in arrays.values()}) != 1:
        return False
    return all(
        lengths[size.name].max(initial=0) <= room
        for name, array in tensors.items()
        for size, room in zip(spec.by_name[name].shape, array.shape[1:], strict=True)
        if isinstance(size, Dim) and size.name in lengths
    )


def _random(found: "FoundApplication") -> Any:
    import numpy as np

    from penstock.core.record import RecordSpec
    from penstock.core.spec import random_chunks

    spec, prepare = found.application.input, found.application.prepare
    if prepare is not None:
        from penstock.runtime.prepare_session import random_raws

        return random_raws(prepare.raw, RANDOM_RAWS)
    rng = np.random.default_rng(EXAMPLES_SEED)
    if isinstance(spec, RecordSpec):
        return spec.random(rng, RANDOM_EXAMPLES)
    return random_chunks(spec, RANDOM_EXAMPLES, rng)


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
    from penstock.runtime.prepare_session import open_prepare

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
        "golden examples": _golden_in_words(report),
        "files": "\n".join(f"{name}  {entry['bytes']:,} bytes" for name, entry in report["files"].items()),
        "written with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
    }
    print_rows(rows, title=f"Bundle {manifest.name}")


def _sources_in_words(files: "BundleFiles", application: dict[str, Any]) -> str:
    if "missing" in application:
        return f"not compared: {application['missing']}"
    if application["changed"] is None:
        return "not compared"
    if not files.manifest.sources:
        return "none were recorded"
    changed = application["changed"]
    return f"changed since: {', '.join(changed)}" if changed else f"unchanged ({', '.join(files.manifest.sources)})"


def _golden_in_words(report: dict[str, Any]) -> str:
    golden = report["golden"]
    count = f"{golden['examples']:,}"
    if golden["difference"] is not None:
        allowed = f"{report['tolerance']:.3g} is allowed"
        return f"{count}, all answers as recorded; the largest difference is {golden['difference']:.3g} ({allowed})"
    return f"{count}, answers differ from the recorded ones" if "problem" in report else f"{count}, not run"


def _described(spec: "ChunkSpec | RawSpec") -> str:
    tensors = (spec,) if isinstance(spec, Spec) else spec.tensors
    return "\n".join(map(_of_tensor, tensors))


def _of_tensor(spec: "TensorSpec | RawSpec") -> str:
    units = f", {spec.units}" if spec.units else ""
    return f"{getattr(spec, 'name', 'raw')}: {spec.describe()}, {spec.meaning}{units}"
