"""Spoken digits and commands, recognised in live sound."""

import math
from typing import Any

from penstock.core.application import Application
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.spoken import Speech, Word
from penstock.core.streams.live import Live

# U frames of an output

RATE_HZ = 16_000
# 80 ms.
CHUNK = 1_280
# Output frames of a chunk, plus those held back by the lookahead, which follow at the end of a stream.
FRAME_S = 0.04
LOOKAHEAD = 2
FRAMES = 2 + LOOKAHEAD
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
WORDS = DIGITS + COMMANDS
# CTC's blank comes first.
SYMBOLS = ("-", *WORDS)
BLANK = 0


def events(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
    """The words that begin in these frames.

    Repeated symbols count once and blanks not at all: Graves et al. 2006, "Connectionist Temporal Classification",
    section 3.1. A word's probability is that of its first frame, its time the end of that frame in the signal.

    Args:
        output_U: `[U, 21]`, log-probabilities of the symbols.
        memory: The last frame's symbol and the number of frames so far, `[symbol, frames]`; None at first.
        last: Whether the stream ends here; not used.
    """
    before, frames = memory or (BLANK, 0)
    symbols = output_U.argmax(1).tolist()
    # A fast path, because most chunks have no word and this runs for every chunk of every stream.
    if not any(symbols):
        return None, [BLANK if symbols else before, frames + len(symbols)]
    words: list[dict[str, Any]] = []
    for symbol, log_probability_V in zip(symbols, output_U, strict=True):
        frames += 1
        if symbol not in (before, BLANK):
            words.append(
                {
                    "word": SYMBOLS[symbol],
                    "probability": round(math.exp(log_probability_V[symbol]), 4),
                    "time_s": round(frames * FRAME_S, 2),
                }
            )
        before = symbol
    return {"words": words} if words else None, [before, frames]


def speech(event: Any) -> Speech:
    """The words of an event. Their ends are not known: each has the span of the frame that recognised it."""
    return Speech(
        words=[
            Word(
                text=word["word"],
                start_s=round(word["time_s"] - FRAME_S, 2),
                end_s=word["time_s"],
                probability=word["probability"],
            )
            for word in event["words"]
        ]
    )


app = Application(
    name="keywords",
    description="Recognises spoken digits and commands in live sound.",
    input=TensorSpec(
        name="sound",
        dtype="int16",
        shape=(CHUNK,),
        meaning="80 ms of sound, one channel",
        units="int16 PCM at 16 kHz",
    ),
    output=TensorSpec(
        name="symbols",
        dtype="float32",
        shape=(FRAMES, len(SYMBOLS)),
        meaning="log-probability of each symbol in every 40 ms; '-' is CTC's blank",
        units="log-probability",
        labels=SYMBOLS,
    ),
    live=Live(rate_hz=RATE_HZ, events=events, speech=speech, frame_s=FRAME_S),
    chunks=8,
    model="penstock.apps.keywords.model:keywords_net",
    recipe="penstock.apps.keywords.recipe:recipe",
)
