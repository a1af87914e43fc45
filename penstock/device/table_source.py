"""Rows of numbers or texts for packs that take no pictures: CSV, lines of the standard input, NumPy files.

An input is a line; or several lines where the network takes frames of several numbers, `[T, D]`, and each line has D.
"""

import io
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, final

import numpy as np

from penstock.core.errors import RequestError, SourceError
from penstock.core.packs.pack import Pack
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import is_sound
from penstock.device.number_lines import NumberLines, frame_spec
from penstock.device.sound_source import SoundChunk
from penstock.device.source import DecodeFailures, Source, SourceItem

STANDARD_INPUT = "-"
LINES = (".csv", ".tsv", ".txt")
ARRAYS = (".npy", ".npz")
MAX_TEXT_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRow(SourceItem):
    """One input.

    Args:
        given: Its tensors by name, or a text.
        line: Number of its first line, from 1; of a NumPy file its index, from 0.
    """

    given: Mapping[str, Array] | str
    line: int


def names_rows(source: str, pack: Pack) -> bool:
    """True for a CSV, text or NumPy file, and for the standard input where the pack takes no sound."""
    sound = pack.live is not None and is_sound(pack.input)
    return source.lower().endswith((*LINES, *ARRAYS)) or (source == STANDARD_INPUT and not sound)


def fitting_source(pack: Pack) -> str:
    """Name the sources that fit what a pack takes."""
    if pack.raw is not None:
        return "a camera, a video or a folder of pictures"
    if pack.live is not None and is_sound(pack.input):
        return "mic, a .wav file, or - for a WAV"
    return "a .csv, .npy or .npz file, or - for lines"


def check_rows(pack: Pack) -> None:
    """Check that a pack takes rows.

    Raises:
        SourceError: It takes pictures of any size.
    """
    if pack.raw is not None:
        raise SourceError(
            f"the pack {pack.name!r} takes {pack.raw.describe()} ({pack.raw.meaning}); name {fitting_source(pack)}."
        )


class _Rows:
    """The lines of a file or of the standard input, or the arrays of a NumPy file."""

    def __init__(self, source: str, pack: Pack) -> None:
        check_rows(pack)
        self.name = "the standard input" if source == STANDARD_INPUT else source
        # Nothing is dropped: a sensor is read at the pace of the program that writes its lines.
        self.recorded = True
        self.failures = DecodeFailures()
        self._pack = pack
        path = Path(source).expanduser()
        self._arrays: dict[str, Array] | None = None
        self._lines: TextIO | None = None
        if source == STANDARD_INPUT:
            self._lines = sys.stdin
            if isinstance(sys.stdin, io.TextIOWrapper):
                # As a file is opened below: a line of other bytes is a bad line.
                sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            return
        try:
            if path.suffix.lower() in ARRAYS:
                self._arrays = _read_arrays(path)
            else:
                self._lines = path.open(encoding="utf-8", errors="replace", newline=None)
        except OSError as error:
            raise SourceError(f"{source} cannot be read ({error.strerror or error}).") from None

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None and self._lines is not sys.stdin:
            self._lines.close()

    def lines(self, limit: int) -> Iterator[tuple[int, str]]:
        """Lines that are not empty, with their numbers from 1."""
        assert self._lines is not None, self.name
        number = 0
        try:
            while line := self._lines.readline(limit + 1):
                number += 1
                if len(line) > limit:
                    raise SourceError(
                        f"{self.name}, line {number} has more than {limit:,} characters; the pack "
                        f"{self._pack.name!r} takes {self._pack.input.describe()}, an input or a frame a line."
                    )
                if text := line.strip().removeprefix("\ufeff"):
                    yield number, text
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read on ({error.strerror}).") from None

    def failed(self, line: int, reason: str) -> None:
        self.failures.add(f"{self.name}, line {line}: {reason}")


@final
class TableSource(_Rows, Source[GivenRow]):
    """Inputs of a pack that is not live. Lines that are no input are counted, and listed with their numbers.

    Args:
        source: A file, or `-`.
        pack: Its inputs say what a line has.

    Raises:
        SourceError: It cannot be read, or lines cannot hold the pack's inputs.
    """

    def items(self) -> Iterator[GivenRow]:
        """Inputs in order."""
        if self._arrays is not None:
            found = self._of_arrays(self._arrays)
        elif self._pack.text is not None:
            found = ((line, text) for line, text in self.lines(MAX_TEXT_CHARACTERS))
        else:
            numbers = NumberLines(self._pack.inputs, self._pack.name)
            found = numbers.inputs(self.lines(numbers.max_characters), self.failed)
        for number, (line, given) in enumerate(found):
            yield GivenRow(number=number, time_s=0.0, given=given, line=line)

    def _of_arrays(self, arrays: dict[str, Array]) -> Iterator[tuple[int, Mapping[str, Array]]]:
        specs = {spec.name: spec for spec in self._pack.inputs}
        named = _by_name(self.name, arrays, specs)
        each = {name: array.ndim == len(specs[name].shape) + 1 for name, array in named.items()}
        if not any(each.values()):
            yield 0, self._checked(named)
            return
        counts = {len(array) for array in named.values()} if all(each.values()) else set[int]()
        if len(counts) != 1:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in named.items())
            raise SourceError(f"{self.name} has {shapes}; give every tensor as one input, or all with as many inputs.")
        for index in range(counts.pop()):
            try:
                yield index, self._checked({name: array[index] for name, array in named.items()})
            except SourceError as error:
                self.failures.add(f"{self.name}, input {index}: {error}")

    def _checked(self, named: dict[str, Array]) -> dict[str, Array]:
        spec = self._pack.input
        try:
            cast = {each.name: each.cast(named[each.name]) for each in self._pack.inputs if each.name in named}
            if isinstance(spec, RecordSpec):
                spec.of_many([cast])
            else:
                spec.check(cast[spec.name])
        except RequestError as error:
            raise SourceError(str(error)) from None
        return cast


@final
class SignalSource(_Rows, Source[SoundChunk]):
    """A live signal from a sensor, a frame a line, in the pack's chunks; or `[T, ...]` of a NumPy file.

    Args:
        source: A file, or `-`.
        pack: A live pack.

    Raises:
        SourceError: It cannot be read.
    """

    def items(self) -> Iterator[SoundChunk]:
        """Chunks in order; the last one ends the signal."""
        live = self._pack.live
        assert live is not None, self._pack.name
        (spec,) = self._pack.inputs
        waiting: list[Array] = []
        sent = 0
        for frame in self._frames(spec):
            waiting.append(frame)
            if len(waiting) == live.chunk:
                sent += 1
                yield self._cut(sent - 1, np.stack(waiting), live.rate_hz, live.chunk, last=False)
                waiting = []
        rest = np.stack(waiting) if waiting else np.zeros((0, *spec.shape[1:]), spec.numpy_dtype)
        yield self._cut(sent, rest, live.rate_hz, live.chunk, last=True)

    def _cut(self, number: int, frames_T: Array, rate_hz: float, chunk: int, *, last: bool) -> SoundChunk:
        time_s = (number * chunk + len(frames_T)) / rate_hz
        return SoundChunk(number=number, time_s=time_s, samples_T=frames_T, last=last)

    def _frames(self, spec: TensorSpec) -> Iterator[Array]:
        frame = frame_spec(spec)
        if self._arrays is None:
            numbers = NumberLines((frame,), self._pack.name)
            for _, given in numbers.inputs(self.lines(numbers.max_characters), self.failed):
                yield given[spec.name]
            return
        (signal,) = _by_name(self.name, self._arrays, {spec.name: spec}).values()
        if signal.shape[1:] != frame.shape or signal.ndim != len(spec.shape):
            sizes = ", ".join(map(str, ("any", *frame.shape)))
            raise SourceError(
                f"{self.name} has shape {list(signal.shape)}; {self._pack.name!r} takes [{sizes}] frames."
            )
        for index, given in enumerate(signal):
            try:
                yield np.asarray(frame.cast(np.asarray(given)))
            except RequestError as error:
                self.failures.add(f"{self.name}, frame {index}: {error}")


def _read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a NumPy file by name; of an `.npy` file under the empty name."""
    try:
        # Opened here, because NumPy leaves a file open that it cannot read.
        with path.open("rb") as file:
            loaded: Any = np.load(file, allow_pickle=False)
            return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).split(".")[0]
        raise SourceError(f"{path} is no NumPy file of numbers ({reason}); write it by np.save or np.savez.") from None


def _by_name(source: str, arrays: dict[str, Array], specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """The arrays under the names of the inputs; one array of another name is the only input."""
    if len(arrays) == 1 and len(specs) == 1:
        return dict(zip(specs, arrays.values(), strict=True))
    unknown = sorted(arrays.keys() - specs.keys())
    missing = sorted(name for name in specs.keys() - arrays.keys() if specs[name].default is None)
    if unknown or missing:
        found = ", ".join(name or "one array without a name" for name in arrays) or "no array"
        raise SourceError(f"{source} has {found}; the pack takes {', '.join(specs)}: write them by np.savez.")
    return arrays
