"""`penstock watch`: run a pack on a camera, a video, pictures, a microphone or a sound file."""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documented import documented
from penstock.cli.printing import print_left_out, print_rows
from penstock.core.errors import PackError, SourceError

if TYPE_CHECKING:
    from penstock.core.pack import Pack
    from penstock.device.device_run import DeviceRun
    from penstock.device.source import DecodeFailures

VIEWS = ("auto", "terminal", "lines", "none")
ALSA_CONFIGURATION = Path("/usr/share/alsa/alsa.conf")

Sink = Callable[[Any], None]


@documented
def watch(
    pack: Annotated[Path, typer.Argument(metavar="PACK")],
    source: str = "0",
    view: str = "auto",
    out: Path | None = None,
    json_lines: Annotated[str | None, typer.Option("--json", metavar="FILE")] = None,
    every_frame: Annotated[bool, typer.Option("--every-frame")] = False,
    key: str | None = None,
    precision: str = "fp32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    size: str | None = None,
    fps: Annotated[float | None, typer.Option(min=0.01)] = None,
    seconds: Annotated[float | None, typer.Option(min=0)] = None,
    stall_timeout_s: Annotated[float, typer.Option(min=0.1)] = 10.0,
) -> None:
    """Run a pack on a camera, a video, pictures or sound; a report is printed at the end.

    Args:
        pack: A pack's folder, as 'penstock export' writes it.
        source: A camera (0), a video, rtsp://..., a folder of pictures; for a live pack a WAV file, - or mic.
        view: terminal, lines, none, or auto: terminal in a terminal, lines elsewhere.
        out: Write an annotated video: .mp4, .mkv or .webm.
        json_lines: Write one line of JSON per answer; - for stdout.
        every_frame: Process all of a file, instead of playing it in real time.
        key: Required signer of the pack: a public key in base64, or its PEM file.
        precision: fp32, or int8 where the pack has it.
        threads: CPU threads for the network.
        size: Requested picture size of a camera, 640x480.
        fps: Requested frames per second of a camera.
        seconds: Stop after so many seconds.
        stall_timeout_s: Give a source up after so many seconds without a frame.
    """
    from penstock.device.sources import names_sound

    if view not in VIEWS:
        raise SourceError(f"--view is {view!r}; choose one of {', '.join(VIEWS)}.")
    _refuse_source("--out", source, out)
    _refuse_source("--json", source, None if json_lines is None else Path(json_lines))
    if json_lines == "-" and view in ("auto", "lines"):
        view = "none"
    ready = pack_of(pack, key)
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if names_sound(source):
            if out is not None:
                raise SourceError(f"--out is {out}, a video; for sound, write --json FILE.")
            from penstock.device.captions import chunk_json, chunk_line
            from penstock.device.listen import ListenRun

            engine, sound = _open_sound(ready, source, precision, threads)
            # The standard input is read at the pace of the program that writes it; nothing of it is dropped.
            real_time = not every_frame and source != "-"
            run = ListenRun(engine, sound, real_time=real_time, stall_timeout_s=stall_timeout_s)
            unit, failures, to_json = "chunks", sound.failures, chunk_json
            if view != "none":
                sinks.append(lambda result: typer.echo(chunk_line(result)) if result.labels else None)
        else:
            from penstock.device.captions import frame_json
            from penstock.device.pack_engine import PackEngine
            from penstock.device.sources import open_frames
            from penstock.device.watch import WatchRun, check_pictures

            classifier = PackEngine(ready, precision=precision, threads=threads)
            # Before a camera is opened.
            check_pictures(ready)
            frames = open_frames(source, size=size, rate=fps, read_timeout_s=stall_timeout_s)
            run = WatchRun(classifier, frames, every_frame=every_frame, stall_timeout_s=stall_timeout_s)
            unit, failures, to_json = "pictures" if frames.independent else "frames", frames.failures, frame_json
            sinks += _view(view, stack)
            if out is not None:
                from penstock.device.annotate import VideoWriter

                sinks.append(stack.enter_context(VideoWriter(out, frames.rate)).add)
        if json_lines is not None:
            sinks.append(stack.enter_context(_json_file(json_lines, to_json)))
        stack.callback(_report, run, unit, failures)
        stack.enter_context(run)
        _pump(run, sinks, seconds)


def _refuse_source(option: str, source: str, written: Path | None) -> None:
    # A source opened for writing would be emptied before it is read.
    source = os.path.expanduser(source)
    if written is not None and written.exists() and os.path.exists(source) and written.samefile(source):
        raise SourceError(f"{option} is {written}, the source itself; name another file.")


def pack_of(folder: Path, key: str | None) -> "Pack":
    """Read a pack, verified, and signed by the key if one is given.

    Raises:
        PackError: It is no pack, is altered, or is not signed by the key.
    """
    from penstock.core.pack import read_pack
    from penstock.core.signature import read_public_key

    return read_pack(folder, None if key is None else read_public_key(key))


def _open_sound(pack: "Pack", source: str, precision: str, threads: int) -> Any:
    from penstock.core.live import is_sound
    from penstock.device.pack_engine import LivePackEngine
    from penstock.device.sources import open_sound

    engine = LivePackEngine(pack, precision=precision, threads=threads)
    if not is_sound(pack.input):
        raise PackError(f"the pack {pack.name!r} takes {pack.input.describe()}, not 16-bit sound of one channel.")
    if ALSA_CONFIGURATION.exists():
        # PyAV's ALSA looks for its configuration where it was built.
        os.environ.setdefault("ALSA_CONFIG_PATH", str(ALSA_CONFIGURATION))
    return engine, open_sound(source, engine.live.rate_hz, engine.live.chunk)


def _pump(run: "DeviceRun[Any, Any]", sinks: list[Sink], seconds: float | None) -> None:
    with suppress(KeyboardInterrupt):
        for result in run:
            for sink in sinks:
                sink(result)
            if seconds is not None and run.seconds >= seconds:
                return


def _view(name: str, stack: ExitStack) -> list[Sink]:
    from rich.console import Console

    from penstock.device.terminal_view import LineView, TerminalView

    if name == "none":
        return []
    console = Console()
    if name == "terminal" or (name == "auto" and console.is_terminal):
        return [stack.enter_context(TerminalView(console)).show]
    return [LineView(typer.echo).show]


@contextmanager
def _json_file(name: str, to_json: Callable[[Any], str]) -> Generator[Sink]:
    if name == "-":
        yield lambda result: typer.echo(to_json(result))
        return
    try:
        file = Path(name).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as error:
        raise SourceError(f"{name} cannot be written ({error.strerror}).") from None

    def write(result: Any) -> None:
        try:
            file.write(to_json(result) + "\n")
        except OSError as error:
            raise SourceError(f"{name} cannot be written ({error.strerror}).") from None

    try:
        yield write
    finally:
        # A failed write was reported; closing would report it again.
        with suppress(OSError):
            file.close()


def _report(run: "DeviceRun[Any, Any]", unit: str, failures: "DecodeFailures") -> None:
    from rich.console import Console

    print_left_out(failures)
    report = run.report()
    if report.answered:
        # On stderr, because the answers on stdout may be JSON.
        print_rows(report.rows(unit), console=Console(stderr=True, soft_wrap=True, highlight=False))
