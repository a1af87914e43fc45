"""The page of an application with several tensors: inputs as JSON by name, and the answer tensor by tensor."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer
from tests.support.text import write_text

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_text(tmp_path_factory.mktemp("text"))) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: RunningServer, watch: Watch) -> Iterator[Page]:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    # The first example takes the place of what is in the text box.
    page.get_by_role("button", name="Example 1", exact=True).wait_for()
    yield page
    page.close()
    # A browser itself reports every answer of status 4xx.
    assert all("status of 4" in complaint for complaint in watch.complaints)


def test_the_example_is_answered_tensor_by_tensor(page: Page, watch: Watch) -> None:
    specs = page.locator(".spec").all_inner_texts()
    assert specs[0] == "input_ids: int64[tokens ≤ 12], token ids"
    assert specs[1].startswith("attention_mask: int64[tokens ≤ 12]")
    given = json.loads(page.locator("#json").input_value())
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer-time")).to_contain_text("round trip")
    assert page.locator(".tensor h2").all_inner_texts() == [
        "logits scores",
        "tags kind of each word",
        "multiples ids that are multiples of three",
    ]
    assert page.locator(".bars li > :first-child").all_inner_texts() == ["bad", "so so", "good"]
    assert page.locator(".bars [data-largest]").count() == 1
    tags = page.get_by_label("tags", exact=True).inner_text().splitlines()
    assert len(tags) == len(given["input_ids"])
    assert all(line.split()[1] in ("verb", "noun") for line in tags)
    multiples = [each for each in given["input_ids"] if each % 3 == 0]
    expect(page.get_by_label("multiples", exact=True)).to_have_text(", ".join(map(str, multiples)) or "none")
    assert watch.complaints == []


def test_a_refusal_is_the_servers_sentence_and_the_next_answer_comes(page: Page) -> None:
    box = page.get_by_label("The inputs as JSON, by name")
    box.fill('{"input_ids": [3], "attention_mask": [1, 1]}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message")).to_contain_text("send both equally long")
    box.fill('{"input_ids": [1], "attention_mask": [1]}')
    page.keyboard.press("Control+Enter")
    expect(page.get_by_label("multiples", exact=True)).to_have_text("none")
    expect(page.locator(".message")).to_have_text("")


def test_the_command_for_a_shell_sends_json(page: Page) -> None:
    page.locator(".shell summary").click()
    expect(page.locator("details code")).to_contain_text("@input.json -H 'Content-Type: application/json'")


TENSORS = {"logits": [0.5, 1.5, 2.5], "tags": [[0.25, 0.75]], "multiples": [3]}


OWN: list[dict[str, Any]] = [
    {"tags": ["noun"]},
    {"tags": "noun"},
    {"tags": [[0.25, 0.5, 0.25]]},
    {"tags": [["verb", "noun"]]},
    {"logits": ["good"]},
    {"logits": [0.5]},
    {"multiples": [[3]]},
    {"multiples": None},
]


def test_a_reply_of_the_applications_own_is_shown_as_it_came(page: Page) -> None:
    reply = TENSORS
    page.route("**/v1/apps/text", lambda route: route.fulfill(json=reply))
    for own in OWN:
        # Tensors in between, so that each is shown anew.
        reply = TENSORS
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_label("multiples", exact=True)).to_have_text("3")
        expect(page.locator(".tensors")).to_be_visible()
        reply = TENSORS | own
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".tensors")).to_be_hidden()
        assert json.loads(page.locator(".answer > pre.reply").inner_text()) == reply
        expect(page.locator(".message")).to_have_text("")


def test_ids_are_listed_however_many_there_are(page: Page) -> None:
    page.route("**/v1/apps/text", lambda route: route.fulfill(json=TENSORS | {"multiples": list(range(0, 36, 3))}))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("multiples", exact=True)).to_have_text(", ".join(map(str, range(0, 36, 3))))
    assert page.locator(".tensors .signal").count() == 0
    assert page.locator(".examples svg").count() == 0


def test_a_picture_of_numbers_says_what_black_and_white_are(page: Page) -> None:
    found = page.evaluate(
        """async () => {
            const { drawingOf } = await import("/page/values.js");
            const rows = Array.from({ length: 8 }, (_, row) => Array.from({ length: 8 }, (_, at) => (row + at) / 16));
            const spec = { name: "heat", dtype: "float32", shape: [8, 8], labels: [], units: "K" };
            const grey = drawingOf({ ...spec, dtype: "uint8", limits: null }, rows.map((row) => row.map(Math.round)));
            return [drawingOf(spec, rows).innerText, grey.tagName];
        }"""
    )
    assert found == ["black is 0 K, white 0.875 K", "CANVAS"]
