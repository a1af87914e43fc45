"""`penstock watch`: a pack looks at a camera or listens to a microphone."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import PackError, SourceError

if TYPE_CHECKING:
    from penstock.core.pack import Pack
    from penstock.device.audio import Sound
    from penstock.device.engine import Engine, LiveEngine
    from penstock.device.frames import Source
    from penstock.device.listen import Listen
    from penstock.device.views import View
    from penstock.device.watch import Watch

VIEWS = ("auto", "terminal", "lines", "none")
ALSA_CONFIGURATION = Path("/usr/share/alsa/alsa.conf")
# Of what is broken, so many are named.
NAMED = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack's folder, as 'penstock export' writes it.")],
    source: Annotated[
        str,
        typer.Option(
            help="A camera (0), a video, rtsp://..., a folder of pictures; for a live pack a WAV file, - or mic."
        ),
    ] = "0",
    view: Annotated[
        str, typer.Option(help="terminal, lines, none, or auto: terminal where there is one, and lines elsewhere.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write what is seen as a video: .mp4, .mkv or .webm.")] = None,
    json_lines: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write a line of JSON for each answer; - for stdout.")
    ] = None,
    every_frame: Annotated[
        bool, typer.Option("--every-frame", help="Take all of a file, instead of playing it in real time.")
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

    if view not in VIEWS:
        raise SourceError(f"--view is {view!r}; choose one of {', '.join(VIEWS)}.")
    _refuse_source("--out", source, out)
    _refuse_source("--json", source, None if json_lines is None else Path(json_lines))
    if json_lines == "-" and view in ("auto", "lines"):
        view = "none"
    ready = pack_of(pack, key)
    if is_sound(source):
        if out is not None:
            raise SourceError(f"--out is {out}, a video; of sound, write --json FILE.")
        engine, sound = _ears(ready, source, precision, threads)
        # What another program writes waits in its pipe: nothing of it is let go.
        real_time = not every_frame and source != "-"
        _listen(engine, sound, view, json_lines, real_time=real_time, seconds=seconds, stall_s=stall)
        return
    from penstock.device.engine import Engine
    from penstock.device.sources import source_of

    seeing = Engine(ready, precision=precision, threads=threads)
    opened = source_of(source, size=size, rate=fps, stall_s=stall)
    _look(seeing, opened, view, json_lines, out, every_frame=every_frame, seconds=seconds, stall_s=stall)


def _refuse_source(option: str, source: str, written: Path | None) -> None:
    # Opened to be written, it would be empty before it is read.
    watched = os.path.expanduser(source)
    if written is not None and written.exists() and os.path.exists(watched) and written.samefile(watched):
        raise SourceError(f"{option} is {written}, the source itself; name another file.")


def pack_of(folder: Path, key: str | None) -> "Pack":
    """The pack in a folder, verified, and signed by the key if one is given.

    Raises:
        PackError: It is none, is altered, or is not signed by the key.
    """
    from penstock.core.pack import read_pack
    from penstock.core.signature import read_public_key

    return read_pack(folder, None if key is None else read_public_key(key))


def _look(
    engine: "Engine",
    source: "Source",
    view: str,
    json_lines: str | None,
    out: Path | None,
    *,
    every_frame: bool,
    seconds: float | None,
    stall_s: float,
) -> None:
    from penstock.device.watch import Watch
    from penstock.device.words import json_of

    run = Watch(engine, source, every_frame=every_frame, stall_s=stall_s)
    try:
        with ExitStack() as stack:
            sinks: list[Callable[[Any], None]] = [stack.enter_context(_view(view)).show]
            if json_lines is not None:
                sinks.append(stack.enter_context(_json_file(json_lines, json_of)))
            if out is not None:
                from penstock.device.annotate import VideoWriter

                sinks.append(stack.enter_context(VideoWriter(out, source.rate)).add)
            stack.enter_context(run)
            _until_it_ends(run, sinks, seconds)
    finally:
        _end(run, "pictures" if source.apart else "frames", source.broken.named)


def _ears(pack: "Pack", source: str, precision: str, threads: int) -> "tuple[LiveEngine, Sound]":
    from penstock.device.audio import sound_of
    from penstock.device.engine import LiveEngine
    from penstock.device.listen import takes_sound

    engine = LiveEngine(pack, precision=precision, threads=threads)
    if ALSA_CONFIGURATION.exists():
        # The ALSA that comes with PyAV looks for it where it was built.
        os.environ.setdefault("ALSA_CONFIG_PATH", str(ALSA_CONFIGURATION))
    if not takes_sound(engine):
        raise PackError(f"the pack {pack.name!r} takes {pack.input.describe()}, not 16-bit sound of one channel.")
    return engine, sound_of(source, engine.live.rate_hz, engine.live.chunk)


def _listen(
    engine: "LiveEngine",
    sound: "Sound",
    view: str,
    json_lines: str | None,
    *,
    real_time: bool,
    seconds: float | None,
    stall_s: float,
) -> None:
    from penstock.device.listen import Listen
    from penstock.device.words import heard_json, heard_line

    run = Listen(engine, sound, real_time=real_time, stall_s=stall_s)
    try:
        with ExitStack() as stack:
            sinks: list[Callable[[Any], None]] = []
            if view != "none":
                sinks.append(lambda heard: _say_if(heard_line(heard)))
            if json_lines is not None:
                sinks.append(stack.enter_context(_json_file(json_lines, heard_json)))
            stack.enter_context(run)
            _until_it_ends(run, sinks, seconds)
    finally:
        _end(run, "chunks", [])


def _until_it_ends(run: "Watch | Listen", sinks: list[Callable[[Any], None]], seconds: float | None) -> None:
    with suppress(KeyboardInterrupt):
        for answer in run:
            for sink in sinks:
                sink(answer)
            if seconds is not None and run.seconds >= seconds:
                return


def _view(name: str) -> "View":
    from rich.console import Console

    from penstock.device.views import Lines, Silent, Terminal

    console = Console()
    if name == "terminal" or (name == "auto" and console.is_terminal):
        return Terminal(console)
    return Silent() if name == "none" else Lines(typer.echo)


def _say_if(line: str) -> None:
    if line:
        typer.echo(line)


@contextmanager
def _json_file(name: str, line_of: Callable[[Any], str]) -> Generator[Callable[[Any], None]]:
    if name == "-":
        yield lambda answer: typer.echo(line_of(answer))
        return
    try:
        sink = Path(name).open("w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise SourceError(f"{name} cannot be written ({error.strerror}).") from None

    def write(answer: Any) -> None:
        try:
            sink.write(line_of(answer) + "\n")
            # Whoever follows the file sees each answer when it is there.
            sink.flush()
        except OSError as error:
            raise SourceError(f"{name} cannot be written ({error.strerror}).") from None

    try:
        yield write
    finally:
        # All that could be written is; what could not was told.
        with suppress(OSError):
            sink.close()


def _end(run: "Watch | Listen", unit: str, broken: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Not among the answers, which may be JSON on stdout.
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    for sentence in broken[:NAMED]:
        console.print(Text(f"Left out: {sentence}"))
    if len(broken) > NAMED:
        console.print(f"Left out: {len(broken) - NAMED:,} more.")
    report = run.report()
    if report.answered == 0:
        return
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for row in report.rows(unit).items():
        table.add_row(*row)
    console.print(table)
