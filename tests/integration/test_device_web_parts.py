"""The parts of the offline app by themselves: its sound, and its arithmetic beside that of Python."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from playwright.sync_api import Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from tests.support.device import LISTENED_CHUNK, LISTENED_HZ, WEB, write_live_pack, write_wav
from tests.support.device_fixtures import browser_fixture, device_fixture, host_fixture
from tests.support.device_page import Device

DATA = Path(__file__).parents[1] / "data"
LOUD_S = (1.5, 2.5, 3.2)


def write_tones(file: Path) -> None:
    """Write three loud tones."""
    time_s = np.arange(5 * 48_000) / 48_000
    loud = sum((time_s >= begin) & (time_s < begin + 0.3) for begin in LOUD_S)
    write_wav(file, 12_000 * loud * np.sin(2 * np.pi * 440 * time_s), 48_000)


@pytest.fixture(scope="module")
def pack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_live_pack(tmp_path_factory.mktemp("pack") / "pack")


browser = browser_fixture(microphone=write_tones)
host = host_fixture()
device = device_fixture(installed=False)


@pytest.fixture(scope="module")
def page(device: Device, host: CountingHost) -> Page:
    return device.installed(host)


@pytest.mark.thorough
def test_the_microphone_becomes_words_with_the_network_gone(device: Device, host: CountingHost) -> None:
    device.installed(host).close()
    # Requests that the closed page still had open are served by then.
    host.stop()
    served = len(host.sent)
    page = device.open(host)
    expect(page.locator("#words li")).to_have_count(len(LOUD_S), timeout=20_000)
    assert {text.split()[0] for text in page.locator("#words li").all_inner_texts()} == {"loud"}
    expect(page.locator("#word-big")).to_have_text("loud")
    expect(page.locator("#listen-state")).to_have_text("listening")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#listen-state")).to_have_text("not listening")
    assert len(host.sent) == served
    page.close()
    host.start()


@pytest.mark.thorough
def test_a_microphone_that_is_denied_or_gone_is_said(page: Page) -> None:
    page.get_by_role("button", name="Stop").click()
    page.evaluate("void (window.allowed = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices))")
    for name, sentence in {"NotAllowedError": "may not use the microphone", "NotFoundError": "no microphone"}.items():
        page.evaluate(
            """name => void (navigator.mediaDevices.getUserMedia = async () => {
                throw new DOMException("a reason", name);
            })""",
            name,
        )
        page.get_by_role("button", name="Start listening").click()
        expect(page.locator("#listen-state")).to_contain_text(sentence)
    page.evaluate(
        "void (navigator.mediaDevices.getUserMedia = async (wishes) => (window.media = await allowed(wishes)))"
    )
    page.get_by_role("button", name="Start listening").click()
    expect(page.locator("#listen-state")).to_have_text("listening")
    page.evaluate("media.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    expect(page.locator("#listen-state")).to_have_text("The microphone is gone.")


def test_a_streams_state_goes_from_chunk_to_chunk_as_in_python(page: Page, host: CountingHost) -> None:
    import onnxruntime

    signal = (3000 * np.random.default_rng(4).standard_normal(LISTENED_CHUNK * 4 + 100)).astype(np.int16)
    there = page.evaluate(
        """async ({ signal, chunk }) => {
            const { Engine } = await import("./engine.js");
            const engine = new Engine(await (await fetch("../pack.json")).json());
            await engine.open();
            const said = [];
            for (let again = 0; again < 2; again++) {
                for (let at = 0; at < signal.length; at += chunk) {
                    const samples = new Int16Array(chunk);
                    samples.set(signal.slice(at, at + chunk));
                    const length = Math.min(chunk, signal.length - at);
                    const { rows, values } = await engine.sound(samples, length, at + chunk >= signal.length);
                    said.push(...values.slice(0, 2 * rows));
                }
            }
            engine.close();
            return said;
        }""",
        {"signal": signal.tolist(), "chunk": LISTENED_CHUNK},
    )
    session = onnxruntime.InferenceSession(host.folder / "model.onnx")
    state, here = np.array([100], np.float32), list[float]()
    for begin in range(0, len(signal), LISTENED_CHUNK):
        samples = signal[begin : begin + LISTENED_CHUNK]
        feeds = {
            "sound": np.pad(samples, (0, LISTENED_CHUNK - len(samples)))[None],
            "length": np.array([len(samples)]),
            "last": np.array([begin + LISTENED_CHUNK >= len(signal)]),
            "state_0": state,
        }
        symbols, _, state = map(np.asarray, session.run(None, feeds))
        here += symbols.ravel().tolist()
    np.testing.assert_allclose(there, here + here, rtol=0, atol=1e-4)


@pytest.mark.parametrize("from_hz", [48_000, 44_100, LISTENED_HZ, 4_000])
def test_sound_at_another_rate_is_that_of_soxr(page: Page, from_hz: int) -> None:
    rng = np.random.default_rng(from_hz)
    time_s = np.arange(from_hz) / from_hz
    tones_hz = rng.uniform(50, 0.8 * min(from_hz, LISTENED_HZ) / 2, 6)
    sound = sum(
        np.sin(2 * np.pi * hz * time_s + phase) for hz, phase in zip(tones_hz, rng.uniform(0, 6, 6), strict=True)
    )
    # What cannot be said at the lower rate must not be heard as something else.
    sound = np.asarray(sound / 8 + (0.1 * np.sin(2 * np.pi * 5_500 * time_s) if from_hz > 11_000 else 0), np.float32)
    there = page.evaluate(
        """async ({ sound, from, to }) => {
            const { Resampler } = await import("./resample.js");
            const resampler = new Resampler(from, to);
            const made = [];
            for (let at = 0; at < sound.length; at += 777) {
                const piece = Float32Array.from(sound.slice(at, at + 777));
                made.push(...resampler.take(piece, at + 777 >= sound.length));
            }
            return made;
        }""",
        {"sound": sound.tolist(), "from": from_hz, "to": LISTENED_HZ},
    )
    here = soxr.resample(sound, from_hz, LISTENED_HZ)
    assert abs(len(there) - len(here)) <= 1
    inner = slice(200, -200)  # where no edge is near
    np.testing.assert_allclose(np.array(there)[: len(here)][inner], here[: len(there)][inner], rtol=0, atol=2e-3)


def test_recognition_is_that_of_python(page: Page) -> None:
    for example in json.loads((DATA / "recognition.json").read_text()):
        cases = example["cases"]
        said = page.evaluate(
            """async ({ recognition, cases }) => {
                const { Recognition } = await import("./recognition.js");
                const made = new Recognition(recognition);
                return cases.map(({ probabilities }) => made.answer(probabilities));
            }""",
            {"recognition": example["recognition"], "cases": cases},
        )
        assert said == [case["answer"] for case in cases], example["name"]


def test_smoothing_is_that_of_python(page: Page) -> None:
    for example in json.loads((DATA / "smoothing.json").read_text()):
        said = page.evaluate(
            """async ({ recognition, frames }) => {
                const { Recognition } = await import("./recognition.js");
                const { Smoothing } = await import("./smoothing.js");
                const smoothing = new Smoothing(new Recognition(recognition));
                return frames.map(({ probabilities, time_s }) => {
                    const shown = smoothing.take(probabilities, time_s);
                    return { shown, mean: Array.from(smoothing.mean) };
                });
            }""",
            example,
        )
        for frame, there in zip(example["frames"], said, strict=True):
            # A power of two may differ in its last bit.
            np.testing.assert_allclose(there["mean"], frame["mean"], rtol=0, atol=1e-14)
            assert _rounded(there["shown"]) == _rounded(frame["shown"])


def _rounded(shown: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(shown), parse_float=lambda text: round(float(text), 12))


def test_the_files_of_others_are_those_that_are_written_down() -> None:
    text = (Path(__file__).parents[2] / "docs" / "dependencies.md").read_text()
    written = dict(re.findall(r"\| `([^`]+)` \| `([0-9a-f]{64})` \|", text))
    assert written == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted((WEB / "vendor").iterdir())
    }


def test_no_file_is_large_and_nothing_comes_from_elsewhere() -> None:
    for file in WEB.rglob("*"):
        if file.is_file():
            assert file.stat().st_size < 5_000_000, file
        if file.suffix in (".js", ".html", ".css", ".webmanifest"):
            # The namespace of SVG is a name, which nobody fetches.
            text = file.read_text().replace('"http://www.w3.org/2000/svg"', "")
            addresses = re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]+", text)
            assert addresses == [], file
