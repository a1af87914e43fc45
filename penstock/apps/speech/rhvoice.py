"""Speak texts with RHVoice's library: `python rhvoice.py LIBRARY VOICE FOLDER`, with JSON on the standard input.

The input is a list of `[rate, pitch, text]`, with factors of the voice's own rate and pitch. FOLDER/0.wav and so on are
the sounds at 16 kHz; a text that the voice does not speak has none.

RHVoice's own program speaks one text. It takes 60 ms to load a voice, and a short sentence takes 20 ms. This one
imports nothing of Penstock, so that it starts fast, and is a process of its own, so that a crash of the library ends
no other.
"""

import ctypes
import json
import sys
import wave
from pathlib import Path

# The C types of RHVoice.h, of version 1.8
SetSampleRate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
PlaySpeech = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)
UNUSED = ("process_mark", "word_starts", "word_ends", "sentence_starts", "sentence_ends", "play_audio", "done")


class Callbacks(ctypes.Structure):
    """RHVoice_callbacks: the sound comes in parts."""

    _fields_ = (
        ("set_sample_rate", SetSampleRate),
        ("play_speech", PlaySpeech),
        *((name, ctypes.c_void_p) for name in UNUSED),
    )


class InitParams(ctypes.Structure):
    """RHVoice_init_params."""

    _fields_ = (
        ("data_path", ctypes.c_char_p),
        ("config_path", ctypes.c_char_p),
        ("resource_paths", ctypes.c_void_p),
        ("callbacks", Callbacks),
        ("options", ctypes.c_uint),
    )


class VoiceInfo(ctypes.Structure):
    """RHVoice_voice_info."""

    _fields_ = (
        ("language", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("gender", ctypes.c_int),
        ("country", ctypes.c_char_p),
    )


class SynthParams(ctypes.Structure):
    """RHVoice_synth_params: the absolute values are 0 for the voice's own; the relative ones are factors."""

    _fields_ = (
        ("voice_profile", ctypes.c_char_p),
        ("absolute_rate", ctypes.c_double),
        ("absolute_pitch", ctypes.c_double),
        ("absolute_volume", ctypes.c_double),
        ("relative_rate", ctypes.c_double),
        ("relative_pitch", ctypes.c_double),
        ("relative_volume", ctypes.c_double),
        ("punctuation_mode", ctypes.c_int),
        ("punctuation_list", ctypes.c_char_p),
        ("capitals_mode", ctypes.c_int),
        ("flags", ctypes.c_int),
    )


def load(name: str) -> ctypes.CDLL:
    """Load the library and declare the functions that are used."""
    library = ctypes.CDLL(name)
    pointer, text, integer, unsigned = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint
    params = ctypes.POINTER(SynthParams)
    for function, result, *arguments in (
        (library.RHVoice_new_tts_engine, pointer, ctypes.POINTER(InitParams)),
        (library.RHVoice_get_number_of_voices, unsigned, pointer),
        (library.RHVoice_get_voices, ctypes.POINTER(VoiceInfo), pointer),
        (library.RHVoice_new_message, pointer, pointer, text, unsigned, integer, params, pointer),
        (library.RHVoice_speak, integer, pointer),
        (library.RHVoice_delete_message, None, pointer),
    ):
        function.restype, function.argtypes = result, arguments
    return library


def main(library_name: str, voice: str, folder: Path) -> None:
    """Speak the texts of the standard input.

    Raises:
        SystemExit: RHVoice does not start, or has no such voice: it would speak with another one.
    """
    library = load(library_name)
    rate_hz = 0
    parts: list[bytes] = []

    def set_sample_rate(given_hz: int, _: object) -> int:
        nonlocal rate_hz
        rate_hz = given_hz
        return 1

    def play_speech(samples: int, count: int, _: object) -> int:
        parts.append(ctypes.string_at(samples, 2 * count))
        return 1

    # Of the three qualities, this is the one of 16 kHz.
    (folder / "RHVoice.conf").write_text("quality=min\n")
    callbacks = Callbacks(SetSampleRate(set_sample_rate), PlaySpeech(play_speech))
    engine = library.RHVoice_new_tts_engine(InitParams(config_path=str(folder).encode(), callbacks=callbacks))
    if not engine:
        sys.exit("RHVoice does not start: install its voices.")
    voices = library.RHVoice_get_voices(engine)
    names = [voices[at].name.decode().lower() for at in range(library.RHVoice_get_number_of_voices(engine))]
    if voice not in names:
        sys.exit(f"RHVoice has no voice {voice}, but {', '.join(names)}.")
    for number, (rate, pitch, text) in enumerate(json.load(sys.stdin)):
        parts.clear()
        said = text.encode()
        params = SynthParams(voice_profile=voice.encode(), relative_rate=rate, relative_pitch=pitch, relative_volume=1)
        message = library.RHVoice_new_message(engine, said, len(said), 0, params, None)
        if message:
            library.RHVoice_speak(message)
            library.RHVoice_delete_message(message)
        if parts:
            with wave.open(str(folder / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, rate_hz, 0, "NONE", ""))
                file.writeframes(b"".join(parts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
