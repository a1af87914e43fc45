"""The offline app of networks whose answers take steps, in headless Chromium."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock import Bundle, load
from penstock.core.errors import InvalidInput
from penstock.core.packs.pack import Pack, read_pack
from penstock.device.pack_engine import PackEngine
from penstock.export.pack_writer import export_pack
from tests.support.device_fixtures import browser_fixture
from tests.support.device_page import Device
from tests.support.generating import Counter, counter, digits, examples
from tests.support.generating_text import TEXTS, shared_speaker
from tests.support.shared import made_once

pytestmark = pytest.mark.slow


browser = browser_fixture()


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Path]:
    return shared_speaker(tmp_path_factory)


@pytest.fixture(scope="module")
def engine(speaker: tuple[Pack, Path]) -> PackEngine:
    return PackEngine(speaker[0])


def ask(page: Page, label: str, text: str) -> None:
    page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Run").click()


def test_the_pack_carries_its_vocabulary_once(speaker: tuple[Pack, Path], engine: PackEngine) -> None:
    pack, bundle = speaker
    fields = json.loads((pack.folder / "pack.json").read_bytes())
    assert fields["text"] == {"tensor": "tokens", "max_tokens": 40, "vocabulary": "vocabulary.json"}
    assert fields["reply"] == {"tensor": "token", "vocabulary": "vocabulary.json"}
    assert "vocabulary.json" in fields["files"]
    assert json.loads((pack.folder / "vocabulary.json").read_text())["special"] == 4
    assert read_pack(pack.folder).to_json() == pack.to_json()
    predictor = load(bundle)
    for text in TEXTS:
        parts = engine.generate_text(text)
        whole = "".join(parts)
        assert predictor.answer(text.encode(), "text/plain") == {"text": whole}
        assert parts.ended in ("end", "max_steps")
    with pytest.raises(InvalidInput, match="The text is empty"):
        engine.generate_text(" ")


def check_examples(page: Page, pack: Pack) -> None:
    """Each recorded example gives its recorded text, seed included, which is no part of the text."""
    buttons = page.locator(".examples button")
    golden = pack.golden()
    assert len(golden.inputs) > 1
    expect(buttons).to_have_count(len(golden.inputs))
    for button, text in zip(buttons.all(), page.locator(".examples button").all_inner_texts(), strict=True):
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        # What is below is that of the example before until this one has ended.
        expect(page.locator("#type-outputs")).to_have_attribute("aria-busy", "false", timeout=30_000)
        expect(page.locator(".recorded > summary")).to_contain_text("; the network's is the same", timeout=30_000)
        assert page.get_by_label("A text").input_value().startswith(text.removesuffix("…"))
        said = page.locator(".answer").text_content()
        expect(page.locator(".recorded > summary")).to_contain_text(f"Recorded answer: {said}")


def test_with_the_network_gone_a_text_is_answered_token_by_token(
    browser: Browser, speaker: tuple[Pack, Path], engine: PackEngine
) -> None:
    with CountingHost(speaker[0].folder) as host:
        device = Device(browser)
        device.installed(host).close()
        host.stop()
        before = len(host.sent)
        page = device.open(host)
        expect(page.locator("#type-ended")).not_to_be_empty(timeout=30_000)
        check_examples(page, speaker[0])
        for text in (*TEXTS, "Ein Kind? ñ 日"):
            # Each part that was shown, in order.
            page.evaluate(
                """() => {
                    window.parts = [];
                    const seen = new MutationObserver(() => {
                        const text = document.querySelector(".answer")?.textContent;
                        if (text !== undefined && text !== window.parts.at(-1)) window.parts.push(text);
                    });
                    seen.observe(document.getElementById("type-outputs"), { childList: true, subtree: true });
                }"""
            )
            ask(page, "A text", text)
            steps = engine.generate_text(text)
            parts = list(steps)
            expect(page.locator(".answer")).to_have_text("".join(parts), use_inner_text=False)
            reason = "The answer is whole, " if steps.ended == "end" else "Cut after "
            expect(page.locator("#type-ended")).to_contain_text(reason + f"{len(parts) - 1} step")
            expect(page.locator("#type-state")).to_have_text("")
            shown = page.evaluate("window.parts")
            assert all("".join(parts).startswith(part) for part in shown[1:])
            assert len(parts) < 4 or len(shown) > 2
        for text in (" ", "the " * 60):
            with pytest.raises(InvalidInput) as refused:
                engine.generate_text(text)
            ask(page, "A text", text)
            expect(page.locator("#type-state")).to_have_text(str(refused.value))
            expect(page.locator(".answer")).to_have_count(0)
        assert len(host.sent) == before
        page.close()
        host.start()
        device.close(host)


class Slow(Counter):
    """An answer of 64 steps, each with some work for a browser."""

    def step(self, state: dict[str, Any]) -> Any:
        output, after, done = super().step(state)
        work = self.embed.mean() * 0 + output["sums"][:, :1]
        for _ in range(6):
            work = (work[:, None] + self.embed.sum() * 0).expand(-1, 100_000, -1).sin().mean(1)
        return {**output, "sums": output["sums"] + work * 0}, after, done & (output["token"] > 1000)


SLOW = counter(Slow)
# Presses the button in the page itself: all 64 steps may have come before a test's own click does.
STOP_AT_THE_THIRD = """() => {
    const outputs = document.getElementById("type-outputs");
    outputs.replaceChildren();
    new MutationObserver((_, observer) => {
        if (outputs.querySelectorAll("li").length < 3) return;
        observer.disconnect();
        const stop = document.getElementById("type-stop");
        window.shown = stop.checkVisibility();
        stop.click();
    }).observe(outputs, { childList: true, subtree: true });
}"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    def make(folder: Path) -> None:
        Bundle.write(SLOW, Slow(), examples(2), to=folder / "bundle")
        export_pack(folder / "bundle", folder / "pack", app=f"{__name__}:SLOW")

    return read_pack(made_once(tmp_path_factory, "slow", make) / "pack")


def test_other_outputs_are_shown_step_by_step_and_stop_stops_them(browser: Browser, slow: Pack) -> None:
    engine = PackEngine(slow)
    with CountingHost(slow.folder) as host:
        device = Device(browser)
        page = device.installed(host)
        stop = page.get_by_role("button", name="Stop")
        expect(page.locator("#type-ended")).to_contain_text("Cut after", timeout=60_000)
        expect(stop).to_be_hidden()
        given = {"digits": digits(5)["digits"].tolist()}
        found = engine.predict(given)
        page.evaluate(STOP_AT_THE_THIRD)
        ask(page, "The inputs as JSON, by name", json.dumps(given))
        tokens = page.get_by_role("region", name="token").locator("li")
        expect(page.locator("#type-ended")).to_contain_text("Stopped after")
        assert page.evaluate("window.shown")
        count = tokens.count()
        assert 3 <= count < len(found["token"])
        assert [int(line) for line in tokens.all_inner_texts()] == found["token"][:count].tolist()
        page.wait_for_timeout(200)
        assert tokens.count() == count
        # Another answer in the middle of one takes its place.
        ask(page, "The inputs as JSON, by name", json.dumps({"digits": [1, 2, 3], "most": 64}))
        expect(tokens.first).to_be_visible()
        ask(page, "The inputs as JSON, by name", json.dumps(given | {"most": 3}))
        expect(page.locator("#type-ended")).to_have_text("Cut after 3 steps.")
        assert [int(line) for line in tokens.all_inner_texts()] == found["token"][:3].tolist()
        for wrong in ({}, {"digits": [99]}, given | {"most": 65}, [1]):
            with pytest.raises(InvalidInput) as refused:
                engine.generate(wrong)  # type: ignore[arg-type]
            ask(page, "The inputs as JSON, by name", json.dumps(wrong))
            expect(page.locator("#type-state")).to_have_text(str(refused.value))
        page.close()
        device.close(host)
