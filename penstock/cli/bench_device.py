"""`penstock bench device`: the figures of what is carried on devices."""

from pathlib import Path
from typing import Annotated

import typer


def device(
    pack: Annotated[
        Path | None, typer.Option(help="A pack of pictures, which `penstock export` wrote: its figures too.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="The bundle that it was made of, for what takes both.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure how well the photographs are known; of a pack, the offline app in Chromium beside ONNX Runtime here."""
    from penstock.bench.figures import DEVICE, measure_figures

    if pack is None:
        measure_figures(DEVICE, "device", only or [], record=record, say=typer.echo)
        return
    from penstock.bench.device import device_figures

    # Of a pack, unless the others are asked for by name: they take minutes of training.
    figures = device_figures(pack, bundle)
    if any(name in DEVICE for name in only or []):
        figures = DEVICE | figures
    options = " --pack PACK" + " --bundle BUNDLE" * (bundle is not None)
    measure_figures(figures, "device", only or [], record=record, say=typer.echo, options=options)
