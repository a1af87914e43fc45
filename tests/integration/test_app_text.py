"""The text application: its sentences, and its network on a server, on the page, in a pack and in the offline app."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, expect

import penstock
from benchmarks.acceptance.device.counting_host import CountingHost
from penstock import Bundle
from penstock.apps.text.app import CODES, LABELS, MAX_BYTES, app, reply
from penstock.apps.text.recipe import PIECE_BYTES, pieces
from penstock.apps.text.translations import PLACEHOLDER, sentences
from penstock.core.errors import InvalidInput
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine
from penstock.export.pack_writer import export_pack
from tests.support.device_page import Device
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

TEXTS = ("¿Dónde está la biblioteca?", "言語", "a", "Bitte geben Sie eine gültige Adresse ein. " * 20)
ASK = "/v1/apps/text"
PLAIN = {"Content-Type": "text/plain"}


@pytest.mark.thorough
def test_a_sentence_and_its_translations_are_in_one_part_and_no_text_has_two_languages() -> None:
    parts = sentences()
    texts = Counter(text for part in parts.values() for text, _ in part)
    assert max(texts.values()) == 1
    for part, least in (("train", 80), ("validation", 5), ("test", 5)):
        assert min(Counter(label for _, label in parts[part]).values()) >= least // 10
        assert len({label for _, label in parts[part]}) == len(CODES)
    assert len(parts["train"]) > 40_000
    assert not any(PLACEHOLDER.search(text) for text in texts)
    english = {text for text, label in parts["test"] if label == CODES.index("en")}
    assert english.isdisjoint(text for text, _ in parts["train"])


def test_a_piece_is_short_and_pieces_are_the_text() -> None:
    for text in TEXTS:
        assert " ".join(pieces(text)).replace(" ", "") == text.strip().replace(" ", "")
        assert max(len(piece.encode()) for piece in pieces(text)) <= PIECE_BYTES + 8


def test_a_reply_names_the_likeliest() -> None:
    shares = np.zeros(len(LABELS), np.float32)
    shares[CODES.index("gl")], shares[CODES.index("pt")] = 0.75, 0.25
    found = reply(shares)
    assert (found["language"], found["code"], found["probability"]) == ("Galician", "gl", 0.75)
    assert list(found["likeliest"])[:2] == ["Galician", "Portuguese"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is tested is that all places agree."""
    found = find_application("text")
    torch.manual_seed(0)
    network = found.model()
    with torch.no_grad():
        network.head.weight.mul_(20)
    examples = [app.decode(text.encode(), "text/plain") for text in TEXTS]  # pyright: ignore
    return Bundle.write(found, network, examples, to=tmp_path_factory.mktemp("text") / "bundle").folder


@pytest.fixture(scope="module")
def expected(bundle: Path) -> list[Array]:
    predictor: Any = penstock.load(bundle)
    return [predictor.predict(app.decode(text.encode(), "")) for text in TEXTS]  # pyright: ignore


@pytest.mark.slow
def test_a_server_takes_text_forms_and_json(
    bundle: Path, expected: list[Array], browser: Browser, watch: Watch
) -> None:
    with RunningServer(bundle) as server:
        for text, shares in zip(TEXTS, expected, strict=True):
            status, _, found = server.ask("POST", ASK, text.encode(), PLAIN)
            assert (status, found["language"]) == (200, LABELS[shares.argmax()])
            assert found["probability"] == pytest.approx(shares.max(), abs=1e-3)
            form = f'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n{text}\r\n--b--\r\n'.encode()
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            assert server.ask("POST", ASK, form, kind)[2] == found
            given = json.dumps({"text": list(text.encode()[:MAX_BYTES])}).encode()
            assert server.ask("POST", ASK, given, {"Content-Type": "application/json"})[2] == found
        for body, sentence in ((b"", "The text is empty"), (b"\xff", "not UTF-8")):
            status, _, found = server.ask("POST", ASK, body, PLAIN)
            assert (status, sentence in found["error"]) == (400, True)
        page = browser.new_page()
        watch.look_at(page)
        page.goto(url_of(server))
        page.get_by_label("A text", exact=True).fill(TEXTS[0])
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer-big")).to_have_text(LABELS[expected[0].argmax()])
        page.close()
        assert watch.complaints == []


@pytest.fixture(scope="module")
def host(bundle: Path) -> Iterator[CountingHost]:
    export_pack(bundle, bundle.parent / "pack")
    with CountingHost(bundle.parent / "pack") as host:
        yield host


@pytest.mark.slow
def test_a_pack_takes_text_in_python_and_in_the_offline_app(
    host: CountingHost, expected: list[Array], browser: Browser
) -> None:
    pack = read_pack(host.folder)
    assert pack.text == app.decode
    engine = PackEngine(pack)
    for text, shares in zip(TEXTS, expected, strict=True):
        np.testing.assert_allclose(engine.predict_text(text)["languages"], shares, atol=1e-4)
    with pytest.raises(InvalidInput, match="The text is empty"):
        engine.predict_text("")
    device = Device(browser)
    page = device.installed(host)
    box = page.get_by_label("A text", exact=True)
    # The example is there, and answered at once.
    expect(box).to_have_value(TEXTS[0], timeout=30_000)
    for text, shares in zip(TEXTS, expected, strict=True):
        # Nothing is shown of the text before.
        box.fill("")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#type-state")).to_have_text("The text is empty; send at least one character.")
        box.fill(text)
        page.get_by_role("button", name="Run").click()
        first = page.get_by_role("region", name="languages").locator("li").first
        expect(first).to_contain_text(LABELS[shares.argmax()])
        assert float(first.inner_text().split()[-2]) == pytest.approx(100 * shares.max(), abs=0.06)
    page.close()
    device.close(host)
