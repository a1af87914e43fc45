"""`penstock bench feed`: the rate of reading examples."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.documented import documented
from penstock.core.errors import BenchError
from penstock.core.machine.cores import available_cores
from penstock.core.wording.counted import counted


@documented
def feed(
    source: Path,
    size: Annotated[str, typer.Option(metavar="HxW")] = "224x224",
    workers: Annotated[list[int] | None, typer.Option(min=1)] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    batches: Annotated[int, typer.Option(min=1)] = 8,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    record: Path | None = None,
) -> None:
    """Measure the examples a second that this machine reads and decodes, with one thread and with several.

    Args:
        source: Shards, or a folder that holds a folder of pictures for each class.
        size: Height and width of the random crops of pictures.
        workers: Threads; may be given several times. 1 and all cores by default.
        batch_size: Examples of a batch.
        batches: Batches of a repetition.
        repeat: Repetitions.
        record: Append the measurements to this file of JSON lines.
    """
    from penstock.bench.measurement import append
    from penstock.bench.read_rate import open_source, rates, read_measurement

    height, _, width = size.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise BenchError(f"--size is {size!r}; give height and width in pixels, such as 224x224.")
    examples = open_source(source, (int(height), int(width)))
    for count in workers or sorted({1, available_cores()}):
        values = rates(examples, workers=count, batch_size=batch_size, batches=batches, repeat=repeat)
        line = read_measurement(values, source, examples, count, batch_size)
        typer.echo(f"{counted(count, 'thread')}: {line.median:,.0f} examples/s ({line.p10:,.0f} to {line.p90:,.0f})")
        if record is not None:
            append(line, record)
