"""`penstock export`: make a pack of a bundle."""

import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.remote_arguments import bundle_at, pack_at
from penstock.cli.serve import is_chain
from penstock.core.errors import PackError
from penstock.core.storage.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.core.packs.pack import Pack
    from penstock.core.source_files.find_application import FoundApplication
    from penstock.export.pack_session import Validation
    from penstock.train.data.examples import Examples

MAX_VALIDATED = 1000


@documented_with_urls("bundle", "out")
def export(
    bundle: Annotated[Path | None, typer.Argument(metavar="[BUNDLE]")] = None,
    out: Annotated[Path | None, typer.Option("--out", "--to")] = None,
    app: str | None = None,
    accept_changed_app: bool = False,
    licence: str = "",
    int8: bool = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY.pem")] = None,
    new_key: Annotated[Path | None, typer.Option(metavar="KEY.pem")] = None,
    serve: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8300,
) -> None:
    """Make a pack of a bundle: its graph, checked against the bundle, and the files for devices and browsers.

    Args:
        bundle: A bundle's folder, such as RUN/bundle, or its URL.
        out: The pack's folder or URL; a pack there is replaced.
        app: The application, if it moved.
        accept_changed_app: Accept changed sources of the application.
        licence: Licence of the network, such as CC-BY-4.0.
        int8: Also quantize to 8 bits, kept if smaller and as accurate.
        sign: The private key that signs the pack.
        new_key: Make such a key, and exit.
        serve: Then serve it on localhost; without a BUNDLE, serve the existing pack.
        port: Port of --serve; 0 is any free one.
    """
    if new_key is not None:
        _make_key(new_key)
        return
    if out is None or (bundle is None and not serve):
        raise PackError("name the bundle and where its pack goes: penstock export RUN/bundle --out DIR.")
    if bundle is not None and is_chain(str(bundle)) and not bundle.is_dir():
        raise PackError(f"{bundle} is a chain; a pack holds one network, so export the bundle of each part by itself.")
    if bundle is not None:
        from penstock.core.remote.remote_copy import PACK, written_to
        from penstock.export.pack_writer import export_pack

        with _sigterm_exits(), ExitStack() as stack:
            local = bundle_at(bundle)
            place = stack.enter_context(written_to(PACK, out))
            exported = export_pack(
                local,
                place,
                app=app,
                accept_changed=accept_changed_app,
                licence=licence,
                key=sign,
                int8=int8,
                validation=_validation,
            )
            pack = exported.pack
            size = sum(graph.stat().st_size for graph in pack.graphs())
        allowed = f"{exported.allowed:.3g} is allowed"
        if pack.generate is not None:
            allowed += ", and none of whole numbers"
        typer.echo(f"Checked against the bundle: the largest difference is {exported.difference:.3g} ({allowed}).")
        if exported.int8:
            typer.echo(exported.int8)
        typer.echo(f"Pack: {url_of(out) or out}  Model: {size:,} bytes")
    if serve:
        from penstock.core.packs.pack import read_pack

        _serve(read_pack(pack_at(out)), port)


@contextmanager
def _sigterm_exits() -> Generator[None]:
    """Make SIGTERM raise SystemExit, so that partial files are removed and the exporter process ends."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_key(file: Path) -> None:
    from penstock.core.packs.signature import key_text, new_key, public_file

    public = new_key(file)
    typer.echo(f"Private key: {file} (keep it secret)  Public key: {public_file(file)}")
    typer.echo(f"Public key in base64: {key_text(public)}")


def _serve(pack: "Pack", port: int) -> None:
    from penstock.core.packs.pack import WEB
    from penstock.export.static_host import ON_A_PHONE, pack_host

    if f"{WEB}/index.html" not in pack.files:
        raise PackError(f"the pack {pack.folder} holds no web app; export the bundle again with this penstock.")
    with pack_host(pack, port) as host:
        typer.echo(f"Open {host.page} in a browser on this machine; Ctrl-C ends it.")
        typer.echo(ON_A_PHONE.format(port=host.port))
        signal.pause()


def _validation(found: "FoundApplication") -> "Validation | None":
    """Validation examples with class targets, if the recipe has any."""
    import numpy as np

    from penstock.export.pack_session import Validation

    application = found.application
    if application.recipe is None or application.live is not None or application.prepare is not None:
        return None
    try:
        examples = found.recipe().data().validation
    except Exception as error:  # noqa: BLE001 - the user's recipe raises anything
        typer.echo(f"int8 is measured on the golden examples alone, because the recipe gives no data ({error}).")
        return None
    # A recipe may be without a validation set, despite the declared type.
    if cast("Examples | None", examples) is None:
        return None
    count = min(len(examples), MAX_VALIDATED)
    inputs = examples.empty(count)
    targets = np.asarray(examples.read(np.arange(count), np.arange(count, dtype=np.uint64), inputs))
    classes = targets.shape == (count,) and targets.dtype.kind in "iu"
    return Validation(inputs=list(inputs), targets=targets) if classes else None
