"""`penstock bench device`: the figures of a pack on devices."""

from pathlib import Path
from typing import Annotated

import typer


def device(
    pack: Annotated[
        Path | None, typer.Option(help="A pack of pictures, which `penstock export` wrote; its figures too.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure what is carried on devices: how well photographs are known again; a pack in Chromium and here."""
    from penstock.bench.device import device_figures
    from penstock.bench.figures import DEVICE, measure_figures

    figures = DEVICE | device_figures(pack) if pack else DEVICE
    options = " --pack PACK" if pack else ""
    measure_figures(figures, "device", only or [], record=record, say=typer.echo, options=options)
