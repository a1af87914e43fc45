"""Speech in live sound as text: characters by CTC, words with their times, and the ends of utterances."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.apps.speech.transcript import revised, spoken, transcribed
from penstock.core.application import Application
from penstock.core.spec import TensorSpec
from penstock.core.speech.endpoint_beam import EndpointBeam
from penstock.core.speech.ngram import NGram
from penstock.core.streams.live import Live

RATE_HZ = 16_000
# 80 ms.
CHUNK = 1_280
# What OpenAI's clients send at most: 13 minutes of 16-bit samples.
MAX_BODY_BYTES = 25 << 20
# Output frames of a chunk, plus those held back by the lookahead, which follow at the end of a stream.
FRAME_S = 0.02
LOOKAHEAD = 12
FRAMES = 4 + LOOKAHEAD
# CTC's blank comes first.
SYMBOLS = ("-", " ", "'", *"abcdefghijklmnopqrstuvwxyz")
BLANK, SPACE = 0, 1

app = Application(
    name="speech",
    description="Recognises speech in live sound: text as it is spoken, words with their times, ends of utterances.",
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
        meaning="log-probability of each symbol in every 20 ms; '-' is CTC's blank",
        units="log-probability",
        labels=SYMBOLS,
    ),
    live=Live(
        rate_hz=RATE_HZ,
        events=partial(transcribed, symbols=SYMBOLS, frame_s=FRAME_S),
        speech=spoken,
        frame_s=FRAME_S,
    ),
    chunks=8,
    max_body_bytes=MAX_BODY_BYTES,
    model="penstock.apps.speech.model:tiny",
    recipe="penstock.apps.speech.recipe:recipe",
)
# 5 layers of 512 and of 2560 units, for a GPU, and sentences of many voices.
_SENTENCES = "penstock.apps.speech.sentences_recipe:recipe"
middle = replace(app, name="speech-512", model="penstock.apps.speech.model:middle", recipe=_SENTENCES)
large = replace(app, name="speech-2560", model="penstock.apps.speech.model:large", recipe=_SENTENCES)


def with_beam(application: Application, language: Callable[[], NGram] | str | None) -> Application:
    """The same recogniser, with each utterance decoded again at its end.

    Args:
        application: One of those above, or made of one.
        language: Makes its language model when the bundle is written, or its import path; None for hot words alone.
    """
    assert application.live is not None, application.name
    # Weights with the fewest errors on validation voices, see decision 080.
    beam = EndpointBeam(
        frame_s=FRAME_S, revise=revised, language=language, language_weight=0.6, word_bonus=1.0, hot_bonus=4.0
    )
    return replace(application, live=replace(application.live, beam=beam))


# Its language model has read the digits and commands of the default recipe.
beamed = with_beam(replace(app, name="speech-beam"), "penstock.apps.speech.language:words_language")
