"""Speech with its text, as the usual corpora lay it out in files."""

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.recipe import spelled
from penstock.apps.speech.signal_frames import needed_frames, output_frames
from penstock.core.dim import Dim
from penstock.core.errors import TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.recipe import ArraySet, Data

# n utterances, T samples, L characters of the longest text

log = logging.getLogger(__name__)

# Longer ones are left out: a batch is as long as its longest utterance.
LONGEST_S = 20.0
FULL_SCALE = 32_768


@dataclass(frozen=True, kw_only=True, slots=True)
class Utterance:
    """A recording and what is said in it.

    Args:
        file: The sound, in any format that libsndfile reads.
        text: The words.
    """

    file: Path
    text: str


def librispeech(folder: str | Path) -> list[Utterance]:
    """Read a part of LibriSpeech: `READER/CHAPTER/*.flac` and `READER-CHAPTER.trans.txt` beside them.

    Raises:
        TrainError: The folder has no transcript, or a sound is missing.
    """
    found: list[Utterance] = []
    for transcript in sorted(Path(folder).rglob("*.trans.txt")):
        for line in filter(None, _lines(transcript)):
            name, _, text = line.partition(" ")
            found.append(Utterance(file=transcript.parent / f"{name}.flac", text=text))
    return _checked(found, folder, "*.trans.txt")


def common_voice(table: str | Path) -> list[Utterance]:
    """Read a table of Common Voice, such as `train.tsv`; its sounds are in `clips` beside it.

    Raises:
        TrainError: It has no columns `path` and `sentence`, or a sound is missing.
    """
    table = Path(table)
    rows = list(csv.DictReader(_lines(table), delimiter="\t", quoting=csv.QUOTE_NONE))
    if rows and not {"path", "sentence"} <= rows[0].keys():
        raise TrainError(f"{table} has the columns {_listed(rows[0])}; Common Voice has path and sentence.")
    _check_rows(rows, ("path", "sentence"), table)
    found = [Utterance(file=table.parent / "clips" / row["path"], text=row["sentence"]) for row in rows]
    return _checked(found, table, "a row")


def json_lines(file: str | Path) -> list[Utterance]:
    """Read a manifest of JSON lines: `audio_filepath` (or `audio`) and `text`, sounds relative to the file.

    Raises:
        TrainError: A line is no such object, or a sound is missing.
    """
    file = Path(file)
    found: list[Utterance] = []
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            sound, text = str(row.get("audio_filepath") or row["audio"]), str(row["text"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TrainError(
                f"line {number} of {file} must be a JSON object with audio_filepath and text: {line.strip()[:80]}"
            ) from None
        found.append(Utterance(file=file.parent / sound, text=text))
    return _checked(found, file, "a line")


def audio_folder(folder: str | Path) -> list[Utterance]:
    """Read a folder of sounds as Hugging Face's `audiofolder` has it.

    Its `metadata.csv` has `file_name`, and the text in `transcription`, `text` or `sentence`.

    Raises:
        TrainError: There is no such table, or a sound is missing.
    """
    table = Path(folder) / "metadata.csv"
    # A quoted text may have line ends in it.
    rows = list(csv.DictReader(line + "\n" for line in _lines(table)))
    column = next((name for name in ("transcription", "text", "sentence") if rows and name in rows[0]), "")
    if rows and (not column or "file_name" not in rows[0]):
        raise TrainError(f"{table} has the columns {_listed(rows[0])}; it needs file_name and transcription.")
    _check_rows(rows, ("file_name", column), table)
    found = [Utterance(file=Path(folder) / row["file_name"], text=row[column]) for row in rows]
    return _checked(found, table, "a row")


def data(*, train: Iterable[Utterance], validation: Iterable[Utterance], longest_s: float = LONGEST_S) -> Data:
    """Read utterances into memory at 16 kHz, as examples of `speech_recipe`.

    Their inputs are `sound`, with the number of samples; their targets the characters, `symbols`, and the number of
    samples again, `samples`. What lies behind the end of an utterance in a batch is not learned from.

    Args:
        train: Those of the training.
        validation: Those that select the weights; of other speakers.
        longest_s: Longer ones are left out, and those with more characters than frames; the log says how many.

    Raises:
        TrainError: A sound cannot be read, or has several channels; or no utterance is left.
    """
    return Data(train=_as_set("training", train, longest_s), validation=_as_set("validation", validation, longest_s))


def _as_set(kind: str, utterances: Iterable[Utterance], longest_s: float) -> ArraySet:
    sounds: list[Array] = []
    kept: list[Utterance] = []
    count = 0
    for utterance, sound_T in _read(utterances):
        count += 1
        if len(sound_T) <= longest_s * RATE_HZ:
            sounds.append(sound_T)
            kept.append(utterance)
    if len(kept) < count:
        left_out = count - len(kept)
        log.warning("%d of %d %s utterances are longer than %g s, and left out", left_out, count, kind, longest_s)
    symbols_nL = spelled([utterance.text for utterance in kept])
    samples_n = np.array([len(sound_T) for sound_T in sounds], np.int64)
    fits_n = _fit_their_texts(samples_n, symbols_nL)
    if not fits_n.all():
        log.warning(
            "%d of %d %s utterances are too short for their texts (a character needs 20 ms, and equal ones a pause of "
            "20 ms between), and left out, as %s",
            *(int((~fits_n).sum()), count, kind, kept[int(fits_n.argmin())].file),
        )
    sounds = [sound_T for sound_T, fits in zip(sounds, fits_n.tolist(), strict=True) if fits]
    if not sounds:
        raise TrainError(f"no {kind} utterance is left.")
    samples_n = samples_n[fits_n]
    return ArraySet(
        inputs={"sound": sounds},
        targets={"symbols": symbols_nL[fits_n], "samples": samples_n},
        record=_signal_spec(int(samples_n.max())),
    )


def _fit_their_texts(samples_n: Array, symbols_nL: Array) -> Array:
    needed_n = needed_frames(torch.from_numpy(symbols_nL))
    return (output_frames(torch.from_numpy(samples_n)) >= needed_n).numpy()


def _signal_spec(longest: int) -> RecordSpec:
    # The network's parameter for the lengths is `length_B`.
    shape = (Dim("length_B", max=longest),)
    return RecordSpec((TensorSpec(name="sound", dtype="int16", shape=shape, meaning="an utterance"),))


def _read(utterances: Iterable[Utterance]) -> Iterator[tuple[Utterance, Array]]:
    import soundfile

    for utterance in utterances:
        try:
            # As integers, files of floats would be read without their scale, as zeros.
            sound_T, rate_hz = soundfile.read(utterance.file, dtype="float32")
        except (OSError, soundfile.LibsndfileError) as error:
            raise TrainError(f"{utterance.file} cannot be read as sound: {error}") from None
        if sound_T.ndim > 1:
            raise TrainError(f"{utterance.file} has {sound_T.shape[1]} channels; the network hears one.")
        if rate_hz != RATE_HZ:
            import soxr

            sound_T = soxr.resample(sound_T, rate_hz, RATE_HZ)
        yield utterance, np.clip(np.rint(sound_T * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def _lines(file: Path) -> list[str]:
    try:
        # Not `splitlines`: a text may have other characters that it takes for line ends. Some programs begin a file
        # with a byte order mark.
        return file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except OSError as error:
        raise TrainError(f"{file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise TrainError(f"{file} is no text in UTF-8.") from None


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(name or "" for name in row)


def _check_rows(rows: list[dict[str, Any]], columns: Sequence[str], table: Path) -> None:
    for number, row in enumerate(rows, 1):
        if missing := [column for column in columns if row[column] is None]:
            raise TrainError(f"row {number} of {table} has no {missing[0]}; it ends before.")


def _checked(found: list[Utterance], source: str | Path, what: str) -> list[Utterance]:
    if not found:
        raise TrainError(f"{source} has no utterance: {what} was looked for.")
    missing = [utterance.file for utterance in found if not utterance.file.is_file()]
    if missing:
        raise TrainError(f"{source} names {len(missing)} sounds that are not there, as {missing[0]}.")
    return found
