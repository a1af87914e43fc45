"""The page of an application that is not drawn: a file, or numbers as JSON, and the answer as what it is."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough

APPLICATION = '''
"""Three numbers and what becomes of them."""

import torch

from penstock.core.application import Application
from penstock.core.errors import InvalidInput
from penstock.core.spec import TensorSpec


class Double(torch.nn.Module):
    def forward(self, numbers_BK):
        return numbers_BK * 2


def decode(body, content_type):
    raise InvalidInput("This is not a table that can be read.")


app = Application(
    name="double",
    description="Twice each number.",
    input=TensorSpec(dtype="float32", shape=(1, 3), meaning="three lengths", units="m", name="lengths"),
    output=TensorSpec(dtype="float32", shape=(1, 3), meaning="twice the lengths", units="m", name="doubled"),
    model=Double,
    decode=decode,
    accepts=("text/csv",),
    max_body_bytes=1000,
)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("double")
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.ones((1, 1, 3), np.float32), to=folder / "bundle")
    with RunningServer(folder / "bundle") as server:
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
    assert all(url.startswith(url_of(server)) for url in watch.requests)


def send(page: Page, text: str) -> None:
    page.get_by_label("or the numbers as JSON").fill(text)
    page.get_by_role("button", name="Send").click()


def test_the_page_says_what_is_taken_and_begins_with_an_example(page: Page, watch: Watch) -> None:
    expect(page.locator("h1")).to_have_text("double")
    expect(page.locator(".spec")).to_have_text("lengths: float32[1, 3], three lengths (m)")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("doubled", exact=True)).to_have_text("0  2, 2, 2")
    expect(page.locator(".recorded")).to_have_text("")
    page.get_by_role("button", name="Example 1").click()
    expect(page.locator(".recorded")).to_have_text("the recorded answer is the same")
    assert watch.complaints == []


def test_numbers_are_answered_with_numbers(page: Page, watch: Watch) -> None:
    page.get_by_label("or the numbers as JSON").fill("[[1, 2.5, 3]]")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_label("doubled", exact=True)).to_have_text("0  2, 5, 6")
    expect(page.locator(".answer > .reply")).to_have_text("")
    expect(page.locator(".answer-time")).to_contain_text("round trip")
    assert watch.complaints == []


@pytest.mark.parametrize("text", ["[[1, 2]]", "{", '[["a", "b", "c"]]'])
def test_what_is_wrong_with_the_numbers_is_the_servers_sentence(page: Page, text: str) -> None:
    with page.expect_response("**/v1/apps/double") as caught:
        send(page, text)
    sentence = caught.value.json()["error"]
    expect(page.locator(".message")).to_have_text(sentence)
    expect(page.locator(".tensors")).to_be_hidden()
    send(page, "[[0, 0, 21]]")
    expect(page.get_by_label("doubled", exact=True)).to_contain_text("42")
    expect(page.locator(".message")).to_have_text("")


def test_a_file_is_sent_as_what_it_is(page: Page, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("1,2,3")
    page.get_by_label("A file").set_input_files(table)
    expect(page.locator(".message")).to_have_text("This is not a table that can be read.")
    assert page.get_by_label("A file").get_attribute("accept") == "text/csv"


def test_a_file_that_is_too_large_is_not_sent(page: Page, watch: Watch, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("1,2,3\n" * 1000)
    page.get_by_label("A file").set_input_files(table)
    expect(page.locator(".message")).to_have_text("The file has 6,000 bytes; at most 1,000 are taken.")
    assert not any(url.endswith("/v1/apps/double") for url in watch.requests)
