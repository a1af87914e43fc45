"""A word every 400 ms of live sound, from hardly any network: for measuring what protocols cost."""

from typing import Any

from penstock import Application, Live, Speech, TensorSpec, Word

RATE_HZ = 16_000
CHUNK = 1_280  # 80 ms
BANDS = 16
FRAME_S = 0.04
FRAMES_A_WORD = 10


def network():
    """Sixteen bands every 40 ms."""
    from penstock.nn import LogMel, Sequential

    return Sequential(LogMel(RATE_HZ, window_ms=40, hop_ms=40, bands=BANDS))


def events(output_U: Any, memory: Any, last: bool) -> tuple[Any, Any]:
    """The loudest band of every tenth frame, as a word."""
    frames, words = memory or 0, []
    for bands in output_U:
        frames += 1
        if frames % FRAMES_A_WORD == 0:
            end_s = frames * FRAME_S
            words.append({"word": f"w{int(bands.argmax())}", "start_s": end_s - 0.2, "end_s": end_s})
    return {"words": words} if words else None, frames


def speech(event: Any) -> Speech:
    """The words of an event."""
    return Speech(
        words=[Word(text=word["word"], start_s=word["start_s"], end_s=word["end_s"]) for word in event["words"]]
    )


app = Application(
    name="mutter",
    description="A word every 400 ms of live sound.",
    input=TensorSpec(
        dtype="int16", shape=(CHUNK,), meaning="one channel of sound", units="int16 PCM at 16 kHz", name="sound"
    ),
    output=TensorSpec(dtype="float32", shape=(2, BANDS), meaning="loudness of each band, every 40 ms", name="bands"),
    live=Live(rate_hz=RATE_HZ, events=events, speech=speech),
    chunks=8,
    model=":network",
)
