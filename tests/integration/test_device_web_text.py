"""The offline app of a network of several named tensors, in headless Chromium: JSON in, outputs by name."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.core.errors import InvalidInput
from penstock.core.pack import EXAMPLE, Pack
from penstock.device.pack_engine import PackEngine
from tests.support.device_page import Device, chromium
from tests.support.named import LONGEST, shared_mood, text


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return shared_mood(tmp_path_factory)[0]


@pytest.fixture(scope="module")
def engine(pack: Pack) -> PackEngine:
    return PackEngine(pack)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def host(pack: Pack) -> Iterator[CountingHost]:
    with CountingHost(pack.folder) as host:
        yield host


@pytest.fixture(scope="module")
def device(browser: Browser, host: CountingHost) -> Iterator[Device]:
    device = Device(browser)
    device.installed(host).close()
    yield device
    device.close(host)


@pytest.fixture
def page(device: Device, host: CountingHost) -> Iterator[Page]:
    page = device.installed(host)
    yield page
    page.close()


def shown(page: Page, inputs: object) -> None:
    page.get_by_label("The inputs as JSON, by name").fill(inputs if isinstance(inputs, str) else json.dumps(inputs))
    page.get_by_role("button", name="Run").click()


def test_with_the_network_gone_text_is_answered_by_name(device: Device, host: CountingHost, engine: PackEngine) -> None:
    before = len(host.sent)
    host.stop()
    page = device.open(host)
    example = json.loads((host.folder / EXAMPLE).read_bytes())
    # The example is there, and answered at once.
    expect(page.locator(".output")).to_have_count(2, timeout=30_000)
    assert json.loads(page.get_by_label("The inputs as JSON, by name").input_value()) == example
    check_shown(page, engine, example)
    for tokens in (1, LONGEST, 2):
        inputs = {name: array.tolist() for name, array in text(tokens, seed=5).items()}
        shown(page, inputs)
        expect(page.get_by_role("region", name="tags").locator("li")).to_have_count(tokens)
        check_shown(page, engine, inputs)
    assert len(host.sent) == before
    page.close()
    host.start()


def check_shown(page: Page, engine: PackEngine, inputs: dict[str, list[int]]) -> None:
    found = engine.predict(inputs)
    labels = {output.name: output.labels for output in engine.pack.outputs}
    mood = page.get_by_role("region", name="mood")
    order = np.argsort(-found["mood"], kind="stable")
    assert [line.split()[0] for line in mood.locator("li").all_inner_texts()] == [labels["mood"][at] for at in order]
    shares = [float(line.split()[1]) for line in mood.locator("li").all_inner_texts()]
    assert shares == pytest.approx(100 * found["mood"][order], abs=0.06)
    tags = page.get_by_role("region", name="tags").locator("li b").all_inner_texts()
    assert tags == [labels["tags"][at] for at in found["tags"].argmax(-1)]


ONE = {"input_ids": [3], "attention_mask": [1]}
WRONG: list[Any] = [
    {"input_ids": [3]},
    ONE | {"more": [1]},
    [3],
    "text",
    7,
    None,
    {},
    ONE | {"input_ids": [3, 4]},
    ONE | {"input_ids": []},
    ONE | {"input_ids": [3] * 25, "attention_mask": [1] * 25},
    ONE | {"input_ids": [50]},
    ONE | {"input_ids": [-1]},
    ONE | {"input_ids": [1.5]},
    ONE | {"input_ids": ["a"]},
    ONE | {"input_ids": [None, "a"], "attention_mask": [1, 1]},
    ONE | {"input_ids": 3},
    ONE | {"input_ids": [[3]]},
    ONE | {"input_ids": [[]]},
    ONE | {"input_ids": {"a": 1}},
    ONE | {"input_ids": [3, [4]], "attention_mask": [1, 1]},
    ONE | {"input_ids": [2**63]},
]


def test_what_does_not_fit_is_answered_with_the_sentence_of_python(page: Page, engine: PackEngine) -> None:
    expect(page.locator(".output")).to_have_count(2, timeout=30_000)
    for inputs in WRONG:
        with pytest.raises(InvalidInput) as refused:
            engine.predict(inputs)
        shown(page, json.dumps(inputs))
        expect(page.locator("#type-state")).to_have_text(str(refused.value))
        expect(page.locator(".output")).to_have_count(0)
    shown(page, '{"input_ids": [1,')
    expect(page.locator("#type-state")).to_contain_text("The text is not JSON (")
    shown(page, ONE)
    expect(page.locator(".output")).to_have_count(2)
    expect(page.locator("#type-state")).to_have_text("")


SHAPES = [
    ((3,), (5,)),
    ((5,), (3,)),
    ((2, 3), (4, 5)),
    ((4, 5), (2, 3)),
    ((2, 3, 2), (3, 1, 2)),
    ((0, 4), (2, 4)),
    ((), ()),
]


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_tensors_are_padded_and_cut_as_in_numpy(page: Page, dtype: str) -> None:
    for before, after in SHAPES:
        array = np.arange(1, 1 + np.prod(before, dtype=int)).reshape(before)
        expected = np.zeros(after, int)
        common = tuple(slice(min(sizes)) for sizes in zip(before, after, strict=True))
        expected[common] = array[common]
        found = page.evaluate(
            """async ([given, shape, before, after, dtype]) => {
                const { fromNumbers, reframe, toNumbers } = await import("./tensors.js");
                const spec = { name: "x", dtype, shape: shape.map((size, at) => ({ name: `d${at}`, min: 0, max: 9 })) };
                const { x } = fromNumbers([spec], { x: given });
                return [x.shape, toNumbers(reframe(x.values, before, after), after)];
            }""",
            [array.tolist(), before, before, after, dtype],
        )
        assert found == [[size if 0 not in before[:at] else 9 for at, size in enumerate(before)], expected.tolist()]


@pytest.mark.parametrize("width", [320, 1280])
def test_every_screen_shows_the_text_box_without_scrolling_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    expect(page.locator(".output")).to_have_count(2, timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
