"""`penstock watch`: run a pack on a camera, a video, pictures, sound, or rows of a table or a sensor."""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.printing import print_left_out, print_rows
from penstock.cli.remote_arguments import pack_at
from penstock.core.errors import PackError, SourceError
from penstock.core.remote.cache_variables import cache_folder

if TYPE_CHECKING:
    from penstock.core.packs.pack import Pack
    from penstock.device.device_run import DeviceRun
    from penstock.device.pack_engine import LivePackEngine
    from penstock.device.source import DecodeFailures

VIEWS = ("auto", "terminal", "lines", "none")
ALSA_CONFIGURATION = Path("/usr/share/alsa/alsa.conf")

Sink = Callable[[Any], None]
_NO_VIDEO = object()


@documented_with_urls("pack")
def watch(
    pack: Annotated[Path, typer.Argument(metavar="PACK")],
    source: str = "0",
    view: str = "auto",
    out: Path | None = None,
    json_lines: Annotated[str | None, typer.Option("--json", metavar="FILE")] = None,
    every_frame: bool = False,
    key: str | None = None,
    precision: str = "fp32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    size: str | None = None,
    fps: Annotated[float | None, typer.Option(min=0.01)] = None,
    seconds: Annotated[float | None, typer.Option(min=0)] = None,
    stall_timeout_s: Annotated[float, typer.Option(min=0.1)] = 10.0,
) -> None:
    """Run a pack on a camera, a video, pictures, sound, a table or a sensor; a report is printed at the end.

    Args:
        pack: A pack's folder, as 'penstock export' writes it, or its URL.
        source: A camera (0), a video, rtsp://..., a folder of pictures; for sound a WAV file, - or mic; for other packs
            a .csv, .txt, .npy or .npz file, or - for lines of numbers.
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
    if view not in VIEWS:
        raise SourceError(f"--view is {view!r}; choose one of {', '.join(VIEWS)}.")
    _refuse_source("--out", source, out)
    _refuse_source("--json", source, None if json_lines is None else Path(json_lines))
    if json_lines == "-" and view in ("auto", "lines"):
        view = "none"
    ready = pack_of(pack, key)
    how = _How(precision, threads, stall_timeout_s, every_frame, size, fps)
    with ExitStack() as stack:
        opened = _open(ready, source, how)
        if out is not None and opened.rate is _NO_VIDEO:
            raise SourceError(f"--out is {out}, a video; of {opened.unit}, write --json FILE.")
        sinks: list[Sink] = []
        if opened.line is None:
            sinks += _view(view, stack)
        elif view != "none":
            sinks.append(_lines(opened.line))
        if out is not None:
            from penstock.device.annotate import VideoWriter

            sinks.append(stack.enter_context(VideoWriter(out, opened.rate)).add)
        if json_lines is not None:
            sinks.append(stack.enter_context(_json_file(json_lines, opened.to_json)))
        stack.callback(_report, opened.run, opened.unit, opened.failures)
        stack.enter_context(opened.run)
        _pump(opened.run, sinks, seconds)


class _How(NamedTuple):
    """The options that sources and engines are opened with."""

    precision: str
    threads: int
    stall_timeout_s: float
    every_frame: bool
    size: str | None
    fps: float | None


class _Opened(NamedTuple):
    """A run over a source, and how its results are written."""

    run: "DeviceRun[Any, Any]"
    unit: str
    failures: "DecodeFailures"
    to_json: Callable[[Any], str]
    # None where there are pictures to show.
    line: Callable[[Any], str] | None
    rate: Any


def _open(pack: "Pack", source: str, how: _How) -> _Opened:
    from penstock.device.sources import names_sound
    from penstock.device.table_source import names_rows

    if names_rows(source, pack):
        return _open_rows(pack, source, how) if pack.live is None else _open_signal(pack, source, how)
    return _open_sound(pack, source, how) if names_sound(source) else _open_frames(pack, source, how)


def _open_rows(pack: "Pack", source: str, how: _How) -> _Opened:
    from penstock.device.pack_engine import PackEngine
    from penstock.device.row_captions import row_json, row_line
    from penstock.device.row_run import RowRun
    from penstock.device.table_source import TableSource, check_rows

    check_rows(pack)
    engine = PackEngine(pack, precision=how.precision, threads=how.threads)
    rows = TableSource(source, pack)
    return _Opened(
        RowRun(engine, rows), "rows", rows.failures, partial(row_json, pack), partial(row_line, pack), _NO_VIDEO
    )


def _open_signal(pack: "Pack", source: str, how: _How) -> _Opened:
    from penstock.device.pack_engine import LivePackEngine
    from penstock.device.table_source import SignalSource

    engine = LivePackEngine(pack, precision=how.precision, threads=how.threads)
    # The lines of a sensor come in their own time; a file is read as fast as it goes.
    return _heard(engine, SignalSource(source, pack), real_time=False, how=how)


def _open_sound(pack: "Pack", source: str, how: _How) -> _Opened:
    from penstock.core.streams.live import is_sound
    from penstock.device.pack_engine import LivePackEngine
    from penstock.device.sources import open_sound
    from penstock.device.table_source import fitting_source

    if pack.live is None or not is_sound(pack.input):
        raise PackError(
            f"the pack {pack.name!r} takes {pack.input.describe()}, not 16-bit sound of one channel; name "
            f"{fitting_source(pack)}."
        )
    engine = LivePackEngine(pack, precision=how.precision, threads=how.threads)
    if ALSA_CONFIGURATION.exists():
        # PyAV's ALSA looks for its configuration where it was built.
        os.environ.setdefault("ALSA_CONFIG_PATH", str(ALSA_CONFIGURATION))
    # The standard input is read at the pace of the program that writes it; nothing of it is dropped.
    real_time = not how.every_frame and source != "-"
    return _heard(engine, open_sound(source, engine.live.rate_hz, engine.live.chunk), real_time=real_time, how=how)


def _heard(engine: "LivePackEngine", source: Any, *, real_time: bool, how: _How) -> _Opened:
    from penstock.device.captions import chunk_json, chunk_line
    from penstock.device.listen import ListenRun

    run = ListenRun(engine, source, real_time=real_time, stall_timeout_s=how.stall_timeout_s)
    line = partial(chunk_line, engine.pack.outputs[0])
    return _Opened(run, "chunks", source.failures, chunk_json, line, _NO_VIDEO)


def _open_frames(pack: "Pack", source: str, how: _How) -> _Opened:
    from penstock.device.captions import frame_json
    from penstock.device.pack_engine import PackEngine
    from penstock.device.sources import open_frames
    from penstock.device.watch import WatchRun, check_pictures

    # Before a camera is opened.
    check_pictures(pack)
    engine = PackEngine(pack, precision=how.precision, threads=how.threads)
    frames = open_frames(source, size=how.size, rate=how.fps, read_timeout_s=how.stall_timeout_s)
    run = WatchRun(engine, frames, every_frame=how.every_frame, stall_timeout_s=how.stall_timeout_s)
    unit = "pictures" if frames.independent else "frames"
    return _Opened(run, unit, frames.failures, frame_json, None, frames.rate)


def _lines(line: Callable[[Any], str]) -> Sink:
    def show(result: Any) -> None:
        if text := line(result):
            typer.echo(text)

    return show


def _refuse_source(option: str, source: str, written: Path | None) -> None:
    # A source opened for writing would be emptied before it is read.
    source = os.path.expanduser(source)
    if written is not None and written.exists() and os.path.exists(source) and written.samefile(source):
        raise SourceError(f"{option} is {written}, the source itself; name another file.")


def pack_of(folder: Path, key: str | None) -> "Pack":
    """Read a pack, from a folder or a URL, verified, and signed by the key if one is given.

    Raises:
        PackError: It is no pack, is altered, is not signed by the key, or is older than one of the key that was used
            on this machine.
    """
    from penstock.core.packs.pack import read_pack
    from penstock.core.packs.pack_age import refuse_older
    from penstock.core.packs.signature import read_public_key

    pack = read_pack(pack_at(folder), None if key is None else read_public_key(key))
    if key is not None:
        refuse_older(pack, cache_folder() / "signed-packs")
    return pack


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
