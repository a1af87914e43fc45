"""A front-end's beam process: a thread hands utterances to it one by one, and starts it again where it dies.

The work is bounded. An utterance for which there is no room, no time or no process gets no better text: its greedy text
is given.
"""

import asyncio
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

from penstock.core.speech.endpoint_beam import EndpointBeam, Redecoded
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.spoken import Word
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.serve.frontend.beam_main import message_of, read_message

log = logging.getLogger(__name__)

# Utterances that wait or are decoded, of all models of one front-end.
MAX_WAITING = 64
# A process that says nothing for so long behind the time of an utterance hangs; and while it loads a model.
GRACE_S, LOAD_S = 2.0, 60.0
# A process that dies within this time of its start is started again after a pause that doubles.
EARLY_DEATH_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 0.1, 10.0


class BeamOutcome(Enum):
    """Outcome of the end of an utterance: decoded, or greedy for want of time, of room or of a process."""

    DECODED = "decoded"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"


# `done(redecoded, outcome)`; None for the greedy text.
BeamDone: TypeAlias = Callable[[Redecoded | None, BeamOutcome], None]


@dataclass(slots=True, eq=False)
class BeamJob:
    """An utterance to decode.

    Args:
        model: Number of its model.
        frames: Its frames.
        hot_words: Of its stream.
        end_s: When the greedy text is given, on `time.monotonic`.
        done: Called once, in the event loop; None once nobody waits.

    Attributes:
        timer: Gives the greedy text when time is over.
    """

    model: int
    frames: UtteranceFrames
    hot_words: Sequence[HotWord]
    end_s: float
    done: BeamDone | None
    timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def finish(self, redecoded: Redecoded | None, outcome: BeamOutcome) -> None:
        """Report what became of it, once."""
        done, self.done = self.done, None
        if self.timer is not None:
            self.timer.cancel()
        if done is not None:
            done(redecoded, outcome)

    def cancel(self) -> None:
        """Drop its result, and skip it if it has not begun."""
        self.done = None
        if self.timer is not None:
            self.timer.cancel()


class _Hung(Exception):
    """The process does not answer in time."""


@final
class BeamProcess:
    """The beam process of one front-end. It is started with the first model that needs it.

    Args:
        command: Starts it.

    Attributes:
        starts: Number of processes started so far.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "penstock.serve.frontend.beam_main")) -> None:
        self._command = command
        self.starts = 0
        self._models: dict[int, dict[str, Any]] = {}
        self._numbers = 0
        self._waiting = 0
        # Orders to load a model by its number, utterances, and None to end.
        self._orders: queue.SimpleQueue[BeamJob | dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # That of the last job.
        self._loop: asyncio.AbstractEventLoop | None = None
        # Between the death of a process and the next one that has its models.
        self._down = self._closed = False

    @property
    def restarts(self) -> int:
        """Number of times that it was started again."""
        return max(0, self.starts - 1)

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def add(self, symbols: Sequence[str], beam: EndpointBeam, language: Path | None, sha256: str) -> int:
        """Load a model; returns its number.

        Args:
            symbols: Labels of its output.
            beam: Its declaration.
            language: The file of its language model; None without one.
            sha256: The hash of that file.
        """
        self._numbers += 1
        plain = asdict(beam) | {"revise": None, "language": None}
        plain["hot_words"] = [[word.text, word.bonus] for word in beam.hot_words]
        order = {
            "type": "load",
            "model": self._numbers,
            "symbols": list(symbols),
            "beam": plain,
            "language": "" if language is None else str(language),
            "sha256": sha256,
        }
        self._models[self._numbers] = order
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="beam", daemon=True)
            self._thread.start()
        return self._numbers

    def remove(self, model: int) -> None:
        """Unload a model."""
        if self._models.pop(model, None) is not None:
            self._orders.put({"type": "unload", "model": model})

    def submit(
        self, model: int, frames: UtteranceFrames, hot_words: Sequence[HotWord], limit_s: float, done: BeamDone
    ) -> BeamJob | None:
        """Decode an utterance; `done` is called in this event loop, within the limit.

        Returns:
            The job; None if there are too many, or no process.
        """
        if self._waiting >= MAX_WAITING or self._down or self._closed or model not in self._models:
            return None
        job = BeamJob(model, frames, hot_words, time.monotonic() + limit_s, done)
        self._loop = loop = asyncio.get_running_loop()
        job.timer = loop.call_later(limit_s, job.finish, None, BeamOutcome.LATE)
        self._waiting += 1
        self._orders.put(job)
        return job

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._orders.put(None)

    def _run(self) -> None:
        """The thread: start the process, hand orders to it, and start it again."""
        pause_s = 0.0
        while not self._closed:
            started_s = time.monotonic()
            try:
                self._serve()
            except (OSError, EOFError, _Hung) as error:
                log.error("the beam process %s; starting it again", str(error) or "died")
            except Exception:  # the thread goes on, whatever the process wrote
                log.exception("the beam process failed; starting it again")
            self._down = not self._closed
            early = time.monotonic() - started_s < EARLY_DEATH_S
            pause_s = min(max(2 * pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S) if early else 0.0
            if not self._closed:
                self._drop_orders()
                time.sleep(pause_s)

    def _serve(self) -> None:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        assert process.stdin is not None, process
        # A process that hangs reads nothing either.
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self.starts += 1
        try:
            loaded = {number: self._load(process, order) for number, order in list(self._models.items())}
            self._down = False
            while (order := self._orders.get()) is not None:
                if isinstance(order, BeamJob):
                    self._decode(process, order)
                elif order["type"] == "unload":
                    _answer(process, order, (), LOAD_S)
                elif order["model"] in self._models and order["model"] not in loaded:
                    self._load(process, order)
        finally:
            self._process = None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _load(self, process: "subprocess.Popen[bytes]", order: dict[str, Any]) -> None:
        answer = _answer(process, order, (), LOAD_S)
        if error := answer.get("error"):
            log.error("the beam of a model cannot be used, its text stays greedy: %s", error)
            self._models.pop(order["model"], None)

    def _decode(self, process: "subprocess.Popen[bytes]", job: BeamJob) -> None:
        left_s = job.end_s - time.monotonic()
        outcome, found = BeamOutcome.FAILED, None
        try:
            if job.done is None or left_s <= 0:
                outcome = BeamOutcome.LATE
                return
            frames = job.frames
            order = {
                "type": "decode",
                "model": job.model,
                "limit_s": left_s,
                "shape": frames.log_probability_TV.shape,
                "hot_words": [[word.text, word.bonus] for word in job.hot_words],
            }
            arrays = frames.log_probability_TV.tobytes(), frames.frame_T.tobytes()
            answer = _answer(process, order, arrays, left_s + GRACE_S)
            if "late" in answer:
                outcome = BeamOutcome.LATE
            elif "error" in answer:
                log.error("an utterance was not decoded: %s", answer["error"])
            else:
                words = tuple(
                    Word(text=text, start_s=start_s, end_s=end_s, probability=probability)
                    for text, start_s, end_s, probability in answer["words"]
                )
                outcome, found = BeamOutcome.DECODED, Redecoded(text=answer["text"], words=words)
        finally:
            self._report(job, found, outcome)

    def _drop_orders(self) -> None:
        """Give the greedy text to all that wait: the next process has the models anew."""
        with suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    self._orders.put(None)
                    return
                if isinstance(order, BeamJob):
                    self._report(order, None, BeamOutcome.FAILED)

    def _report(self, job: BeamJob, redecoded: Redecoded | None, outcome: BeamOutcome) -> None:
        assert self._loop is not None, job
        # The event loop may be closed by now.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finished, job, redecoded, outcome)

    def _finished(self, job: BeamJob, redecoded: Redecoded | None, outcome: BeamOutcome) -> None:
        self._waiting -= 1
        job.finish(redecoded, outcome)


def _answer(
    process: "subprocess.Popen[bytes]", order: dict[str, Any], arrays: Sequence[bytes], limit_s: float
) -> dict[str, Any]:
    assert process.stdin is not None, process
    assert process.stdout is not None, process
    end_s = time.monotonic() + limit_s
    stdin, rest = process.stdin.fileno(), memoryview(message_of(order, *arrays))
    while rest:
        _wait(stdin, select.POLLOUT, end_s)
        rest = rest[os.write(stdin, rest) :]
    return read_message(partial(_read, process.stdout.fileno(), end_s))[0]


def _read(pipe: int, end_s: float, size: int) -> bytes:
    """Read so many bytes; fewer where the other end is gone."""
    data = b""
    while len(data) < size:
        _wait(pipe, select.POLLIN, end_s)
        part = os.read(pipe, size - len(data))
        if not part:
            break
        data += part
    return data


def _wait(pipe: int, event: int, end_s: float) -> None:
    """Wait until a pipe can be read or written; that fails where its other end is gone.

    `select.select` takes no descriptor above 1,023, and a front-end has more connections than that.

    Raises:
        _Hung: It cannot, at the end of the time.
    """
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, end_s - time.monotonic()) * 1e3):
        raise _Hung("reads nothing" if event == select.POLLOUT else "does not answer")


@final
@dataclass(frozen=True, slots=True, eq=False)
class BeamModel:
    """A model in the beam process.

    Args:
        process: The process.
        number: Its number there.
        beam: Its declaration.
    """

    process: BeamProcess
    number: int
    beam: EndpointBeam
