"""`penstock verify`: compare a bundle's backends."""

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.printing import table_console
from penstock.cli.remote_arguments import bundle_at, pack_at
from penstock.core.errors import PackError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.agreement import Agreement
    from penstock.core.packs.pack import Pack
    from penstock.runtime.load import Predictor
    from penstock.verify.backends import Backend, Reference
    from penstock.verify.compare import Comparison
    from penstock.verify.verify_inputs import Example

EXIT_DIFFERENT = 1
TOLERANCE = 1e-5


@documented_with_urls("bundle", "pack")
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE|CHAIN.py")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILES]...")] = None,
    pack: Path | None = None,
    server: Annotated[str | None, typer.Option(metavar="URL")] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    app: str | None = None,
    accept_changed_app: bool = False,
    browser: Annotated[bool | None, typer.Option("--browser/--no-browser")] = None,
    tolerance: Annotated[float | None, typer.Option(min=0)] = None,
) -> None:
    """Run the training code, a server, the Python engine and the web app on the same inputs, and show the differences.

    Exits with status 1 if a difference exceeds the tolerance or another answer is the likeliest.

    Args:
        bundle: A bundle's folder, such as RUN/bundle, or its URL; or the file of a chain.
        files: Further inputs: files or folders; slides of a dense network. Of a chain, the bundles of its parts too.
        pack: The bundle's pack, a folder or a URL, for the Python engine and the web app; a chain has none.
        server: A server of the bundle, or of the chain.
        grpc: The gRPC port of such a server.
        app: The application, if it moved.
        accept_changed_app: Accept changed sources of the application.
        browser: Run the web app; by default if possible.
        tolerance: Largest allowed difference; by default 1e-5, relative to golden outputs above 1.
    """
    from penstock.cli.serve import is_chain
    from penstock.core.packs.pack import read_pack
    from penstock.runtime.load import load

    if is_chain(str(bundle)) and not bundle.is_dir():
        if pack is not None or browser or app is not None or accept_changed_app:
            raise PackError(
                "a chain has neither a pack nor a web app nor an application of its own; verify it on a server, with "
                "--server or --grpc, and each part by itself."
            )
        _verify_chain(str(bundle), files or [], server, grpc, tolerance)
        return
    if pack is None and server is None and grpc is None:
        raise PackError(
            "name another place to compare with: the bundle's pack with --pack DIR, which 'penstock export BUNDLE "
            "--out DIR' writes, or a server of the bundle with --server URL or --grpc HOST:PORT."
        )
    if pack is None and browser:
        raise PackError("the web app is of a pack; name the bundle's with --pack DIR.")
    ready = None if pack is None else read_pack(pack_at(pack))
    predictor = load(bundle_at(bundle), app=app, accept_changed=accept_changed_app)
    if ready is not None and ready.made["bundle"] != predictor.files.manifest.content_hash:
        raise PackError(f"the pack {pack} was made of another bundle than {bundle}; export it again.")
    _verify_bundle(ready, predictor, files or [], server, grpc, browser, tolerance)


def _verify_bundle(
    ready: "Pack | None",
    predictor: "Predictor",
    files: list[Path],
    server: str | None,
    grpc: str | None,
    browser: bool | None,
    tolerance: float | None,
) -> None:
    from penstock.client.client import Client
    from penstock.core.packs.pack_tensors import rows_of
    from penstock.verify.backends import TIMEOUT_S, Backend, PackBackend, ServerBackend, TrainingBackend
    from penstock.verify.grpc_backend import model_over_grpc
    from penstock.verify.verify_inputs import examples_of, golden_examples

    application = predictor.application
    if ready is None:
        golden = predictor.files.golden
        recorded = golden.raws or rows_of(golden.inputs)
    else:
        golden = ready.golden()
        recorded = golden.inputs
    examples = golden_examples(recorded, application) + _readable(examples_of(files, application))
    with ExitStack() as opened:
        backends: list[Backend] = []
        if server is not None:
            client = opened.enter_context(Client(server, timeout_s=TIMEOUT_S))
            backends.append(ServerBackend(client, application))
        if grpc is not None:
            backends.append(opened.enter_context(model_over_grpc(grpc, predictor)))
        if ready is not None:
            backends.append(PackBackend(ready))
            backends += _web_app(ready, browser, opened)
        labelled = [spec.name for spec in application.outputs.values() if spec.labels]
        _compare(TrainingBackend(predictor), backends, examples, labelled, _rule(golden.agreement, tolerance))


def _web_app(ready: "Pack", browser: bool | None, opened: ExitStack) -> "list[Backend]":
    """The web app, where it is wanted and can be run; says why not, if that was not chosen."""
    from penstock.verify.browser import BrowserBackend, browser_obstacle

    obstacle = browser_obstacle(ready)
    if browser and obstacle:
        raise PackError(f"the web app cannot be run: {obstacle}.")
    if browser is not False and not obstacle:
        return [opened.enter_context(BrowserBackend(ready))]
    if browser is None:
        typer.echo(f"The web app is not run: {obstacle}.")
    return []


def _verify_chain(
    reference: str, given: list[Path], server: str | None, grpc: str | None, tolerance: float | None
) -> None:
    from penstock.client.client import Client
    from penstock.core.bundles.bundle import MANIFEST
    from penstock.verify.backends import TIMEOUT_S, Backend
    from penstock.verify.chain_backend import LoadedChain, ServedChainBackend
    from penstock.verify.verify_inputs import examples_of

    if server is None and grpc is None:
        raise PackError("name a server of the chain with --server URL or --grpc HOST:PORT; a chain has no other place.")
    bundles = [path for path in given if (path / MANIFEST).is_file()]
    chain = LoadedChain(reference, bundles)
    files = [path for path in given if path not in bundles]
    examples = chain.examples() + _readable(examples_of(files, chain.application))
    with ExitStack() as opened:
        backends: list[Backend] = []
        if server is not None:
            client = opened.enter_context(Client(server, timeout_s=TIMEOUT_S))
            backends.append(ServedChainBackend(client, chain))
        if grpc is not None:
            backends.append(opened.enter_context(chain.over_grpc(grpc)))
        labelled = [spec.name for spec in chain.application.outputs.values() if spec.labels]
        _compare(chain, backends, examples, labelled, _rule(chain.golden.agreement, tolerance))


def _readable(found: "Iterable[Example | str]") -> "list[Example]":
    """The examples of files; names those that cannot be read."""
    examples: list[Example] = []
    for each in found:
        if isinstance(each, str):
            typer.echo(f"left out: {each}", err=True)
        else:
            examples.append(each)
    return examples


def _compare(
    training: "Reference",
    backends: "list[Backend]",
    examples: "list[Example]",
    labelled: list[str],
    rule: "Agreement",
) -> None:
    from penstock.verify.compare import compare

    found = compare(training, backends, examples, labelled=labelled, rule=rule)
    allowed = rule.tolerances
    allowed[""] = max(allowed.values())
    _show(found, allowed)
    if any(one.disagreements or not one.difference <= allowed[one.tensor] for one in found):
        raise typer.Exit(EXIT_DIFFERENT)


def _rule(golden: "Agreement", tolerance: float | None) -> "Agreement":
    """The rule of the golden examples with another tolerance, by default relative to the numbers of each tensor."""
    if tolerance is None:
        return replace(golden, tolerance=TOLERANCE * max(golden.scales.values()))
    return replace(golden, tolerance=tolerance, scales=dict.fromkeys(golden.scales, 1.0))


def _show(found: "list[Comparison]", allowed: dict[str, float]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    several = any(one.tensor for one in found)
    limit = "" if several else f" ({allowed['']:.3g} is allowed)"
    table = Table(
        "backend",
        *(["output", "allowed"] if several else []),
        "examples",
        "largest difference",
        "disagreements",
        Column("worst example", overflow="fold"),
        title=f"Comparison with the training code{limit}",
        title_justify="left",
    )
    for one in found:
        difference = "another answer" if one.difference == math.inf else f"{one.difference:.3g}"
        above = not one.difference <= allowed[one.tensor] or one.disagreements
        tensor = (one.tensor or "reply", f"{allowed[one.tensor]:.3g}") if several else ()
        cells = (one.backend, *tensor, f"{one.examples:,}", difference, f"{one.disagreements:,}", one.worst)
        table.add_row(*map(Text, cells), style="bold red" if above else None)
    table_console().print(table)
