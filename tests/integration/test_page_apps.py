"""The page shows something for every application: recorded examples, fields, pictures, signals, texts, steps, words."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.generating_text import TEXTS as SAID
from tests.support.generating_text import speaker_bundle
from tests.support.loud import loud_bundle
from tests.support.page import Watch, url_of
from tests.support.page_apps import EVIL, TEXTS, page_bundles
from tests.support.prepared import pictures_bundle
from tests.support.processes import eventually
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("apps")
    for name in ("loud", "speaker", "pictures"):
        (folder / name).mkdir()
    more = [
        loud_bundle(folder / "loud"),
        speaker_bundle(folder / "speaker"),
        pictures_bundle(folder / "pictures").folder,
    ]
    return [*page_bundles(folder / "page", evil=True), *more]


@pytest.fixture(scope="module")
def server(bundles: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(bundles[0], *map(str, bundles[1:])) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator("#apps").wait_for()
    yield page
    page.close()
    assert watch.complaints == []
    assert all(url.startswith((url_of(server), "blob:")) for url in watch.requests)


def shown(page: Page, name: str) -> None:
    page.locator("#apps").select_option(name)
    page.get_by_role("button", name="Example 1", exact=True).wait_for()


def example(page: Page, number: int) -> None:
    page.get_by_role("button", name=f"Example {number}", exact=True).click()


class Held:
    """The requests for an application's examples, held back until they are let go."""

    def __init__(self, page: Page, name: str) -> None:
        self._routes: list[Route] | None = []
        page.route(f"**/v1/apps/{name}/examples", self._come)

    def _come(self, route: Route) -> None:
        if self._routes is None:
            route.continue_()
        else:
            self._routes.append(route)

    def let_go(self) -> None:
        held, self._routes = self._routes, None
        for route in held or []:
            route.continue_()


def test_scores_are_logits_where_that_is_declared(page: Page) -> None:
    shown(page, "flowers")
    # It begins with the first example, in fields with the names of the columns and in few digits.
    values = [page.get_by_label(name).input_value() for name in ("sepal length", "petal width")]
    assert all(len(value) <= 3 and float(value) > 0 for value in values)
    example(page, 2)
    expect(page.locator(".recorded")).to_contain_text("the recorded answer")
    expect(page.locator(".bars-kind")).to_have_text("logit")
    assert "%" not in page.locator(".answer").inner_text()
    page.get_by_label("sepal length").fill("7.5")
    assert json.loads(page.locator("#json").input_value())[0] == 7.5
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".recorded")).to_have_text("")


def test_a_label_is_text_whatever_it_holds(page: Page) -> None:
    shown(page, "flowers")
    example(page, 1)
    expect(page.locator(".bars li > :first-child").last).to_have_text(EVIL)
    assert page.locator(".bars img").count() == 0
    assert page.evaluate("window.evil") is None


def test_quantities_have_names_and_units_and_none_is_the_answer(page: Page) -> None:
    shown(page, "houses")
    example(page, 1)
    expect(page.locator(".recorded")).to_have_text("the recorded answer is the same")
    assert page.locator(".bars li > :first-child").all_inner_texts() == ["width", "depth"]
    assert all(text.endswith(" m") for text in page.locator(".bars b").all_inner_texts())
    assert page.locator(".bars [data-largest]").count() == 0


def test_a_signal_is_drawn_and_all_its_numbers_are_there(page: Page) -> None:
    shown(page, "waves")
    example(page, 2)
    for name, place in (("wave", ".input-preview"), ("smooth", ".tensor")):
        figure = page.locator(place).get_by_role("img", name=f"{name}: 400 points")
        expect(figure).to_be_visible()
        assert len(str(figure.locator("path").get_attribute("d")).split("L")) == 400
    expect(page.get_by_label("peak", exact=True)).to_contain_text(" mV")
    page.get_by_text("All numbers").first.click()
    assert len(json.loads(page.locator(".numbers").first.inner_text())) == 400


def test_a_live_signal_is_answered_frame_by_frame(page: Page) -> None:
    shown(page, "shake")
    example(page, 1)
    expect(page.locator(".tensor").get_by_role("img", name="moves: 120 points")).to_be_visible()
    assert page.locator(".tensor .series").count() == 3
    page.locator("#json").fill("[[0, 0, 1], [0, 0.5, 1], [1, 0, 0]]")
    page.get_by_role("button", name="Send").click()
    moves = page.get_by_label("moves", exact=True)
    eventually(lambda: [line[:3] for line in moves.inner_text().splitlines()] == ["0  ", "1  ", "2  "], within_s=10)
    page.locator("#json").fill("[1, 2")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message")).to_contain_text("The frames are not JSON; give a list, motion: float32[10, 3]")


def test_texts_are_lines_to_try(page: Page) -> None:
    shown(page, "moods")
    expect(page.locator(".examples button")).to_have_count(len(TEXTS))
    assert set(page.locator(".examples button").all_inner_texts()) == set(TEXTS)
    page.get_by_role("button", name="Example 1", exact=True).click()
    assert page.get_by_label("A text").input_value() in TEXTS
    expect(page.locator(".answer-sure")).to_contain_text("%")
    expect(page.locator(".recorded")).to_contain_text("Recorded: ")


def test_tensors_are_not_written_where_a_text_is_typed(page: Page) -> None:
    """A text box is sent as a text: JSON there would be read as words."""
    shown(page, "words")
    box = page.get_by_label("A text")
    expect(box).to_have_value("")
    example(page, 1)
    expect(page.locator(".recorded")).to_contain_text("Recorded: ")
    expect(box).to_have_value("")
    expect(box).to_have_attribute("placeholder", "The example is sent as tensors, as it was recorded.")
    page.locator(".shell summary").click()
    expect(page.locator(".shell code")).to_contain_text("@input.txt")


def test_an_example_does_not_change_a_text_box_in_use(page: Page) -> None:
    examples = Held(page, "moods")
    page.locator("#apps").select_option("moods")
    box = page.get_by_label("A text")
    box.focus()
    examples.let_go()
    expect(page.locator(".examples button")).to_have_count(len(TEXTS))
    expect(box).to_have_value("")


def test_an_example_that_comes_late_does_not_replace_what_was_sent(page: Page) -> None:
    examples = Held(page, "flowers")
    page.locator("#apps").select_option("flowers")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer-time")).to_contain_text("round trip")
    examples.let_go()
    page.get_by_role("button", name="Example 1", exact=True).wait_for()
    expect(page.locator("#json")).to_have_value("[0, 0, 0, 0]")


def test_steps_come_one_by_one_and_end_in_the_text(page: Page) -> None:
    shown(page, "speaker")
    example(page, 1)
    expect(page.locator(".answer-time", has_text=" steps, ")).to_be_visible()
    assert page.locator(".generated").inner_text()
    assert page.locator(".steps li").count() <= 36
    assert page.get_by_label("A text").input_value() in SAID


def test_a_picture_is_shown_as_it_is_sent(page: Page) -> None:
    shown(page, "pictures")
    example(page, 2)
    picture = page.get_by_alt_text("The picture that is sent")
    expect(picture).to_be_visible()
    page.wait_for_function("document.querySelector('.input-preview img').naturalWidth > 0")
    expect(page.locator(".recorded")).to_contain_text("Recorded: ")


def test_a_live_application_names_its_words_and_plays_recordings(page: Page) -> None:
    shown(page, "loud")
    expect(page.locator(".known")).to_contain_text("quiet, loud")
    example(page, 1)
    expect(page.locator(".answer-big")).to_have_text("loud", timeout=20_000)


def test_a_long_reply_is_folded_and_nothing_is_cut_off(page: Page) -> None:
    reply = {"items": [{"at": at, "name": f"item {at}"} for at in range(250)], "note": "<b>bold</b>"}

    def answer(route: Route) -> None:
        route.fulfill(json=reply)

    shown(page, "houses")
    page.route("**/v1/apps/houses", answer)
    page.get_by_role("button", name="Send").click()
    page.get_by_text('"items": [ 250 items ]').click()
    expect(page.locator(".reply-tree details details > .json")).to_have_count(100)
    page.get_by_role("button", name="150 more").click()
    page.get_by_role("button", name="50 more").click()
    expect(page.locator(".reply-tree")).to_contain_text('249: {"at":249,"name":"item 249"}')
    expect(page.locator(".reply-tree")).to_contain_text("<b>bold</b>")
    expect(page.locator(".reply-tree b")).to_have_count(0)


def test_examples_are_requests_with_the_answers_of_the_server(server: RunningServer) -> None:
    for name, kind in (("flowers", "application/json"), ("moods", "text/plain"), ("pictures", "image/png")):
        status, _, found = server.ask("GET", f"/v1/apps/{name}/examples")
        assert (status, {each["content_type"] for each in found["examples"]}) == (200, {kind})
    assert server.ask("GET", "/v1/apps/other/examples")[0] == 404
    assert server.ask("POST", "/v1/apps/flowers/examples")[0] == 405


def test_examples_can_be_kept_back(bundles: list[Path]) -> None:
    with RunningServer(bundles[0], "--no-examples") as server:
        assert server.ask("GET", "/v1/apps/flowers/examples")[2] == {"examples": []}


def test_examples_of_a_bundle_that_is_gone_are_none(bundles: list[Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for file in bundles[1].iterdir():
        (bundle / file.name).write_bytes(file.read_bytes())
    with RunningServer(bundle) as server:
        (bundle / "golden.safetensors").unlink()
        assert server.ask("GET", "/v1/apps/houses/examples")[2] == {"examples": []}
