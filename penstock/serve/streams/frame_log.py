"""The output frames of the utterance that is open, for a second decoding at its end."""

from typing import final

import numpy as np

from penstock.core.spec import Array
from penstock.core.speech.utterance_decoder import BLANK_LOG_PROBABILITY, UtteranceFrames, sure_blank

# U frames of an output, V symbols

# Frames kept of one utterance, and their bytes; a longer one is not decoded again.
MAX_FRAMES, MAX_BYTES = 1_500, 1 << 20
LEAST = -30_000.0


@final
class FrameLog:
    """The frames since the last utterance ended; of those that are surely blank, one stands for all in a row.

    Args:
        symbols: Number of the symbols.
    """

    def __init__(self, symbols: int) -> None:
        self._symbols = symbols
        self._max_frames = min(MAX_FRAMES, MAX_BYTES // (2 * symbols))
        self._blank_V = sure_blank(symbols)
        self.clear()

    def clear(self) -> None:
        """Begin anew: the signal does."""
        self._count = 0
        self._blank = False
        # The likeliest symbol of the last frame of the utterance before; 0 for a blank.
        self._carried = 0
        # Number of the frame behind those that were dropped since there were too many.
        self._dropped = 0
        self._drop()

    def add(self, output: Array) -> None:
        """Add the frames of a result, flat."""
        frames_UV = output.reshape(-1, self._symbols)
        count = len(frames_UV)
        if not count:
            return
        sure_U = frames_UV[:, 0] >= BLANK_LOG_PROBABILITY
        # The common case: silence goes on.
        if not (self._blank and sure_U.all()):
            before_U = np.concatenate(((self._blank,), sure_U[:-1]))
            kept_U = np.flatnonzero(~(sure_U & before_U))
            self._keep(frames_UV[kept_U], sure_U[kept_U], kept_U + self._count)
            self._blank = bool(sure_U[-1])
        self._count += count

    def take(self, until: int | None = None) -> UtteranceFrames | None:
        """Take the frames of an utterance that has ended; those behind it stay for the next.

        Args:
            until: Number of the frame that is not its own any more; None for all frames.

        Returns:
            Its frames; None if there were none, or too many.
        """
        if not self._numbers:
            return None
        overlong = self._overlong
        rows_TV, frame_T = np.concatenate(self._rows), np.concatenate(self._numbers)
        split = len(frame_T) if until is None else int(np.searchsorted(frame_T, until))
        # A symbol that goes on from the utterance before is in that one's text.
        best_T = rows_TV.argmax(1)
        others = np.flatnonzero(best_T != self._carried)
        if self._carried:
            rows_TV[: others[0] if others.size else len(rows_TV)] = self._blank_V
        self._carried = int(best_T[split - 1]) if split else self._carried
        self._drop()
        if split < len(frame_T):
            self._rows, self._numbers = [rows_TV[split:].copy()], [frame_T[split:].copy()]
            self._kept = len(frame_T) - split
            self._overlong = self._kept > self._max_frames or (until is not None and until < self._dropped)
        elif self._blank:
            # The blank goes on, and stands before the next utterance, too.
            self._blank = False
        return UtteranceFrames(rows_TV[:split], frame_T[:split]) if split and not overlong else None

    def _keep(self, rows_TV: Array, sure_T: Array, frame_T: Array) -> None:
        self._kept += len(rows_TV)
        if self._overlong or self._kept > self._max_frames:
            # Of an overlong utterance the last result alone is kept: the next one may begin in it.
            if self._rows:
                self._carried = int(self._rows[-1][-1].argmax())
                self._dropped = int(self._numbers[-1][-1]) + 1
            self._overlong = True
            self._rows, self._numbers = [], []
        # Half precision has no larger numbers.
        rows_TV = np.maximum(rows_TV, LEAST).astype(np.float16)
        rows_TV[sure_T] = self._blank_V
        self._rows.append(rows_TV)
        self._numbers.append(frame_T.astype(np.int32))

    def _drop(self) -> None:
        self._rows: list[Array] = []
        self._numbers: list[Array] = []
        self._kept = 0
        self._overlong = False
