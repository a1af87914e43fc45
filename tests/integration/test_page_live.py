"""The page's live half: charts under load, figures from counters, small and dark screens, hidden tabs."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.page import DRAWINGS, Watch, draw, load, luminance, url_of, wait_until
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough

FEW_PX = 2


def charts(page: Page) -> dict[str, str]:
    """What is drawn in each chart, by the name of its line."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot path")].map(
            path => [`${path.closest("svg").id} ${path.getAttribute("class")}`, path.getAttribute("d")]))"""
    )


def number(page: Page, id: str) -> float:
    return float(page.locator(f"#{id}").inner_text().removesuffix(" ms").replace(",", ""))


def polls(watch: Watch) -> int:
    return sum(url.endswith("/v1/stats") for url in watch.requests)


def test_the_charts_move_under_load(page: Page, server: RunningServer) -> None:
    lines = ("rate-chart answered", "latency-chart p50", "latency-chart p99")

    def all_changed(since: dict[str, str], *names: str) -> bool:
        now = charts(page)
        return all(name in now and now[name] != since.get(name) for name in names)

    def number_is(id: str, true: Callable[[float], bool]) -> bool:
        return page.locator(f"#{id}").inner_text() != "–" and true(number(page, id))

    wait_until(page, lambda: number_is("rate", lambda rate: rate == 0))
    idle = charts(page)
    with load(server, "/v1/apps/digits", bytes(28 * 28)):
        wait_until(page, lambda: number_is("rate", lambda rate: rate > 20))
        wait_until(page, lambda: all_changed(idle, "batch-chart bars", *lines))
        first = charts(page)
        # Of one poll, all three.
        p50, p98, p99 = page.evaluate(
            "['p50', 'p98', 'p99'].map(id => parseFloat(document.getElementById(id).textContent.replace(',', '')))"
        )
        assert 0 < p50 <= p98 <= p99
        assert 1 <= number(page, "mean-batch") <= 4
        assert "in the network" in page.locator("#parts").inner_text()
        wait_until(page, lambda: all_changed(first, *lines))
        second = charts(page)
        wait_until(page, lambda: number(page, "answered") > 40)
    for line in lines:
        assert len({idle.get(line), first[line], second[line]}) == 3, line
    assert first["latency-chart budget"].startswith("M0 ")
    assert number(page, "budget") == 5000
    expect(page.locator("#slots-total")).not_to_have_text("–")
    wait_until(page, lambda: number(page, "rate") == 0)


def test_nothing_piles_up(page: Page, server: RunningServer, watch: Watch) -> None:
    def nodes() -> int:
        return page.evaluate("document.querySelectorAll('*').length")

    def draw_and_poll(digit: str, times: int) -> None:
        draw(page, DRAWINGS[digit])
        # Its answer has elements too.
        expect(page.locator(".answer-big")).to_have_text(digit)
        enough = polls(watch) + times
        wait_until(page, lambda: polls(watch) >= enough)

    with load(server, "/v1/apps/digits", bytes(28 * 28), clients=1):
        draw_and_poll("7", 4)
        before = nodes()
        draw_and_poll("3", 6)
        # Labels of an axis come and go.
        wait_until(page, lambda: nodes() <= before + 2)


def test_a_hidden_tab_does_not_poll(page: Page, watch: Watch) -> None:
    def hide(hidden: Literal["true", "false"]) -> None:
        page.evaluate(
            f"""Object.defineProperty(document, "hidden", {{ configurable: true, get: () => {hidden} }});
            document.dispatchEvent(new Event("visibilitychange"))"""
        )

    hide("true")
    page.wait_for_timeout(700)
    before = polls(watch)
    page.wait_for_timeout(1500)
    assert polls(watch) == before
    hide("false")
    wait_until(page, lambda: polls(watch) >= before + 2, within_s=10)


@pytest.mark.parametrize(("width", "height"), [(320, 640), (390, 844), (844, 390), (820, 1180)])
def test_a_small_screen_shows_everything_without_scrolling_sideways(
    browser: Browser, server: RunningServer, watch: Watch, width: int, height: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, has_touch=True, is_mobile=True)
    page = context.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    draw(page, DRAWINGS["7"])
    expect(page.locator(".answer-big")).to_have_text("7")
    page.locator(".shell summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for seen in (
        "canvas",
        ".bars li:last-child",
        ".shell code",
        "#rate",
        "#p99",
        "#batch-chart",
        "#failed",
        "footer a",
    ):
        element = page.locator(seen).last
        element.scroll_into_view_if_needed()
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] > 0
    assert watch.complaints == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(
    browser: Browser, server: RunningServer, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto(url_of(server))
    draw(page, DRAWINGS["7"])
    expect(page.locator(".answer-big")).to_have_text("7")
    colours: dict[str, Any] = page.evaluate(
        """() => {
            const of = (selector) => getComputedStyle(document.querySelector(selector)).color;
            const texts = ["h1", "#app-description", "h2", "h2 small", ".bars li", ".answer-time", ".ends", "footer a",
                ".message", "summary", "#connection"];
            return {
                ground: getComputedStyle(document.body).backgroundColor,
                texts: Object.fromEntries(texts.map((text) => [text, of(text)])),
            };
        }"""
    )
    ground = luminance(colours["ground"])
    assert (ground < 0.05) == (scheme == "dark")
    for text, colour in colours["texts"].items():
        lighter, darker = sorted((ground, luminance(colour)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{text} in {colour} on {colours['ground']}"
    page.close()


def in_page(page: Page, script: str) -> Any:
    return page.evaluate(f"import('/page/stats.js').then(({{ quantile, between, History }}) => {{ {script} }})")


def test_quantiles_are_interpolated_in_their_bin(page: Page) -> None:
    assert in_page(
        page,
        """const histogram = (...counts) => ({ upper: [1, 2, 4, null], counts });
        return [
            quantile(histogram(0, 0, 0, 0), 0.5),
            quantile(histogram(10, 0, 0, 0), 0.5),
            quantile(histogram(0, 0, 10, 0), 0.5),
            quantile(histogram(5, 0, 5, 0), 0.75),
            quantile(histogram(0, 0, 0, 7), 0.99),
        ]""",
    ) == [None, 0.5, 3, 3, 4]


STATS = """const stats = (uptime_s, answered) => ({
    uptime_s, answered, refused: answered / 10, expired: 0, failed: 0,
    batch: { upper: [1, 2, null], counts: [0, answered / 2, 0] },
    ...Object.fromEntries(["latency", "queue", "compute"].map(
        (key) => [key, { upper_ms: [1, 2, null], counts: [0, answered, 0] }])),
});
"""


def test_figures_are_differences_between_polls(page: Page) -> None:
    difference = in_page(page, STATS + "return between(stats(10, 1000), stats(12, 1400))")
    assert difference["answeredPerS"] == 200
    assert difference["lostPerS"] == 20
    assert difference["meanBatch"] == 2
    assert difference["latency"]["counts"] == [0, 400, 0]


def test_nothing_is_less_than_nothing_where_one_of_several_engines_took_its_counts_along(page: Page) -> None:
    difference = in_page(page, STATS + "return between(stats(10, 1000), stats(12, 600))")
    for key in ("batch", "latency", "queue", "compute"):
        assert difference[key]["counts"] == [0, 0, 0]
    assert (difference["answeredPerS"], difference["lostPerS"], difference["meanBatch"]) == (0, 0, None)


def test_history_is_bounded_and_begins_anew_with_another_server(page: Page) -> None:
    seen = in_page(
        page,
        STATS
        + """const history = new History();
        const lengths = [];
        for (let poll = 0; poll < 1000; poll++) {
            history.add(stats(poll / 2, 100 * poll));
            lengths.push(history.points.length);
        }
        const rate = history.points.at(-1).answeredPerS;
        const restarted = history.add(stats(1, 5));
        const afterwards = history.add(stats(2, 15));
        history.add(stats(20, 33));
        return { most: Math.max(...lengths), rate, restarted, afterwards: afterwards.answeredPerS,
            gap: history.points.map((point) => point.answeredPerS) };
        """,
    )
    assert seen["most"] <= 130
    assert seen["rate"] == pytest.approx(200)
    assert seen["restarted"] is None
    assert seen["afterwards"] == 10
    assert seen["gap"] == [10, None, 1]
