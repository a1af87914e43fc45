"""`penstock bench device`: the figures of a pack on devices."""

from pathlib import Path
from typing import Annotated

import typer


def device(
    pack: Annotated[Path, typer.Option(help="A pack of pictures, which `penstock export` wrote.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle that it was made of, for what takes both.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure a pack on devices: the offline app in headless Chromium beside ONNX Runtime here."""
    from penstock.bench.device import device_figures
    from penstock.bench.figures import measure_figures

    figures = device_figures(pack, bundle)
    options = " --pack PACK" + " --bundle BUNDLE" * (bundle is not None)
    measure_figures(figures, "device", only or [], record=record, say=typer.echo, options=options)
