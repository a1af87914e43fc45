"""The content security policy of the server's page and of the offline app: what got into a page runs nothing."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import penstock
from tests.support.page import url_of
from tests.support.serving import RunningServer, write_doubler

DIRECTIVES = ("script-src-elem", "script-src-attr", "base-uri", "connect-src")
INJECTED = """async (expected) => {
    const base = document.createElement("base");
    base.href = "https://other.example/";
    const script = document.createElement("script");
    script.textContent = "window.ran = 'inline'";
    const handler = document.createElement("img");
    handler.setAttribute("onerror", "window.ran = 'handler'");
    const handled = new Promise(resolve => handler.addEventListener("error", resolve));
    handler.src = "data:,";
    document.head.append(base, script);
    document.body.append(handler);
    let sent = true;
    try { await fetch("http://127.0.0.1:1/", {mode: "no-cors"}); } catch { sent = false; }
    await handled;
    // What was blocked is reported a little later.
    const isReported = () => expected.every(directive => window.blocked.includes(directive));
    for (let left = 1000; left > 0 && !isReported(); left--) await new Promise(resolve => setTimeout(resolve, 10));
    return [window.ran ?? null, document.baseURI, sent, window.blocked];
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("doubler"))) as server:
        yield server


def test_injected_markup_runs_and_sends_nothing(browser: Browser, server: RunningServer) -> None:
    page = browser.new_page()
    page.add_init_script(
        "window.blocked = []; document.addEventListener('securitypolicyviolation', "
        "event => window.blocked.push(event.effectiveDirective))"
    )
    page.goto(url_of(server))
    ran, base, sent, blocked = page.evaluate(INJECTED, DIRECTIVES)
    page.close()
    assert (ran, base, sent) == (None, url_of(server), False)
    assert set(DIRECTIVES) <= set(blocked)


def test_the_policy_of_the_offline_app_allows_nothing_inline() -> None:
    text = (Path(penstock.__file__).parent / "device" / "web" / "index.html").read_text()
    found = re.search(r'<meta http-equiv="content-security-policy" content="([^"]*)"', text)
    assert found is not None
    policy = dict(each.strip().split(" ", 1) for each in found[1].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert (policy["object-src"], policy["base-uri"]) == ("'none'", "'none'")
    assert "unsafe-inline" not in found[1]
    assert "https:" not in found[1]
