"""The page's drawing half, in headless Chromium before a real server of a network that was trained for it."""

import re
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.page import DRAWINGS, Stroke, Watch, draw, url_of, wait_until
from tests.support.serving import RunningServer

# All of an answer at one time, when its bars stand still: parts of a drawing are answered too.
STILL = """async (digit) => {
    const texts = (selector) => [...document.querySelectorAll(selector)].map((each) => each.innerText);
    while (texts(".answer-big")[0] !== digit || document.getAnimations().length) {
        await new Promise(requestAnimationFrame);
    }
    return {
        rows: texts(".bars li"),
        largest: texts(".bars [data-largest] > :first-child"),
        sure: texts(".answer-sure")[0],
        time: texts(".answer-time")[0],
        lengths: [...document.querySelectorAll(".bars i")].map((bar) => bar.getBoundingClientRect().width),
    };
}"""
REFUSAL = '{"error": "The answer would come after 80 ms, past the budget of 50 ms."}'


def answer_is(page: Page, digit: str) -> None:
    expect(page.locator(".answer-big")).to_have_text(digit)


def button(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()


def test_drawn_digits_are_answered(page: Page) -> None:
    for digit, strokes in DRAWINGS.items():
        draw(page, strokes)
        answer_is(page, digit)
        button(page, "Clear")


@pytest.mark.thorough
@pytest.mark.parametrize(("left", "top"), [(0.02, 0.02), (0.45, 0.45)])
def test_a_small_seven_in_a_corner_is_answered(page: Page, left: float, top: float) -> None:
    draw(page, DRAWINGS["7"], size=0.5, left=left, top=top)
    answer_is(page, "7")


def test_every_label_has_a_bar_and_the_largest_stands_out(page: Page) -> None:
    draw(page, DRAWINGS["7"])
    answer_is(page, "7")
    shown: dict[str, Any] = page.evaluate(STILL, "7")
    labels, shares = zip(*(row.split()[:2] for row in shown["rows"]), strict=True)
    assert labels == tuple("0123456789")
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.6)
    assert shown["largest"] == ["7"]
    assert shown["sure"] == f"{shares[7]} %"
    assert max(shown["lengths"]) == shown["lengths"][7]
    assert re.fullmatch(r"round trip [\d.,]+ ms", shown["time"])


def test_the_answer_comes_while_one_draws(page: Page) -> None:
    area = page.locator(".draw canvas").bounding_box()
    assert area is not None
    page.mouse.move(area["x"] + 100, area["y"] + 80)
    page.mouse.down()
    page.mouse.move(area["x"] + 200, area["y"] + 80, steps=5)
    expect(page.locator(".answer-time")).to_contain_text("round trip")
    page.mouse.up()


def slow_network(page: Page, latency_ms: float) -> None:
    conditions = {"offline": False, "latency": latency_ms, "downloadThroughput": -1, "uploadThroughput": -1}
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", conditions)


def test_one_request_is_in_flight_at_most_and_the_latest_wins(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/apps/digits", lambda route: held.append(route))
    (stroke,) = DRAWINGS["7"]
    draw(page, [stroke[:2]])
    wait_until(page, lambda: len(held) == 1)
    draw(page, [stroke[1:]])
    # What was drawn is painted, and due to be sent, with the next frame.
    page.evaluate("new Promise(requestAnimationFrame)")
    assert len(held) == 1
    held[0].continue_()
    wait_until(page, lambda: len(held) == 2)
    held[1].continue_()
    answer_is(page, "7")
    assert len(held) == 2


@pytest.mark.thorough
def test_undo_takes_the_last_stroke_back_and_clear_everything(page: Page) -> None:
    draw(page, DRAWINGS["7"])
    answer_is(page, "7")
    draw(page, [[(0.1, 0.9), (0.9, 0.9)], [(0.1, 0.1), (0.1, 0.9)]])
    page.wait_for_timeout(200)
    button(page, "Undo")
    button(page, "Undo")
    answer_is(page, "7")
    button(page, "Undo")
    expect(page.locator(".answer-big")).to_have_text("")
    expect(page.get_by_role("button", name="Undo")).to_be_disabled()
    draw(page, DRAWINGS["3"])
    answer_is(page, "3")
    button(page, "Clear")
    expect(page.locator(".answer-big")).to_have_text("")
    expect(page.get_by_role("button", name="Clear")).to_be_disabled()
    draw(page, DRAWINGS["7"])
    answer_is(page, "7")


@pytest.mark.thorough
def test_an_answer_to_what_was_cleared_is_not_shown(page: Page) -> None:
    slow_network(page, 500)
    draw(page, DRAWINGS["7"])
    button(page, "Clear")
    page.wait_for_timeout(1000)
    expect(page.locator(".answer-big")).to_have_text("")
    expect(page.locator(".answer-time")).to_have_text("The answer comes here.")


@pytest.mark.thorough
def test_the_small_picture_is_what_is_sent(page: Page) -> None:
    draw(page, [[(0.5, 0.1), (0.5, 0.9)]])
    ink = page.locator(".preview").evaluate(
        """async (preview) => {
            // What was drawn is painted with the next frame.
            await new Promise(requestAnimationFrame);
            const { data } = preview.getContext("2d").getImageData(0, 0, preview.width, preview.height);
            return Array.from({ length: preview.width * preview.height }, (_, index) => data[4 * index]);
        }"""
    )
    rows = [ink[28 * row : 28 * row + 28] for row in range(28)]
    assert len(ink) == 28 * 28
    assert rows[14][13] == rows[14][14] == 255
    assert rows[0] == rows[27] == [0] * 28
    assert sum(rows[14][:9]) == sum(rows[14][19:]) == 0


@pytest.mark.thorough
def test_it_can_be_drawn_with_the_keyboard_alone(page: Page) -> None:
    for _ in range(5):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    expect(page.locator(".draw canvas")).to_be_focused()
    expect(page.locator("#draw-help")).to_be_in_viewport()
    keys = ["ArrowUp"] * 15 + ["Shift+ArrowLeft"] * 3 + ["Space"] + ["Shift+ArrowRight"] * 6
    keys += ["ArrowDown", "ArrowDown", "ArrowLeft"] * 15 + ["Space"]
    for key in keys:
        page.keyboard.press(key)
    answer_is(page, "7")
    page.keyboard.press("Control+z")
    expect(page.locator(".answer-big")).to_have_text("")
    for key in ("Space", "ArrowUp", "Delete"):
        page.keyboard.press(key)
    expect(page.locator(".draw-hint")).to_be_visible()


@pytest.mark.thorough
def test_it_can_be_drawn_with_a_finger_and_the_page_stays_where_it_is(
    browser: Browser, server: RunningServer, watch: Watch
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True)
    page = context.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    touch(page, DRAWINGS["7"])
    answer_is(page, "7")
    assert page.evaluate("scrollY") == 0
    assert watch.complaints == []
    context.close()


def touch(page: Page, strokes: list[Stroke]) -> None:
    area = page.locator(".draw canvas").bounding_box()
    assert area is not None
    session = page.context.new_cdp_session(page)
    for stroke in strokes:
        points = [{"x": area["x"] + x * area["width"], "y": area["y"] + y * area["height"]} for x, y in stroke]
        session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [points[0]]})
        for begin, end in pairwise(points):
            for step in range(1, 6):
                between = {axis: begin[axis] + (end[axis] - begin[axis]) * step / 5 for axis in "xy"}
                session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [between]})
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.thorough
def test_a_refusal_is_said_and_asked_again(page: Page, watch: Watch) -> None:
    refused, seen = 0, False

    def refuse(route: Route) -> None:
        nonlocal refused
        if refused < 2 or not seen:
            refused += 1
            route.fulfill(status=503, body=REFUSAL, content_type="application/json", headers={"Retry-After": "1"})
        else:
            route.continue_()

    page.route("**/v1/apps/digits", refuse)
    draw(page, DRAWINGS["7"])
    expect(page.locator(".message")).to_contain_text("Refused: The answer would come after 80 ms")
    seen = True
    answer_is(page, "7")
    expect(page.locator(".message")).to_have_text("")
    # A browser itself reports every answer of status 4xx and 5xx.
    assert all("503" in complaint for complaint in watch.complaints)
    watch.complaints.clear()


@pytest.mark.thorough
def test_the_server_is_killed_and_comes_back(browser: Browser, digits_bundle: Path, watch: Watch) -> None:
    page = browser.new_page()
    watch.look_at(page)
    with RunningServer(digits_bundle) as server:
        page.goto(url_of(server))
        draw(page, DRAWINGS["3"])
        answer_is(page, "3")
        server.stop(SIGKILL)
        expect(page.locator("#notice")).to_contain_text("does not answer", timeout=10_000)
        expect(page.locator("#connection")).to_have_text("no answer")
        button(page, "Clear")
        draw(page, DRAWINGS["7"])
        expect(page.locator(".message")).to_contain_text("No answer")
    with RunningServer(digits_bundle, "--port", str(server.port)):
        expect(page.locator("#connection")).to_have_text("connected", timeout=15_000)
        expect(page.locator("#notice")).to_be_hidden()
        answer_is(page, "7")
        page.close()
    # A browser itself reports every connection that fails, and the 503 of a server that starts.
    assert all("net::ERR_" in said or "status of 503" in said for said in watch.complaints)
