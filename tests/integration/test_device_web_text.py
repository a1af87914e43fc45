"""The offline app of a network of several named tensors, in headless Chromium: JSON in, outputs by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.core.errors import InvalidInput
from penstock.core.packs.pack import Pack
from penstock.core.packs.pack_tensors import by_name
from penstock.core.record import chunk_spec
from penstock.device.pack_engine import PackEngine
from penstock.verify.browser import TENSORS
from tests.support.device_fixtures import browser_fixture, device_fixture, host_fixture, page_fixture
from tests.support.device_page import Device
from tests.support.named import LONGEST, shared_mood, text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return shared_mood(tmp_path_factory)[0]


@pytest.fixture(scope="module")
def engine(pack: Pack) -> PackEngine:
    return PackEngine(pack)


@pytest.fixture(scope="module")
def pack_folder(pack: Pack) -> Path:
    return pack.folder


browser = browser_fixture()
host = host_fixture()
device = device_fixture()
page = page_fixture()


def shown(page: Page, inputs: object) -> None:
    page.get_by_label("The inputs as JSON, by name").fill(inputs if isinstance(inputs, str) else json.dumps(inputs))
    page.get_by_role("button", name="Run").click()


def test_with_the_network_gone_text_is_answered_by_name(device: Device, host: CountingHost, engine: PackEngine) -> None:
    host.stop()
    before = len(host.sent)
    page = device.open(host)
    # The first example is there, and answered at once.
    expect(page.locator("#type-outputs .output")).to_have_count(2, timeout=30_000)
    check_examples(page, engine)
    for tokens in (1, LONGEST, 2):
        inputs = {name: array.tolist() for name, array in text(tokens, seed=5).items()}
        shown(page, inputs)
        expect(page.locator("#type-outputs").get_by_role("region", name="tags").locator("li")).to_have_count(tokens)
        check_shown(page, engine, inputs)
    assert len(host.sent) == before
    page.close()
    host.start()


def check_examples(page: Page, engine: PackEngine) -> None:
    golden, spec = engine.pack.golden(), chunk_spec(engine.pack.inputs)
    example: dict[str, Any] = {}
    buttons = page.locator(".examples button")
    expect(buttons).to_have_count(len(golden.inputs))
    assert len(golden.inputs) > 1
    for number, given in reversed(list(enumerate(golden.inputs))):
        example = {name: array.tolist() for name, array in by_name(spec, given).items()}
        buttons.nth(number).click()
        expect(buttons.nth(number)).to_have_attribute("aria-pressed", "true")
        assert json.loads(page.get_by_label("The inputs as JSON, by name").input_value()) == example
        tags = page.locator("#type-outputs").get_by_role("region", name="tags").locator("li")
        expect(tags).to_have_count(int(given["tokens"]))
        check_shown(page, engine, example)
        line = page.locator(".recorded > summary").inner_text()
        assert line.startswith("Recorded answer: ")
        assert "is the same" in line or float(line.split()[-3]) < 1e-5
    page.locator(".recorded > summary").click()
    expect(page.locator(".recorded .output")).to_have_count(2)
    # What is no example has nothing recorded.
    shown(page, example | {"input_ids": [3] * len(example["input_ids"])})
    expect(page.locator(".recorded")).to_be_hidden()
    expect(page.locator(".examples [aria-pressed]")).to_have_count(0)


def check_shown(page: Page, engine: PackEngine, inputs: dict[str, list[int]]) -> None:
    # An answer of as many tokens may be there from before.
    expect(page.locator("#type-outputs")).to_have_attribute("aria-busy", "false")
    found = engine.predict(inputs)
    labels = {output.name: output.labels for output in engine.pack.outputs}
    mood = page.locator("#type-outputs").get_by_role("region", name="mood")
    order = np.argsort(-found["mood"], kind="stable")
    assert [line.split()[0] for line in mood.locator("li").all_inner_texts()] == [labels["mood"][at] for at in order]
    shares = [float(line.split()[1]) for line in mood.locator("li").all_inner_texts()]
    assert shares == pytest.approx(100 * found["mood"][order], abs=0.06)
    tags = page.locator("#type-outputs").get_by_role("region", name="tags").locator("li b").all_inner_texts()
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
    ONE | {"input_ids": [True]},
    ONE | {"input_ids": [None, "a"], "attention_mask": [1, 1]},
    ONE | {"input_ids": 3},
    ONE | {"input_ids": [[3]]},
    ONE | {"input_ids": [[]]},
    ONE | {"input_ids": {"a": 1}},
    ONE | {"input_ids": [3, [4]], "attention_mask": [1, 1]},
    ONE | {"input_ids": [2**64]},
    ONE | {"input_ids": [-(2**64)]},
    ONE | {"input_ids": [1.5], "attention_mask": [1]},
    ONE | {"input_ids": [0.00001], "attention_mask": [1]},
]


def test_what_does_not_fit_is_answered_with_the_sentence_of_python(page: Page, engine: PackEngine) -> None:
    expect(page.locator("#type-outputs .output")).to_have_count(2, timeout=30_000)
    for inputs in WRONG:
        with pytest.raises(InvalidInput) as refused:
            engine.predict(inputs)
        shown(page, json.dumps(inputs))
        expect(page.locator("#type-state")).to_have_text(str(refused.value))
        expect(page.locator("#type-outputs .output")).to_have_count(0)
    shown(page, '{"input_ids": [1,')
    expect(page.locator("#type-state")).to_contain_text("The text is not JSON (")
    shown(page, ONE)
    expect(page.locator("#type-outputs .output")).to_have_count(2)
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
                const { fromNumbers, reframe, toText } = await import("./tensors.js");
                const spec = { name: "x", dtype, shape: shape.map((size, at) => ({ name: `d${at}`, min: 0, max: 9 })) };
                const { x } = fromNumbers([spec], { x: given });
                return [x.shape, JSON.parse(toText(reframe(x.values, before, after), after))];
            }""",
            [array.tolist(), before, before, after, dtype],
        )
        assert found == [[size if 0 not in before[:at] else 0 for at, size in enumerate(before)], expected.tolist()]


# JSON of the tensors' numbers and lengths, or the sentence of the refusal.
READ = """async ([specs, text]) => {
    const { fromNumbers, lengthsOf, toText } = await import("./tensors.js");
    try {
        const inputs = fromNumbers(specs, JSON.parse(text));
        const shapes = Object.fromEntries(Object.entries(inputs).map(([name, { shape }]) => [name, shape]));
        const numbers = Object.entries(inputs).map(([name, { values, shape }]) => [name, toText(values, shape)]);
        return [numbers, Object.entries(lengthsOf(specs, shapes))];
    } catch ({ message }) {
        return message;
    }
}"""


def spec_of(name: str, *shape: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "int64", "shape": shape}


def dim(name: str, least: int = 0) -> dict[str, Any]:
    return {"name": name, "min": least, "max": 5}


def test_any_identifier_names_a_length(page: Page) -> None:
    for name in ("constructor", "toString", "__proto__"):
        specs = [spec_of("x", dim(name)), spec_of("y", dim(name))]
        assert page.evaluate(READ, [specs, '{"x": [1, 2], "y": [3, 4]}'])[1] == [[name, 2]]
        refused = page.evaluate(READ, [specs, '{"x": [1, 2], "y": [3]}'])
        assert refused == f"y has 1 {name} and x has 2; send both equally long."


def test_sizes_below_an_empty_list_are_those_of_other_tensors_or_the_smallest(page: Page) -> None:
    table = spec_of("table", dim("boxes"), dim("tokens", 1), 2)
    for specs in ([table, spec_of("x", dim("tokens", 1))], [spec_of("x", dim("tokens", 1)), table]):
        _, lengths = page.evaluate(READ, [specs, '{"table": [], "x": [7, 8, 9]}'])
        assert dict(lengths) == {"boxes": 0, "tokens": 3}
    assert dict(page.evaluate(READ, [[table], '{"table": []}'])[1]) == {"boxes": 0, "tokens": 1}
    fixed = spec_of("fixed", 2, dim("tokens"))
    refused = "fixed has shape [0, any]; it must be int64[2, tokens<=5]."
    assert page.evaluate(READ, [[fixed], '{"fixed": []}']) == refused


def test_whole_numbers_of_64_bits_are_exact_or_refused(page: Page) -> None:
    most = 2**53 - 1
    assert page.evaluate(READ, [[spec_of("x")], f'{{"x": {-most}}}']) == [[["x", str(-most)]], []]
    for number in (2**53, -(2**53) - 1, 2**63 - 1):
        refused = page.evaluate(READ, [[spec_of("x")], f'{{"x": {number}}}'])
        assert refused == (
            f"x holds a number beyond {most:,}, which a browser cannot read exactly; run the pack in Python for it."
        )
    outputs = [2**53 + 1, -(2**63)]
    shown = """async (numbers) => {
        const { toText } = await import("./tensors.js");
        const x = { values: BigInt64Array.from(numbers, BigInt), shape: [numbers.length] };
        globalThis.engine = { tensors: async () => ({ outputs: { x } }) };
        return toText(x.values, x.shape);
    }"""
    assert json.loads(page.evaluate(shown, [str(number) for number in outputs])) == outputs
    assert page.evaluate(TENSORS, []) == [["x", outputs, [2]]]


@pytest.mark.parametrize("width", [320, 1280])
def test_every_screen_shows_the_text_box_without_scrolling_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    expect(page.locator("#type-outputs .output")).to_have_count(2, timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
