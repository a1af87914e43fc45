"""`penstock bundle`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documented import documented_with_urls
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, BundleError, PenstockError
from penstock.core.spec import Spec
from penstock.core.storage.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.core.record import RecordSpec
    from penstock.core.source_files.find_application import FoundApplication
    from penstock.core.spec import Array, TensorSpec

EXAMPLES_SEED = 0
RANDOM_EXAMPLES = 32
RANDOM_RAWS = 8


@documented_with_urls("out")
def bundle(
    application: Annotated[str, typer.Argument(metavar="APP|RUN")],
    out: Annotated[Path, typer.Option("--out", "--to")],
    weights: Path | None = None,
    checkpoint: int | None = None,
    accept_changed_app: bool = False,
    examples: Path | None = None,
    metrics: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
) -> None:
    """Make a bundle of a network that another program trained, or of a checkpoint of a run.

    Args:
        application: A name (digits), an import path, your app.py, or the folder or URL of a run.
        out: The bundle's folder or URL; a bundle there is replaced.
        weights: Of an application: a safetensors file with the keys of the network's state_dict.
        checkpoint: Of a run: the step of the checkpoint; the newest by default.
        accept_changed_app: Of a run: accept changed sources of its application.
        examples: Raw inputs [N, ...] for golden examples, an .npy or .npz file; several inputs by name, and the length
            of each row under the name of its Dim.
        metrics: A validation metric to record; may be repeated.
    """
    from penstock.core.source_files.find_application import find_application

    measured = dict(map(_metric, metrics or []))
    run = _run_at(application, checkpoint)
    if (weights is None) == (run is None) or (checkpoint is not None and run is None):
        raise BundleError(
            f"{application} is {'no run' if run is None else 'a run'}; give an application and its --weights FILE, or "
            f"the folder of a run and, if you like, --checkpoint STEP."
        )
    if run is None:
        found = find_application(application)
    else:
        from penstock.train.report.run_comparison import read_run
        from penstock.train.same_run import check_sources, check_unrun_sources

        fields = read_run(run).fields
        if not accept_changed_app:
            check_unrun_sources(fields, fields["application"], run, "; restore it")
        found = find_application(fields["application"])
        if not accept_changed_app:
            check_sources(fields, found, run, "; restore it")
    if weights is not None:
        _refuse_pickle(weights)
    inputs, origin = _examples(found, examples)

    from penstock.core.remote.remote_copy import BUNDLE, written_to
    from penstock.runtime.bundle_writer import Bundle

    network = _of_file(found, weights) if weights is not None else _of_run(found, run or Path(), checkpoint)
    with written_to(BUNDLE, out) as place:
        written = Bundle.write(found, network, inputs, to=place, metrics=measured)
    typer.echo(f"Golden examples: {len(written.files.golden.inputs)}, {origin}.")
    if found.application.live is None:
        from penstock.train.preflight import reply_note

        if (note := reply_note(found.application, written.files.golden.outputs, "the network")) is not None:
            typer.echo(note)
    typer.echo(f"Bundle: {url_of(out) or out}  Content: {written.manifest.content_hash}")


def _run_at(place: str, checkpoint: int | None) -> Path | None:
    """Return the folder of a run, with the checkpoint of one at a URL; None for an application."""
    if url_of(place) is None:
        return Path(place) if Path(place, "run.json").is_file() else None
    from penstock.train.run_place import RunPlace

    run = RunPlace.of(place)
    run.fetch()
    run.fetch_checkpoint(checkpoint)
    return run.folder


def _of_file(found: "FoundApplication", weights: Path) -> Any:
    from penstock.runtime.load import make_network
    from penstock.runtime.load_weights import load_weights

    network = make_network(found)
    load_weights(network, weights)
    return network


def _of_run(found: "FoundApplication", run: Path, step: int | None) -> Any:
    from penstock.runtime.load import make_network
    from penstock.train.checkpoint.weights import checkpoint_weights

    network, (weights, step) = make_network(found), checkpoint_weights(run, step)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise BundleError(
            f"the checkpoint of step {step:,} does not fit the network of {found.application.name!r} ({said}); restore "
            f"the sources that the run began with."
        ) from None
    typer.echo(f"Weights: checkpoint of step {step:,}.")
    if found.application.recipe is not None and found.recipe().calibrate is not None:
        typer.echo("The recipe's calibrate was not run: buffers that it fits are as in the checkpoint.")
    return network


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
            f"real inputs are better: --examples {_example_file(found)}"
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
            f"give raw inputs with --examples {_example_file(found)}."
        ) from error


def _example_file(found: "FoundApplication") -> str:
    """The form of a file of examples: several inputs are in one by name."""
    return "FILE.npy" if isinstance(found.application.input, Spec) else "FILE.npz"


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

    from penstock.core.random_arrays import random_chunks
    from penstock.core.record import RecordSpec

    spec, prepare = found.application.input, found.application.prepare
    if prepare is not None:
        from penstock.runtime.onnx.prepare_session import random_raws

        return random_raws(prepare.raw, RANDOM_RAWS)
    rng = np.random.default_rng(EXAMPLES_SEED)
    if isinstance(spec, RecordSpec):
        return spec.random(rng, RANDOM_EXAMPLES)
    return random_chunks(spec, RANDOM_EXAMPLES, rng)
