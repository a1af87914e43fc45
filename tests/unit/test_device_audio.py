"""SoundSource for live packs: files, pipes and microphones, cut into chunks and heard in their order."""

import io
import json
import wave
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import SourceError
from penstock.core.speech.sound import sound_decoder
from penstock.device.captions import chunk_json, chunk_line
from penstock.device.listen import REST_FRAMES, ListenRun, Speller, is_spelled, new_labels
from penstock.device.pack_engine import LivePackEngine
from penstock.device.sound_source import (
    MicrophoneSource,
    SoundChunk,
    SoundSource,
    WavSource,
    max_waiting_chunks,
)
from penstock.device.sources import open_sound
from tests.support.packs import CHUNK, RATE_HZ, loud_pack


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LivePackEngine:
    return LivePackEngine(loud_pack(tmp_path_factory.mktemp("pack")))


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, samples).astype(np.int16)


def wav(file: Path, samples: np.ndarray, rate_hz: int = RATE_HZ, channels: int = 1) -> Path:
    with wave.open(str(file), "wb") as sink:
        sink.setnchannels(channels)
        sink.setsampwidth(2)
        sink.setframerate(rate_hz)
        sink.writeframes(samples.astype("<i2").tobytes())
    return file


def chunks_of(sound: SoundSource) -> list[SoundChunk]:
    with closing(sound):
        return list(sound.items())


def bursts() -> np.ndarray:
    """Loud from 0.2 to 0.4 s and from 0.7 to 0.75 s, of 1.03 s."""
    signal = np.zeros(int(1.03 * RATE_HZ), np.int16)
    signal[3200:6400] = signal[11200:12000] = 8000
    return signal


@pytest.mark.parametrize("samples", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 7777])
def test_chunks_are_the_signal(tmp_path: Path, samples: int) -> None:
    signal = noise(samples)
    chunks = chunks_of(WavSource(wav(tmp_path / "a.wav", signal), RATE_HZ, CHUNK))
    np.testing.assert_array_equal(np.concatenate([chunk.samples_T for chunk in chunks]), signal)
    assert [len(chunk.samples_T) for chunk in chunks[:-1]] == [CHUNK] * (len(chunks) - 1)
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].time_s == pytest.approx(samples / RATE_HZ)


def test_another_rate_is_resampled_as_the_server_does(tmp_path: Path) -> None:
    file = wav(tmp_path / "a.wav", noise(44_100), 44_100)
    decoder = sound_decoder("wav", None, RATE_HZ)
    served = np.concatenate([decoder.feed(file.read_bytes()), decoder.flush()])
    heard = np.concatenate([chunk.samples_T for chunk in chunks_of(WavSource(file, RATE_HZ, CHUNK))])
    np.testing.assert_array_equal(heard, served)


def test_what_is_told_of_a_file(engine: LivePackEngine, tmp_path: Path) -> None:
    sound = WavSource(wav(tmp_path / "a.wav", bursts()), RATE_HZ, CHUNK)
    with ListenRun(engine, sound, real_time=False) as run:
        heard = list(run)
    assert [line for line in (chunk_line(engine.pack.outputs[0], chunk) for chunk in heard) if line] == [
        "    0.30 s  loud",
        "    0.80 s  loud",
    ]
    np.testing.assert_array_equal(
        np.concatenate([chunk.output_U for chunk in heard]), engine.whole(bursts()), strict=True
    )
    fields = json.loads(chunk_json(heard[2]))
    assert (fields["chunk"], fields["time_s"], fields["labels"], fields["frames"]) == (2, 0.3, ["loud"], 2)


def test_a_file_is_played_in_real_time(engine: LivePackEngine, tmp_path: Path) -> None:
    with ListenRun(engine, WavSource(wav(tmp_path / "a.wav", bursts()), RATE_HZ, CHUNK)) as run:
        heard = list(run)
    assert run.seconds >= 0.9
    assert len(heard) + run.report().dropped == 11
    assert all(chunk.age_s is not None and chunk.age_s >= chunk.model_s for chunk in heard)


def test_what_stands_on_the_standard_input_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = io.BytesIO(wav(tmp_path / "a.wav", noise(5000)).read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data))
    sound = open_sound("-", RATE_HZ, CHUNK)
    heard = np.concatenate([chunk.samples_T for chunk in sound.items()])
    np.testing.assert_array_equal(heard, noise(5000))
    sound.close()
    assert not data.closed


@pytest.mark.parametrize(
    ("labels", "frames", "told"),
    [
        (("-", "a", "b"), "-aa-ab-bb", "aabb"),
        (("-", "a", "b"), "---", ""),
        (("a", "b"), "aabba", "aba"),
        # Only where it comes first, the dash is a blank.
        (("a", "-"), "a-a", "a-a"),
    ],
)
def test_of_equal_labels_behind_one_another_one_is_told(labels: tuple[str, ...], frames: str, told: str) -> None:
    output_U = np.eye(len(labels))[[labels.index(label) for label in frames]]
    assert "".join(new_labels(labels, output_U, None)[0]) == told
    # However it is cut.
    for cut in range(len(frames) + 1):
        first, before = new_labels(labels, output_U[:cut], None)
        second, _ = new_labels(labels, output_U[cut:], before)
        assert "".join(first + second) == told


@pytest.mark.parametrize(
    ("labels", "spelled"),
    [(("-", " ", "a", "b"), True), ((" ", "-", "a"), False), (("-", "a", "b"), False), (("-", " ", "yes"), False)],
)
def test_labels_of_a_blank_a_space_and_characters_are_spelled(labels: tuple[str, ...], spelled: bool) -> None:
    assert is_spelled(labels) == spelled


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 100])
def test_characters_are_joined_into_words(frames: int) -> None:
    labels, speller, before = ("-", " ", "n", "o"), Speller(), None
    # Two words, a rest that ends the second, and a third that ends with the sound.
    text = "-nn-o- -o-n-" + "-" * REST_FRAMES + "n--o"
    words: list[str] = []
    for start in range(0, len(text), frames):
        part = text[start : start + frames]
        output_U = np.eye(len(labels), dtype=np.float32)[[labels.index(each) for each in part]]
        new, before = new_labels(labels, output_U, before)
        words += speller.take(new, len(part), start + frames >= len(text))
        if frames == 1 and start == len("-nn-o- -o-n-") + REST_FRAMES - 1:
            assert words == ["no", "on"]
    assert words[0] == "no"
    assert "".join(words) == "noonno"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"a\.wav cannot be read \(No such file"),
        (b"this is a letter", "cannot be decoded: The stream is no WAV"),
        (b"", "cannot be decoded: The WAV ended before its header did"),
        (b"RIFF\0\0\0\0WAVE", "cannot be decoded: The WAV ended before its header did"),
    ],
)
def test_what_is_no_sound_is_refused_in_a_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(SourceError, match=sentence):
        chunks_of(open_sound(str(tmp_path / "a.wav"), RATE_HZ, CHUNK))


def test_a_microphone_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError, match=r"there is no microphone hw:31 .*plug one in, or name another"):
        open_sound("mic:hw:31", RATE_HZ, CHUNK)
    assert capfd.readouterr().err == "", "ALSA talked"


def test_two_seconds_of_sound_may_wait() -> None:
    assert (max_waiting_chunks(16_000, 1_280), max_waiting_chunks(16_000, 160_000)) == (25, 2)


def test_a_microphone_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ALSA reads a file as if it were a card.
    stereo = np.repeat(noise(4_800), 2).astype("<i2")
    (tmp_path / "heard.raw").write_bytes(stereo.tobytes())
    (tmp_path / "asound.conf").write_text(
        "pcm.nothing { type null }\n"
        'pcm.card { type file; slave.pcm "nothing"; file "/dev/null"; format "raw"; '
        f'infile "{tmp_path}/heard.raw" }}\n'
    )
    monkeypatch.setenv("ALSA_CONFIG_PATH", str(tmp_path / "asound.conf"))
    microphone = MicrophoneSource("card", 48_000, 480)
    heard: list[np.ndarray] = []
    for chunk in microphone.items():
        heard.append(chunk.samples_T)
        if len(heard) == 5:
            break
    microphone.close()
    np.testing.assert_array_equal(np.concatenate(heard), noise(4_800)[:2_400])
