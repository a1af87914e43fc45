"""The declaration of an endpoint beam, its language model in the bundle, and hints of clients as hot words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import Application, EndpointBeam, HotWord, Live, Speech, TensorSpec
from penstock.core.bundles.bundle import LANGUAGE, read_bundle
from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.speech.ngram import NGram
from penstock.serve.frontend.beam_main import made_decoder
from penstock.serve.transcription.hinted_words import boosted, prompted
from penstock.serve.transcription.listen_options import ListenOptions
from tests.support.letters import letters_bundle

SYMBOLS = ("-", " ", "a")


def declared(beam: Any, labels: tuple[str, ...] = SYMBOLS) -> Application:
    return Application(
        name="letters",
        input=TensorSpec(dtype="int16", shape=(8,), meaning="sound", name="sound"),
        output=TensorSpec(dtype="float32", shape=(8, 3), meaning="symbols", name="symbols", labels=labels),
        live=Live(rate_hz=1_000, speech=lambda event: Speech(), beam=beam),
        chunks=2,
        model="nobody:asks",
    )


def test_a_beam_needs_characters_and_speech() -> None:
    assert declared(EndpointBeam(frame_s=0.02)).live is not None
    for labels in ((), ("-", "a", "b")):
        with pytest.raises(ApplicationError, match="a beam needs the log-probabilities of symbols"):
            declared(EndpointBeam(frame_s=0.02), labels)
    with pytest.raises(ApplicationError, match="no EndpointBeam, or no speech"):
        declared("wide")
    with pytest.raises(ApplicationError, match="no EndpointBeam, or no speech"):
        Live(rate_hz=1_000, beam=EndpointBeam(frame_s=0.02))


def test_a_beam_has_the_frames_of_its_application() -> None:
    beam = EndpointBeam(frame_s=0.02)
    for frame_s in (None, 0.02):
        assert Live(rate_hz=1_000, speech=lambda event: Speech(), beam=beam, frame_s=frame_s).output_frame_s == 0.02
    with pytest.raises(ApplicationError, match="give the same, or only one"):
        Live(rate_hz=1_000, speech=lambda event: Speech(), beam=beam, frame_s=0.04)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame_s": 0},
        {"frame_s": "20ms"},
        {"width": 0},
        {"width": 1_000},
        {"language_weight": -1},
        {"language_weight": float("nan")},
        {"word_bonus": 11},
        {"hot_words": ("a",)},
        {"hot_words": (HotWord("a"),) * 101},
        {"hot_bonus": 21},
        {"max_wait_s": 0},
        {"max_wait_s": 60},
        {"language": 5},
        {"revise": "event"},
    ],
    ids=str,
)
def test_a_field_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    given: dict[str, Any] = {"frame_s": 0.02} | wrong
    with pytest.raises(ApplicationError, match=f"EndpointBeam has {name}="):
        EndpointBeam(**given)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_bundle(tmp_path_factory.mktemp("letters"))


def test_the_language_model_is_a_verified_file_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    files = read_bundle(bundle).manifest.files
    assert LANGUAGE in files
    data = (bundle / LANGUAGE).read_bytes()
    assert NGram.from_bytes(data).unit == "characters"
    # The front-end's process verifies it, too.
    order: dict[str, Any] = {
        "symbols": ["-", " ", "a"],
        "beam": {"frame_s": 0.02, "hot_words": [["a", None]]},
        "language": str(tmp_path / LANGUAGE),
        "sha256": files[LANGUAGE],
    }
    (tmp_path / LANGUAGE).write_bytes(data)
    assert made_decoder(order | {"beam": {**order["beam"]}}) is not None
    altered = data[:-1] + bytes([data[-1] ^ 1])
    (tmp_path / LANGUAGE).write_bytes(altered)
    with pytest.raises(BundleCorrupt, match="was altered"):
        made_decoder(order | {"beam": {**order["beam"]}})
    (bundle / LANGUAGE).write_bytes(altered)
    with pytest.raises(BundleCorrupt):
        read_bundle(bundle)
    (bundle / LANGUAGE).unlink()
    with pytest.raises(BundleCorrupt):
        read_bundle(bundle)
    (bundle / LANGUAGE).write_bytes(data)


def test_what_makes_no_language_model_is_refused(bundle: Path) -> None:
    found = find_application(str(bundle.parent / "letters_app.py"))
    assert found.language() is not None
    live = found.application.live
    assert live is not None
    assert live.beam is not None
    wrong = replace(found.application, live=replace(live, beam=replace(live.beam, language=lambda: "text")))  # pyright: ignore[reportArgumentType]
    other = FoundApplication(application=wrong, module=found.module, reference=found.reference)
    with pytest.raises(ApplicationError, match="it must make an NGram"):
        other.language()
    plain = replace(found.application, live=replace(live, beam=None))
    assert FoundApplication(application=plain, module=found.module, reference=found.reference).language() is None


def test_hints_of_clients_are_hot_words() -> None:
    assert prompted("Penstock, sluice gate; a sentence of five words is none.\nHe said: weir", ["turbine"]) == tuple(
        map(HotWord, ("turbine", "Penstock", "sluice gate", "He said", "weir"))
    )
    assert prompted("") == ()
    assert len(prompted(",".join(f"w{number}" for number in range(500)))) == 100
    assert prompted("x" * 65) == ()
    options = ListenOptions.of("keyterm=sluice+gate&keyterm=weir&keywords=penstock:2.5&keywords=pump&keywords=hush:-3")
    assert options.hot_words == (
        HotWord("sluice gate"),
        HotWord("weir"),
        HotWord("penstock", 2.5),
        HotWord("pump"),
        HotWord("hush", -3.0),
    )


@pytest.mark.parametrize("value", ["penstock:high", "penstock:nan", "penstock:21", "penstock:"])
def test_a_bonus_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match="write a word, or a word and its bonus"):
        boosted([("keywords", value)])


def test_too_many_hot_words_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 100 are taken"):
        boosted([("keyterm", "a")] * 101)
