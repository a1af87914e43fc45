"""`penstock watch`: a pack looks at a camera or listens to a microphone."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import SourceError

if TYPE_CHECKING:
    from penstock.core.pack import Pack
    from penstock.device.report import Report
    from penstock.device.views import View
    from penstock.device.watch import Seen


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack's folder, as 'penstock export' writes it.")],
    source: Annotated[
        str,
        typer.Option(
            help="A camera (0), a video, rtsp://..., a folder of pictures; of a live pack a WAV file or mic.",
        ),
    ] = "0",
    view: Annotated[
        str,
        typer.Option(help="terminal, lines, none, or auto: terminal where there is one, lines where there is none."),
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write what is seen as a video: .mp4, .mkv or .webm.")] = None,
    json_lines: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write a line of JSON for each answer; - for stdout.")
    ] = None,
    every_frame: Annotated[
        bool, typer.Option("--every-frame", help="Look at each frame of a file, instead of playing it in real time.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="Who must have signed the pack: a public key in base64, or its PEM file.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or int8 where the pack has it.")] = "fp32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the network.")] = 1,
    size: Annotated[str | None, typer.Option(help="What a camera is asked for, 640x480.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames a second that a camera is asked for.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.")] = None,
    stall: Annotated[float, typer.Option(help="Seconds without a frame after which a source is given up.")] = 10.0,
) -> None:
    """Look at a camera, a video or pictures with a pack, or listen to sound; a report comes at the end."""
    from penstock.device.sources import is_sound

    ready = _read_pack(pack, key)
    show_json = json_lines == "-"
    if is_sound(source):
        from penstock.cli.listen import listen

        return listen(ready, source, json_lines=json_lines, real_time=not every_frame, seconds=seconds, stall_s=stall)
    from penstock.device.engine import Engine
    from penstock.device.sources import source_of
    from penstock.device.watch import Watch
    from penstock.device.words import json_of

    engine = Engine(ready, precision=precision, threads=threads)
    opened = source_of(source, size=size, rate=fps, stall_s=stall)
    with ExitStack() as open_until_the_end:
        run = open_until_the_end.enter_context(Watch(engine, opened, every_frame=every_frame, stall_s=stall))
        sinks: list[Callable[[Seen], None]] = []
        if json_lines is not None:
            write = open_until_the_end.enter_context(_writer(json_lines))
            sinks.append(lambda seen: write(json_of(seen)))
        if out is not None:
            from penstock.device.annotate import VideoWriter

            sinks.append(open_until_the_end.enter_context(VideoWriter(out, opened.rate)).add)
        sinks.append(open_until_the_end.enter_context(_view("none" if show_json and view == "auto" else view)).show)
        open_until_the_end.callback(_end, run.report, "pictures" if opened.apart else "frames", opened.broken.named)
        with contextlib.suppress(KeyboardInterrupt):
            for seen in run:
                for sink in sinks:
                    sink(seen)
                if seconds is not None and run.report_seconds() >= seconds:
                    break
