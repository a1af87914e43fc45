"""The page of a live application, in headless Chromium with a microphone that hears a file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route, WebSocketRoute, expect

from penstock.verify.chromium import open_chromium
from tests.support.loud import loud_bundle, write_spoken
from tests.support.page import Watch, luminance, url_of
from tests.support.processes import eventually
from tests.support.serving import RunningServer, write_doubler

KEY = "anna (0123456789abcdef)".replace(" ", "-")
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
WORDS = 2
WHY = "The server is shutting down; open another stream."


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("voice") / "voice.wav"
    write_spoken(file, WORDS, first_s=1.5)
    return file


@pytest.fixture(scope="module")
def browser(voice: Path) -> Iterator[Browser]:
    """A browser that may use its microphone, which hears the voice once."""
    microphone = (
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={voice}%noloop",
    )
    with open_chromium(*microphone) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A live application and one of single requests, for those with a key."""
    loud, other = tmp_path_factory.mktemp("loud"), tmp_path_factory.mktemp("doubler")
    (loud / "keys").write_text(f"anna {KEY}\n")
    options = ("--api-keys", str(loud / "keys"))
    with RunningServer(loud_bundle(loud), str(write_doubler(other)), *options) as server:
        yield server


def patient(page: Page) -> None:
    """Let streams wait longer for an answer: a busy machine is silent for longer than a server that is well."""

    def answer(route: Route) -> None:
        script = route.fetch().text()
        assert "SILENT_MS = 1000;" in script
        route.fulfill(body=script.replace("SILENT_MS = 1000;", "SILENT_MS = 60_000;"), content_type="text/javascript")

    page.route("**/page/stream.js", answer)


def opened(browser: Browser, server: RunningServer, watch: Watch, **options: Any) -> Page:
    page = browser.new_page(**options)
    watch.look_at(page)
    patient(page)
    page.add_init_script(f"sessionStorage.setItem('penstock-api-key', {KEY!r})")
    page.goto(url_of(server))
    page.get_by_label("Application").select_option("loud")
    return page


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    """The page of the application that hears loud words. It must not complain, nor ask another origin."""
    page = opened(browser, server, watch)
    yield page
    page.close()
    assert watch.complaints == []
    assert all(url.startswith(url_of(server)) for url in watch.requests)


def start(page: Page) -> None:
    page.get_by_role("button", name="Start listening").click()


def stop(page: Page) -> None:
    page.get_by_role("button", name="Stop").click()


def state_is(page: Page, state: str, sentence: str, timeout: float = 5000) -> None:
    expect(page.locator(".stream-state")).to_have_attribute("data-state", state, timeout=timeout)
    expect(page.locator(".stream-state")).to_contain_text(sentence)


def words(page: Page, count: int) -> list[str]:
    expect(page.locator(".words li")).to_have_count(count, timeout=10_000)
    return page.locator(".words li").all_inner_texts()


def milliseconds(text: str) -> float:
    found = re.search(r"([\d.,]+) ms", text)
    assert found, text
    return float(found[1].replace(",", ""))


def streams(server: RunningServer) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {KEY}"}
    return server.ask("GET", "/v1/stats", headers=headers)[2]["models"]["loud"]["streams"]


# All levels that are shown, as a number and as text: a moment later they are those of silence.
LEVELS = """() => {
    window.levels = [];
    const [meter, text] = [".level", ".level-text"].map((name) => document.querySelector(name));
    const note = () => levels.push([meter.getAttribute("aria-valuenow"), text.innerText]);
    new MutationObserver(note).observe(meter, { attributes: true });
}"""


@pytest.mark.thorough
@pytest.mark.alone
def test_the_words_of_the_microphone_come_with_level_and_latency(page: Page, server: RunningServer) -> None:
    before = streams(server)
    page.evaluate(LEVELS)
    start(page)
    state_is(page, "live", "live for")
    for said in words(page, WORDS):
        assert re.fullmatch(r"loud\s+\d+ % · [\d.,]+ ms", said)
        assert 0 < milliseconds(said) < 5000
    expect(page.locator(".answer-big")).to_have_text("loud")
    expect(page.get_by_role("log")).to_have_text("loud" * WORDS)
    p50, p98 = map(milliseconds, page.locator(".listen .figure").all_inner_texts())
    assert 0 < p50 <= p98
    stop(page)
    state_is(page, "ended", "all that was heard is answered")
    words(page, WORDS)
    levels: list[list[str]] = page.evaluate("levels")
    assert any(re.fullmatch(r"-[1-3]?\d", level) for level, _ in levels)
    assert any(re.search(r"level −\d+ dB, peak −\d+ dB", text) for _, text in levels)
    # The page sees the end of a stream before the server has let go of it.
    eventually(lambda: streams(server)["open"] == 0, within_s=20)
    after = streams(server)
    assert (after["opened"] - before["opened"], after["aborted"] - before["aborted"]) == (1, 0)
    assert after["chunks"] - before["chunks"] == after["results"] - before["results"] > 40


@pytest.mark.thorough
@pytest.mark.alone
def test_a_file_is_heard_in_real_time_to_its_end(page: Page, voice: Path) -> None:
    expect(page.get_by_role("button", name="Play it")).to_be_disabled()
    page.get_by_label("or a sound file").set_input_files(voice)
    page.get_by_role("button", name="Play it").click()
    state_is(page, "live", "live for")
    expect(page.get_by_label("or a sound file")).to_be_disabled()
    state_is(page, "ended", "all that was heard is answered", timeout=15_000)
    assert len(words(page, WORDS)) == WORDS
    expect(page.get_by_role("button", name="Start listening")).to_be_visible()


def test_events_without_words_are_lines(page: Page) -> None:
    def other(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(lambda message: socket.send(str(message).replace('"event":null', '"event":[0.5, -1]')))

    page.route_web_socket("**/stream", other)
    start(page)
    expect(page.locator("ol.reply li").nth(3)).to_have_text("[0.5,-1]")
    expect(page.locator(".words")).to_be_hidden()


def test_another_application_or_page_ends_the_stream(page: Page, server: RunningServer) -> None:
    start(page)
    state_is(page, "live", "live for")
    page.evaluate("dispatchEvent(new Event('pagehide'))")
    state_is(page, "idle", "not listening")
    start(page)
    state_is(page, "live", "live for")
    page.get_by_label("Application").select_option("doubler")
    expect(page.locator("#json")).to_be_visible()
    expect(page.locator("#rate-title")).to_have_text("Requests")
    page.get_by_label("Application").select_option("loud")
    state_is(page, "idle", "not listening")
    expect(page.locator("#slots-in-use")).to_have_text("0")
    eventually(lambda: streams(server)["open"] == 0, within_s=20)


PROBLEMS = {
    "NotAllowedError": "The browser may not use the microphone.",
    "NotFoundError": "There is no microphone.",
    "NotReadableError": "another program may be using it",
    "AbortError": "The microphone cannot be heard: a reason",
}


@pytest.mark.thorough
def test_why_there_is_no_sound_is_said(page: Page, tmp_path: Path) -> None:
    for name, sentence in PROBLEMS.items():
        page.evaluate(
            """name => navigator.mediaDevices.getUserMedia = async () => {
                throw new DOMException("a reason", name);
            }""",
            name,
        )
        start(page)
        state_is(page, "failed", sentence)
    (tmp_path / "noise.wav").write_bytes(b"no sound at all")
    page.get_by_label("or a sound file").set_input_files(tmp_path / "noise.wav")
    page.get_by_role("button", name="Play it").click()
    state_is(page, "failed", "The browser cannot read this file as sound.")
    page.evaluate("Object.defineProperty(window, 'isSecureContext', { value: false })")
    start(page)
    state_is(page, "failed", "over https:// or at localhost alone")


@pytest.mark.thorough
def test_a_microphone_that_goes_away_ends_the_stream(page: Page) -> None:
    page.evaluate(
        """() => {
            const { mediaDevices } = navigator;
            const open = mediaDevices.getUserMedia.bind(mediaDevices);
            mediaDevices.getUserMedia = async (wishes) => (window.media = await open(wishes));
        }"""
    )
    start(page)
    state_is(page, "live", "live for")
    page.evaluate("media.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    state_is(page, "ended", "The microphone is gone.")


@pytest.mark.thorough
def test_a_refusal_is_said_and_asked_again(page: Page) -> None:
    reason, seen = "12 streams are open, as many as keep 100 ms. Retry after 1 s.", False

    def refuse(socket: WebSocketRoute) -> None:
        if seen:
            socket.connect_to_server()
        else:
            socket.on_message(lambda _: socket.close(code=1013, reason=reason))

    page.route_web_socket("**/stream", refuse)
    start(page)
    state_is(page, "refused", "refused: 12 streams are open, as many as keep 100 ms. Asking again in 1 s.")
    seen = True
    state_is(page, "live", "live for")
    stop(page)
    state_is(page, "ended", "all that was heard is answered")


@pytest.mark.thorough
def test_a_stream_that_does_not_open_is_tried_again_until_one_stops(page: Page) -> None:
    page.evaluate(
        """() => {
            window.WebSocket = class {
                constructor() { setTimeout(() => this.onclose({ code: 1006, reason: "" }), 10); }
                close() {}
            };
        }"""
    )
    start(page)
    state_is(page, "refused", "refused: the server opens no stream now; 0 are open. Asking again in")
    stop(page)
    state_is(page, "idle", "not listening")


@pytest.mark.thorough
def test_why_a_stream_ended_is_said(page: Page) -> None:
    def hang_up(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(
            lambda message: socket.send(message) if "ready" in str(message) else socket.close(code=1011, reason=WHY)
        )

    page.route_web_socket("**/stream", hang_up)
    start(page)
    state_is(page, "failed", f"ended: {WHY}")
    expect(page.get_by_role("button", name="Start listening")).to_be_enabled()

    def refuse(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        socket.on_message(lambda m: socket.close(code=1013, reason=WHY) if '"end"' in str(m) else server.send(m))

    page.route_web_socket("**/stream", refuse)
    start(page)
    state_is(page, "live", "live for")
    stop(page)
    state_is(page, "failed", f"refused: {WHY}")


@pytest.mark.thorough
def test_a_stream_goes_on_over_another_connection(page: Page, server: RunningServer) -> None:
    before = streams(server)
    opened: list[WebSocketRoute] = []
    answers = 0

    def cut_in_the_first_word(socket: WebSocketRoute) -> None:
        opened.append(socket)
        upstream = socket.connect_to_server()

        def answer(message: str | bytes) -> None:
            nonlocal answers
            answers += 1
            # The second attempt is refused.
            if len(opened) == 2 or (len(opened) == 1 and answers == 40):
                socket.close(code=1012, reason=WHY)
            else:
                socket.send(message)

        upstream.on_message(answer)

    page.route_web_socket("**/stream", cut_in_the_first_word)
    start(page)
    said = words(page, WORDS)
    state_is(page, "live", "live for")
    stop(page)
    state_is(page, "ended", "all that was heard is answered")
    assert words(page, WORDS) == said
    assert len(opened) == 3
    assert streams(server)["opened"] - before["opened"] == 3


@pytest.fixture
def ticket_server(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "ticket.key").write_text("1" * 64)
    with RunningServer(
        loud_bundle(tmp_path), "--ticket-key", str(tmp_path / "ticket.key"), "--ticket-s", "0.2"
    ) as server:
        yield server


@pytest.mark.thorough
def test_a_stream_goes_on_with_a_ticket(browser: Browser, ticket_server: RunningServer) -> None:
    page = browser.new_page()
    starts: list[dict[str, Any]] = []
    numbers: list[int] = []

    def cut_after_a_ticket(socket: WebSocketRoute) -> None:
        upstream, first, begins = socket.connect_to_server(), not starts, True

        def ask(message: str | bytes) -> None:
            nonlocal begins
            if isinstance(message, str) and '"start"' in message:
                starts.append(json.loads(message))
            elif isinstance(message, bytes) and begins:
                begins = False
                numbers.append(int.from_bytes(message[:4], "little"))
            upstream.send(message)

        def answer(message: str | bytes) -> None:
            socket.send(message)
            if first and '"ticket"' in str(message) and '"seq"' in str(message):
                socket.close(code=1012, reason=WHY)

        socket.on_message(ask)
        upstream.on_message(answer)

    page.route_web_socket("**/stream", cut_after_a_ticket)
    patient(page)
    page.goto(url_of(ticket_server))
    start(page)
    words(page, WORDS)
    stop(page)
    state_is(page, "ended", "all that was heard is answered")
    page.close()
    assert [("ticket" in start, start["tickets"]) for start in starts] == [(False, True), (True, True)]
    # The chunks that the ticket covers are not sent again.
    assert numbers[0] == 0 < numbers[1]


@pytest.mark.thorough
def test_a_stream_that_does_not_open_has_a_key_asked_for(browser: Browser, server: RunningServer, watch: Watch) -> None:
    page = opened(browser, server, watch)
    expect(page.locator("#slots-total")).not_to_have_text("–")
    # The statistics would ask for the key too, and their dialog would cover the button.
    page.route("**/v1/stats", lambda route: route.continue_(headers=route.request.headers | AUTHORIZED))
    page.evaluate("sessionStorage.setItem('penstock-api-key', 'of-somebody-else')")
    start(page)
    page.get_by_label("API key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    state_is(page, "live", "live for")
    page.close()
    # A browser itself reports every answer of status 4xx.
    assert all("401" in complaint or "WebSocket" in complaint for complaint in watch.complaints)


def test_a_browser_learns_why_there_is_no_stream(page: Page) -> None:
    close = page.evaluate(
        """keys => Promise.all(keys.map(([name, key]) => new Promise((resolve) => {
            const url = `ws://${location.host}/v1/apps/${name}/stream`;
            const socket = new WebSocket(url, ["penstock", `key.${encodeURIComponent(key).replace(/[()]/g, escape)}`]);
            socket.onopen = () => socket.send("what is said before it is heard");
            socket.onclose = ({ code, reason }) => resolve([code, reason]);
        })))""",
        [["nobody", KEY], ["doubler", KEY], ["loud", "of-somebody-else"]],
    )
    assert close == [
        [4404, "There is no model 'nobody' here; there is 'loud', 'doubler'."],
        [1007, "'doubler' takes single requests, not streams; POST to /v1/apps/doubler."],
        [4401, "This server requires an API key; send 'Authorization: Bearer KEY'."],
    ]


def test_it_is_started_and_stopped_with_the_keyboard_alone(page: Page) -> None:
    for _ in range(5):
        page.keyboard.press("Tab")
        if page.locator("button.lead").evaluate("button => button === document.activeElement"):
            break
    page.keyboard.press("Enter")
    state_is(page, "live", "live for")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    expect(page.get_by_role("status").filter(has_text="live")).to_have_text("live")
    page.keyboard.press("Space")
    state_is(page, "ended", "all that was heard is answered")


def test_an_utterance_that_is_decoded_again_gets_its_better_words(page: Page) -> None:
    script = """import('/page/heard.js').then(({ Heard }) => {
        const heard = new Heard();
        const said = (text) => text.split(" ").map((word) => ({ word, probability: 0.9 }));
        heard.take({ text: "on", words: said("on"), final: true, utterance: { text: "on", words: said("on") } }, 1);
        heard.take({ text: "five nin", words: said("five") }, 1);
        heard.take({ text: "estopgo", words: said("ninestopgo") }, 1);
        heard.take({ text: "", words: [], final: true, utterance: { text: "", words: said("five nine stop go") } }, 1);
        heard.take({ text: "yes", words: said("yes") }, 1);
        heard.take({ text: "", words: said("no"), final: true }, 1);
        return [...heard.words.querySelectorAll("b")].map((word) => word.textContent);
    })"""
    assert page.evaluate(script) == ["on", "five", "nine", "stop", "go", "yes", "no"]


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(
    browser: Browser, server: RunningServer, watch: Watch, scheme: Literal["light", "dark"]
) -> None:
    page = opened(browser, server, watch, color_scheme=scheme)
    script = """import('/page/heard.js').then(({ Heard }) => {
        const heard = new Heard();
        for (let word = 0; word < 40; word++) heard.take({ words: [{ word: "seventeen", probability: 0.98 }] }, 12.3);
        document.querySelector(".listen .answer").replaceWith(heard.view);
    })"""
    page.evaluate(script)
    page.locator(".shell summary").click()
    for width, height in ((320, 640), (844, 390), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        expect(page.locator("html")).to_have_js_property("scrollWidth", width)
        for seen in (".lead", ".level", ".file button", ".answer-big", ".words li", ".shell code"):
            box = page.locator(seen).last.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
    for text in (".stream-state", ".level-text", ".words small", ".lead"):
        assert contrast(page, text, text if text == ".lead" else "body") >= 4.5, text
    page.close()
    assert watch.complaints == []


def contrast(page: Page, text: str, ground: str) -> float:
    """Of a text's colour with that of its ground, WCAG 2.2."""
    colours: list[str] = page.evaluate(
        """([text, ground]) => [getComputedStyle(document.querySelector(text)).color,
            getComputedStyle(document.querySelector(ground)).backgroundColor]""",
        [text, ground],
    )
    darker, lighter = sorted(map(luminance, colours))
    return (lighter + 0.05) / (darker + 0.05)


SOCKET = """
class Socket {
    sent = []; bufferedAmount = 0; closed = null;
    send(data) { this.sent.push(typeof data === "string" ? JSON.parse(data) : [...new Int32Array(data.buffer)]); }
    close(code) { this.closed = code; }
    say(said) { this.onmessage({ data: JSON.stringify(said) }); }
}
const told = [];
const listener = {
    ready: () => told.push("ready"), result: (event) => told.push(event), over: (end) => told.push(end),
};
const socket = new Socket();
const stream = new Stream(() => socket, 8000, 2, listener);
const chunk = (value) => Int16Array.of(value, 0);
"""


@pytest.fixture(scope="module")
def scripts(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """A page whose modules are called one by one."""
    page = browser.new_page()
    page.goto(f"{url_of(server)}page/icon.svg")
    yield page
    page.close()


def in_page(page: Page, script: str) -> Any:
    return page.evaluate(f"import('/page/stream.js').then(({{ Stream }}) => {{ {SOCKET} {script} }})")


START = {"type": "start", "rate_hz": 8000, "encoding": "pcm_s16le", "events": "json", "tickets": True}


def test_chunks_are_numbered_held_back_and_all_sent_before_the_end(scripts: Page) -> None:
    sent, told, behind_s = in_page(
        scripts,
        """stream.send(chunk(9));  // before the stream is ready, so it is not kept
        socket.onopen();
        socket.say({ type: "ready" });
        stream.send(chunk(5));
        socket.bufferedAmount = 1e6;
        stream.send(chunk(6));
        stream.send(chunk(7));
        const behindS = stream.behindS;
        stream.end();
        socket.bufferedAmount = 0;
        socket.say({ type: "result", seq: 0, event: null });
        for (const seq of [1, 2, 3]) socket.say({ type: "result", seq, event: { seq } });
        socket.say({ type: "end", chunks: 3 });
        socket.onclose({ code: 1000, reason: "" });
        return [socket.sent, told, behindS];""",
    )
    assert sent == [START, [0, 5], [1, 6], [2, 7], {"type": "end"}]
    assert told == ["ready", None, {"seq": 1}, {"seq": 2}, {"seq": 3}, {"why": "", "opened": True}]
    assert behind_s == 6


def test_a_stream_that_falls_far_behind_is_ended(scripts: Page) -> None:
    told, closed = in_page(
        scripts,
        """socket.onopen();
        socket.say({ type: "ready" });
        for (let number = 0; number < 6; number++) stream.send(chunk(number));
        socket.onclose({ code: 1000, reason: "" });
        return [told, socket.closed];""",
    )
    assert told == ["ready", {"why": "Answers are 10 s behind: the network or the server is too slow.", "opened": True}]
    assert closed == 1000


ANOTHER = """
const sockets = [socket];
const open = () => sockets.at(-1);
const again = async (close) => {
    const left = sockets.at(-1);
    sockets.push(new Socket());
    left.onclose(close);
    while (!sockets.at(-1).onopen) await new Promise((resolve) => setTimeout(resolve, 5));
    return sockets.at(-1);
};
const lasting = new Stream(open, 8000, 2, listener);
socket.onopen();
socket.say({ type: "ready" });
"""


def test_all_chunks_are_sent_again_and_results_that_came_are_dropped(scripts: Page) -> None:
    sent, told = in_page(
        scripts,
        ANOTHER
        + """return (async () => {
            lasting.send(chunk(5));
            lasting.send(chunk(6));
            socket.say({ type: "result", seq: 0, event: "five" });
            const other = await again({ code: 1012, reason: "" });
            lasting.send(chunk(7));  // while it is gone
            socket.say({ type: "result", seq: 1, event: "too late" });
            other.onopen();
            other.say({ type: "ready" });
            for (const [seq, event] of ["again", "six", "seven"].entries()) other.say({ type: "result", seq, event });
            lasting.end();
            // The last results are lost as well.
            const third = await again({ code: 1006, reason: "" });
            third.onopen();
            third.say({ type: "ready" });
            for (const [seq, event] of ["a", "b", "c", "end"].entries()) third.say({ type: "result", seq, event });
            third.say({ type: "end", chunks: 3 });
            third.onclose({ code: 1000, reason: "" });
            return [sockets.map(({ sent }) => sent), told];
        })();""",
    )
    end = {"type": "end"}
    assert sent == [
        [START, [0, 5], [1, 6]],
        [START, [0, 5], [1, 6], [2, 7], end],
        [START, [0, 5], [1, 6], [2, 7], end],
    ]
    assert told == ["ready", "five", "six", "seven", "end", {"why": "", "opened": True}]


# What is sent before a ticket, and after it.
TICKET = """
lasting.send(chunk(5));
lasting.send(chunk(6));
for (const [seq, event] of ["five", "six"].entries()) socket.say({ type: "result", seq, event });
socket.say({ type: "ticket", seq: 0, ticket: "old" });
socket.say({ type: "ticket", seq: 1, ticket: "new" });
lasting.send(chunk(7));
"""


def test_another_connection_goes_on_from_the_newest_ticket(scripts: Page) -> None:
    sent, told = in_page(
        scripts,
        ANOTHER
        + TICKET
        + """return (async () => {
            const other = await again({ code: 1006, reason: "" });
            other.onopen();
            other.say({ type: "ready", next: 2 });
            other.say({ type: "result", seq: 2, event: "seven" });
            lasting.end();
            other.say({ type: "result", seq: 3, event: "end" });
            other.say({ type: "end", chunks: 3 });
            other.onclose({ code: 1000, reason: "" });
            return [other.sent, told];
        })();""",
    )
    assert sent == [START | {"ticket": "new"}, [2, 7], {"type": "end"}]
    assert told == ["ready", "five", "six", "seven", "end", {"why": "", "opened": True}]


def test_a_ticket_that_is_refused_is_forgotten(scripts: Page) -> None:
    sent = in_page(
        scripts,
        ANOTHER
        + TICKET
        + """return (async () => {
            const second = await again({ code: 1006, reason: "" });
            second.onopen();
            const third = await again({ code: 4412, reason: "The ticket has expired." });
            third.onopen();
            third.say({ type: "ready" });
            lasting.abandon();
            return [second.sent, third.sent];
        })();""",
    )
    assert sent == [[START | {"ticket": "new"}], [START, [0, 5], [1, 6], [2, 7]]]


def test_a_ticket_that_is_refused_ends_a_stream_whose_beginning_is_gone(scripts: Page) -> None:
    sent, told = in_page(
        scripts,
        ANOTHER
        + TICKET
        + """return (async () => {
            lasting.send(new Int16Array((16 << 20) / 2 - 4));  // more than is kept, but for what the ticket covers
            const second = await again({ code: 1006, reason: "" });
            second.onopen();
            second.onclose({ code: 4412, reason: "The ticket has expired." });
            return [second.sent, told];
        })();""",
    )
    assert sent == [START | {"ticket": "new"}]
    assert told[-1] == {"why": "The ticket has expired.", "opened": True}


def test_chunks_that_a_ticket_covers_are_dropped_first(scripts: Page) -> None:
    kept = scripts.evaluate(
        """import('/page/sent.js').then(({ SentChunks }) => {
            const chunks = new SentChunks(10), seen = [];
            const see = () => seen.push([chunks.canResume, chunks.ticket]);
            const send = (count) => { for (; count > 0; count--) { chunks.add(new Int16Array(1)); chunks.next(); } };
            send(4);
            chunks.takeTicket("one", 1);
            see();
            send(2);  // the first two are dropped
            see();
            send(3);  // more than the ticket covers; the next one may
            see();
            chunks.takeTicket("two", 7);
            see();
            chunks.begin();
            seen.push([chunks.next()[0], chunks.areHeld]);
            return seen;
        })"""
    )
    assert kept == [[True, "one"], [True, "one"], [False, None], [True, "two"], [8, False]]


@pytest.mark.parametrize(("ticket", "begins"), [("", 0), ('chunks.takeTicket("stale", 0);', 1)])
def test_chunks_that_come_while_the_connection_is_gone_drop_none_that_is_sent_again(
    scripts: Page, ticket: str, begins: int
) -> None:
    numbers = scripts.evaluate(
        f"""import('/page/sent.js').then(({{ SentChunks }}) => {{
            const chunks = new SentChunks(10), sent = [];
            for (let number = 0; number < 5; number++) {{ chunks.add(Int16Array.of(number)); chunks.next(); }}
            {ticket}
            chunks.begin();
            chunks.add(Int16Array.of(5));
            chunks.add(Int16Array.of(6));
            while (chunks.areHeld) {{ const [number, samples] = chunks.next(); sent.push([number, samples[0]]); }}
            return sent;
        }})"""
    )
    assert numbers == [[number, number] for number in range(begins, 7)]


def test_a_connection_that_does_not_answer_is_replaced(scripts: Page) -> None:
    waited_ms, is_lost, closed = in_page(
        scripts,
        ANOTHER
        + """return (async () => {
            const begun = performance.now();
            sockets.push(new Socket());
            lasting.send(chunk(5));
            while (!lasting.isLost) await new Promise((resolve) => setTimeout(resolve, 10));
            const waitedMs = performance.now() - begun;
            while (!sockets[1].onopen) await new Promise((resolve) => setTimeout(resolve, 5));
            sockets[1].onopen();
            sockets[1].say({ type: "ready" });
            const { isLost } = lasting;
            lasting.abandon();
            return [waitedMs, isLost, socket.closed];
        })();""",
    )
    assert waited_ms >= 1000
    assert not is_lost
    assert closed == 1000


@pytest.mark.parametrize(
    ("before", "close", "why"),
    [
        ("lasting.send(new Int16Array((16 << 20) / 2 + 2));", {"code": 1006, "reason": ""}, "The connection broke off"),
        ('socket.say({ type: "step", segment: 0 });', {"code": 1012, "reason": "Bye."}, "Bye."),
        ('socket.say({ type: "end", chunks: 0 });', {"code": 1006, "reason": ""}, ""),
        ("", {"code": 1011, "reason": "The network failed."}, "The network failed."),
    ],
    ids=["too long", "a chain", "ended", "refused"],
)
def test_what_cannot_go_on_ends_with_its_connection(
    scripts: Page, before: str, close: dict[str, Any], why: str
) -> None:
    told = in_page(
        scripts, f"listener.segment = () => {{}}; {ANOTHER} {before} socket.onclose({json.dumps(close)}); return told;"
    )
    assert told[-1]["why"].startswith(why)
    assert told[-1]["opened"]


def test_attempts_end_with_the_first_reason_or_at_once_with_a_refusal(scripts: Page) -> None:
    told, asked = in_page(
        scripts,
        ANOTHER
        + """return (async () => {
            await again({ code: 1012, reason: "Bye." });
            const third = await again({ code: 1013, reason: "Full. Retry after 0.1 s." });
            const asked = sockets.length;
            third.onclose({ code: 4404, reason: "There is no such model." });
            return [told, asked];
        })();""",
    )
    assert told == ["ready", {"why": "There is no such model.", "opened": True}]
    assert asked == 3


def test_a_stream_that_is_stopped_while_its_connection_is_gone_ends_soon(scripts: Page) -> None:
    told = in_page(
        scripts,
        ANOTHER
        + """return (async () => {
            const now = performance.now.bind(performance);
            const second = await again({ code: 1012, reason: "Bye." });
            lasting.end();
            performance.now = () => now() + 10_500;
            second.onclose({ code: 1006, reason: "" });
            performance.now = now;
            return told;
        })();""",
    )
    assert [each if isinstance(each, str) else each["why"] for each in told] == ["ready", "Bye."]


@pytest.mark.parametrize(
    ("code", "reason", "end"),
    [
        (1013, "Busy. Retry after 3 s.", {"why": "Busy.", "opened": True, "retryAfterMs": 3000}),
        (1012, "", {"why": "The connection broke off (code 1012).", "opened": True, "retryAfterMs": 5000}),
        (1006, "", {"why": "The connection broke off (code 1006).", "opened": True}),
        (4408, "No samples came for 9 s.", {"why": "No samples came for 9 s.", "opened": True}),
        (4401, "A key is wanted.", {"why": "A key is wanted.", "opened": True, "wantsKey": True}),
    ],
)
def test_every_close_has_its_reason(scripts: Page, code: int, reason: str, end: dict[str, Any]) -> None:
    close = f"socket.onopen(); socket.onclose({{ code: {code}, reason: {reason!r} }}); return told;"
    assert in_page(scripts, close) == [end]
