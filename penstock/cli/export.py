"""`penstock export`: a bundle into a pack that is carried on devices."""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import PackError

if TYPE_CHECKING:
    from penstock.core.application import FoundApplication
    from penstock.core.pack import Pack
    from penstock.export.packed import Validation

MOST_VALIDATED = 1000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(export)


def export(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="A bundle's folder, such as RUN/bundle.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="The pack's folder; a pack there is replaced.")] = None,
    app: Annotated[str | None, typer.Option(help="Where the application is now, if it moved.")] = None,
    accept_changed_app: Annotated[
        bool, typer.Option("--accept-changed-app", help="Take an application whose sources changed.")
    ] = False,
    licence: Annotated[str, typer.Option(help="Under which the pack may be used: CC-BY-4.0, say.")] = "",
    int8: Annotated[bool, typer.Option("--int8", help="Also 8 bits, where they are smaller and as good.")] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY.pem", help="The private key that signs the pack.")] = None,
    new_key: Annotated[Path | None, typer.Option(metavar="KEY.pem", help="Make such a key, and leave.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Then show it on localhost; without a BUNDLE, the pack that is there.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where; 0 is any free one.")] = 8300,
) -> None:
    """Make a pack of a bundle: one graph, checked against the bundle, and what devices and browsers need beside it."""
    if new_key is not None:
        _make_key(new_key)
        return
    if to is None or (bundle is None and not serve):
        raise PackError("name the bundle and where its pack goes: penstock export RUN/bundle --to DIR.")
    if bundle is not None:
        from penstock.export.write import export_pack

        with _ended_tidily():
            exported = export_pack(
                bundle,
                to,
                app=app,
                accept_changed=accept_changed_app,
                licence=licence,
                key=sign,
                int8=int8,
                validation=_validation,
            )
        pack = exported.pack
        allowed = f"{pack.tolerance:.3g} is allowed"
        typer.echo(f"Checked against the bundle: the largest difference is {exported.difference:.3g} ({allowed}).")
        if exported.int8:
            typer.echo(exported.int8)
        typer.echo(f"Pack: {to}  Model: {pack.model().stat().st_size:,} bytes")
    if serve:
        from penstock.core.pack import read_pack

        _show(read_pack(to), port)


@contextmanager
def _ended_tidily() -> Generator[None]:
    """SIGTERM ends it as Ctrl-C does: what was begun is taken away, and the exporter's process ends too."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_key(file: Path) -> None:
    from penstock.core.signature import key_in_words, new_key, public_file

    public = new_key(file)
    typer.echo(f"Private key: {file} (keep it to yourself)  Public key: {public_file(file)}")
    typer.echo(f"Packs that it signs are known by {key_in_words(public)}")


def _show(pack: "Pack", port: int) -> None:
    from penstock.core.pack import WEB
    from penstock.export.host import LOCALHOST, ON_A_PHONE, host_of

    if f"{WEB}/index.html" not in pack.files:
        raise PackError(f"the pack {pack.folder} holds no web app; export the bundle again with this penstock.")
    with host_of(pack, port) as host:
        port = int(host.server_address[1])
        typer.echo(f"Open http://{LOCALHOST}:{port}/{WEB}/ in a browser on this machine; Ctrl-C ends it.")
        typer.echo(ON_A_PHONE.format(port=port))
        host.serve_forever()


def _validation(found: "FoundApplication") -> "Validation | None":
    """Validation examples whose targets are classes, where the recipe has such."""
    import numpy as np

    from penstock.export.packed import Validation

    application = found.application
    if application.recipe is None or application.live is not None or application.prepare is not None:
        return None
    try:
        examples = found.recipe().data().validation
    except Exception as error:  # noqa: BLE001 - whatever a user's code raises
        typer.echo(f"8 bits are judged by the golden answers alone, since the recipe does not give its data ({error}).")
        return None
    count = min(len(examples), MOST_VALIDATED)
    inputs = examples.empty(count)
    targets = np.asarray(examples.read(np.arange(count), np.arange(count, dtype=np.uint64), inputs))
    classes = targets.shape == (count,) and targets.dtype.kind in "iu"
    return Validation(inputs=list(inputs), targets=targets) if classes else None
