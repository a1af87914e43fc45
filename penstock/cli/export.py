"""`penstock export`: a bundle into a pack that is carried on devices."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import PackError


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
) -> None:
    """Make a pack of a bundle: one graph, checked against the bundle, and what devices and browsers need beside it."""
    if new_key is not None:
        from penstock.core.signature import key_in_words, public_file
        from penstock.core.signature import new_key as made_key

        public = made_key(new_key)
        typer.echo(f"Private key: {new_key} (keep it to yourself)  Public key: {public_file(new_key)}")
        typer.echo(f"Packs that it signs are known by {key_in_words(public)}")
        return
    if bundle is None or to is None:
        raise PackError("name the bundle and where its pack goes: penstock export RUN/bundle --to DIR.")
    from penstock.export.write import export_pack

    exported = export_pack(bundle, to, app=app, accept_changed=accept_changed_app, licence=licence, key=sign, int8=int8)
    pack = exported.pack
    allowed = f"{pack.tolerance:.3g} is allowed"
    typer.echo(f"Checked against the bundle: the largest difference is {exported.difference:.3g} ({allowed}).")
    if exported.int8:
        typer.echo(exported.int8)
    typer.echo(f"Pack: {to}  Model: {pack.model().stat().st_size:,} bytes")
