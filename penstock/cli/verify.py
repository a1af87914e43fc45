"""`penstock verify`: one bundle in all its places, and the largest differences between them."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import PackError

if TYPE_CHECKING:
    from penstock.verify.compare import Compared

EXIT_DIFFERENT = 1
TOLERANCE = 1e-5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's folder, such as RUN/bundle.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]...", help="Files, or folders of them, to ask as well.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="The bundle's pack.")] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="A server of the bundle.")] = None,
    app: Annotated[str | None, typer.Option(help="Where the application is now, if it moved.")] = None,
    accept_changed_app: Annotated[
        bool, typer.Option("--accept-changed-app", help="Take an application whose sources changed.")
    ] = False,
    browser: Annotated[
        bool | None,
        typer.Option("--browser/--no-browser", help="Ask the web app; by default where there is one and a browser."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="The largest difference; by default 1e-5 of the largest golden output, or 1e-5."),
    ] = None,
) -> None:
    """Ask training's code, a server, the Python engine and the web app the same, and show the largest differences.

    Ends with status 1 where a difference is above the tolerance or another answer is the likeliest.
    """
    from penstock.core.pack import read_pack
    from penstock.runtime.load import load
    from penstock.serve.client import Client
    from penstock.verify.browser import Browser, why_no_browser
    from penstock.verify.compare import compare
    from penstock.verify.examples import Example, examples_of, golden_examples
    from penstock.verify.places import ASKED_S, Device, Place, Server, Training

    if pack is None:
        raise PackError("name the bundle's pack with --pack DIR; 'penstock export BUNDLE --to DIR' writes one.")
    ready, predictor = read_pack(pack), load(bundle, app=app, accept_changed=accept_changed_app)
    application = predictor.application
    if ready.made["bundle"] != predictor.files.manifest.content_hash:
        raise PackError(f"the pack {pack} was made of another bundle than {bundle}; export it again.")
    examples = golden_examples(ready, application)
    for example in examples_of(files or [], application):
        if isinstance(example, Example):
            examples.append(example)
        else:
            typer.echo(f"left out: {example}", err=True)
    with ExitStack() as opened:
        places: list[Place] = []
        if server is not None:
            client = opened.enter_context(Client(server, timeout_s=ASKED_S))
            places.append(Server(client, ready))
        places.append(Device(ready))
        without = why_no_browser(ready)
        if browser and without:
            raise PackError(f"the web app cannot be asked: {without}.")
        if browser is not False and not without:
            places.append(opened.enter_context(Browser(ready)))
        elif browser is None:
            typer.echo(f"The web app is not asked: {without}.")
        found = compare(Training(predictor), places, examples, labelled=bool(ready.outputs[0].labels))
    if tolerance is None:
        tolerance = TOLERANCE * max(1.0, float(abs(ready.golden().outputs).max()))
    _show(found, tolerance)
    if any(one.otherwise or not one.difference <= tolerance for one in found):
        raise typer.Exit(EXIT_DIFFERENT)


def _show(found: "list[Compared]", tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "place",
        "examples",
        "largest difference",
        "other answers",
        "worst example",
        title=f"Compared with training's code ({tolerance:.3g} is allowed)",
        title_justify="left",
    )
    for one in found:
        difference = "another answer" if one.difference == math.inf else f"{one.difference:.3g}"
        above = not one.difference <= tolerance or one.otherwise
        cells = (one.place, f"{one.examples:,}", difference, f"{one.otherwise:,}", one.worst)
        table.add_row(*map(Text, cells), style="bold red" if above else None)
    Console().print(table)
