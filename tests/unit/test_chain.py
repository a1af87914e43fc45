"""Chains: what is refused when they are declared, and their answers in this process."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Application, Boxes, Chain, ChainStep, Dim, Prepare, RawSpec, TensorSpec, load_chain
from penstock.core.chains.chain_fit import misfit, raw_as_tensor
from penstock.core.chains.chain_run import ChainPlan, PartRows, as_chunk
from penstock.core.errors import ApplicationError, ComputeFailed, InvalidInput, PenstockError
from penstock.core.record import chunk_spec
from penstock.core.source_files.find_application import find_chain
from penstock.core.streams.live import Live
from tests.support.chained import Chained, answer, picture, write_chained


def tensor(*shape: int, dtype: str = "float32", name: str = "") -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="numbers", name=name)


def app(name: str, input: TensorSpec, output: TensorSpec, **fields: Any) -> Application:
    return Application(name=name, input=input, output=output, model=":none", **fields)


FIRST = app("first", tensor(4, name="a"), tensor(3, name="b"))
SECOND = app("second", tensor(3, name="c"), tensor(2, name="d"))
WIDE = app("wide", tensor(5, name="c"), tensor(2, name="d"))


def nothing(results: Any, given: Any) -> Any:
    raise AssertionError("never called")


def test_a_chain_of_two_is_an_application() -> None:
    chain = Chain(name="both", steps=(ChainStep(part=FIRST), ChainStep(part=SECOND)))
    made = chain.declare({"first": FIRST, "second": SECOND})
    assert list(made.inputs) == ["a"]
    assert list(made.outputs) == ["d"]
    assert made.input.shape == (4,)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"steps": (ChainStep(part=FIRST), ChainStep(part=WIDE))},
            r"feeds 'wide' with the output of 'first', which does not fit: b is float32\[3\], and c must be "
            r"float32\[5\]; give the step a feed\.",
        ),
        ({"steps": ()}, "has no part; give 1 to 16 steps, one a part at least"),
        ({"steps": [ChainStep(part=FIRST)]}, "give a tuple of ChainStep objects"),
        ({"steps": (ChainStep(run=nothing),), "input": tensor(1), "output": tensor(1)}, "has no part"),
        ({"name": "a b"}, "use letters, digits"),
        ({"name": "first"}, "has the name of one of its parts"),
        ({"steps": (ChainStep(part=FIRST), ChainStep(part=FIRST, feed=nothing))}, "two steps of name 'first'"),
        (
            {"steps": (ChainStep(run=nothing), ChainStep(part=FIRST, feed=nothing))},
            "begins with the function 'nothing'",
        ),
        ({"join": nothing}, "has a join and no output"),
        ({"output": tensor(2)}, "declares an output, but answers with that of 'second'"),
        ({"steps": (ChainStep(part=FIRST), ChainStep(part=SECOND, each=nothing))}, "ends with the list of 'second'"),
        (
            {"steps": (ChainStep(part=FIRST, each=nothing), ChainStep(part=SECOND))},
            "feeds 'second' with 'first', which gives a list; give the step a feed",
        ),
        (
            {"steps": (ChainStep(part=FIRST), ChainStep(run=nothing), ChainStep(part=SECOND))},
            "feeds 'second' with 'nothing', which gives any value",
        ),
        ({"input": tensor(7, name="x")}, r"feeds 'first' with the chain's input.*x is float32\[7\]"),
        ({"decode": nothing}, "has a decode without accepts"),
        ({"input": tensor(4, name="a"), "inputs": {"a": tensor(4)}}, "has input and inputs; give one of them"),
        (
            {
                "steps": (
                    ChainStep(part=app("live", tensor(4, 2), tensor(4, 2, name="o"), chunks=2, live=Live(rate_hz=1.0))),
                )
            },
            "has the live application 'live'",
        ),
        (
            {"steps": (ChainStep(part=FIRST), ChainStep(part=app("back", tensor(3, name="c"), tensor(4, name="a"))))},
            "an input and an output with the name 'a'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_declared(fields: dict[str, Any], sentence: str) -> None:
    declared: dict[str, Any] = {"name": "both", "steps": (ChainStep(part=FIRST), ChainStep(part=SECOND))} | fields
    with pytest.raises(ApplicationError, match=sentence):
        Chain(**declared)


BOXED = {
    "boxes": tensor(4, 4),
    "classes": tensor(4, dtype="int64"),
    "scores": tensor(4),
}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shows": "boxes"}, "has shows='boxes'; it must be a Boxes"),
        ({"reply": str}, "has shows, which needs a picture as its input .* and neither segments nor reply"),
        ({"outputs": {}, "join": None}, "has shows, which needs a picture as its input and the three outputs"),
        ({"outputs": BOXED | {"scores": tensor(5)}}, "Boxes needs the outputs 'boxes'"),
        ({"shows": Boxes(labels=("a",), frame=(8, 8))}, "give boxes in its pixels, and leave frame out"),
        ({}, "has shows and no decode, by which a request could carry a picture; leave shows out"),
    ],
)
def test_boxes_that_no_picture_can_have_are_refused(fields: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"outputs": BOXED, "join": nothing, "shows": Boxes(labels=("a",))} | fields
    with pytest.raises(ApplicationError, match=sentence):
        Chain(name="boxed", steps=(ChainStep(part=FIRST),), **given)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "needs either a part or a function"),
        ({"part": FIRST, "run": nothing}, "needs either a part or a function"),
        ({"part": 3}, "has part=3"),
        ({"part": "not a name"}, "under which it is served"),
        ({"part": FIRST, "feed": 3}, "has feed=3"),
        ({"run": nothing, "each": nothing}, "runs a function and has each"),
        ({"part": FIRST, "feed": nothing, "each": nothing}, "has feed and each"),
        ({"part": FIRST, "partial": True}, "partial without each"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        ChainStep(**fields)


def test_one_tensor_of_varying_length_needs_no_name() -> None:
    spec = chunk_spec([tensor(Dim("n", max=4), name="a"), replace(tensor(name="b"), default=2)])
    assert as_chunk(spec, [1, 2])["a"].tolist() == as_chunk(spec, {"a": [1, 2]})["a"].tolist() == [1, 2, 0, 0]
    pair = chunk_spec([tensor(Dim("n", max=4), name="a"), tensor(name="b")])
    with pytest.raises(InvalidInput, match="it must have 'a', 'b' by name"):
        as_chunk(pair, [1, 2])


def test_names_are_checked_once_the_applications_are_known() -> None:
    chain = Chain(name="both", steps=(ChainStep(part="first"), ChainStep(part="wide")))
    with pytest.raises(ApplicationError, match="feeds 'wide' with the output of 'first', which does not fit"):
        ChainPlan(chain=chain, parts={"first": FIRST, "wide": WIDE})
    declared = Chain(name="both", steps=(ChainStep(part=FIRST), ChainStep(part=SECOND)))
    other = app("second", tensor(3, name="c"), tensor(9, name="d"))
    with pytest.raises(ApplicationError, match=r"declares 'second' with answer float32\[2\], but it is served with"):
        ChainPlan(chain=declared, parts={"first": FIRST, "second": other})


def test_lengths_fit_where_all_that_are_given_are_taken() -> None:
    def spec(*shape: int, name: str = "x") -> Any:
        return chunk_spec([tensor(*shape, name=name)])

    short, long = Dim("n", max=4), Dim("m", max=9)
    assert misfit(spec(short), spec(long)) == ""
    assert misfit(spec(3), spec(long)) == ""
    assert "with from 1 to 4 n" in misfit(spec(long), spec(short))
    assert "with from 1 to 9 m" in misfit(spec(Dim("n", max=4, min=0)), spec(long))
    assert misfit(spec(short), spec(4)) != ""
    assert misfit(spec(4, name="a"), spec(4, name="b")) == ""
    pair = chunk_spec([tensor(short, name="a"), tensor(short, name="b")])
    other = chunk_spec([tensor(long, name="a"), tensor(long, name="b")])
    unequal = chunk_spec([tensor(short, name="a"), tensor(Dim("k", max=4), name="b")])
    assert misfit(pair, other) == ""
    assert "another length" in misfit(unequal, other)
    assert misfit(pair, chunk_spec([tensor(3, name="c"), tensor(3, name="a")])) == "it has 'a', 'b' and no 'c'"


def test_the_first_parts_raw_array_is_the_chains_input() -> None:
    raw = RawSpec(dtype="uint8", shape=(None, None, 4), meaning="picture", max_shape=(9, 8, 4))
    given = Dim("raw_0", max=9), Dim("raw_1", max=8), 4
    assert raw_as_tensor(raw).shape == given
    first = app(
        "first",
        tensor(4, name="a"),
        tensor(3, name="b"),
        decode=lambda body, content_type: np.zeros((2, 3, 4), np.uint8),
        accepts=("image/png",),
        prepare=Prepare(module=":Small", raw=raw),
    )
    seen: list[Any] = []
    chain = Chain(
        name="both",
        steps=(ChainStep(part=first), ChainStep(part=SECOND, feed=lambda results, given: seen.append(given))),
    )
    plan = ChainPlan(chain=chain, parts={"first": first, "second": SECOND})
    made = plan.application
    assert made.inputs["raw"].shape == given
    assert made.decode is not None
    chunk = made.input.check(made.decode(b"", "image/png"))
    progress = plan.steps(chunk)
    request = next(progress)
    assert isinstance(request, PartRows)
    assert request.rows[0].is_raw
    assert request.rows[0].array.shape == (2, 3, 4)
    with pytest.raises(ComputeFailed, match="'second' of chain 'both' gives no input of 'second': c holds"):
        progress.send([np.zeros(3, np.float32)])
    assert seen[0].shape == (2, 3, 4)


def limited(spec: TensorSpec, low: float, high: float) -> TensorSpec:
    return replace(spec, limits=(low, high))


def test_limits_of_an_output_must_lie_within_those_of_the_input() -> None:
    taking = app("second", limited(tensor(3, name="c"), 0, 1), tensor(2, name="d"))
    for low, high in ((0, 1), (0.5, 1)):
        within = app("first", tensor(4, name="a"), limited(tensor(3, name="b"), low, high))
        Chain(name="both", steps=(ChainStep(part=within), ChainStep(part=taking)))
    for low, high in ((0, 5), (-1, 1)):
        beyond = app("first", tensor(4, name="a"), limited(tensor(3, name="b"), low, high))
        said = (
            f"feeds 'second' with the output of 'first', which does not fit: b has limits from {low} to {high}, and c "
            f"must be from 0 to 1; give the step a feed."
        )
        with pytest.raises(ApplicationError, match=re.escape(said)):
            Chain(name="both", steps=(ChainStep(part=beyond), ChainStep(part=taking)))
        # The name alone says nothing of its specs.
        named = Chain(name="both", steps=(ChainStep(part="first"), ChainStep(part="second")))
        with pytest.raises(ApplicationError, match=re.escape(said)):
            ChainPlan(chain=named, parts={"first": beyond, "second": taking})
        # What a feed gives is known at a request alone.
        Chain(name="both", steps=(ChainStep(part=beyond), ChainStep(part=taking, feed=nothing)))


def test_an_output_without_limits_that_does_not_fit_is_an_error_of_the_chain() -> None:
    first = app("first", limited(tensor(4, name="a"), 0, 1), tensor(3, name="b"))
    second = app("second", limited(tensor(3, name="c"), 0, 1), tensor(2, name="d"))
    chain = Chain(name="both", steps=(ChainStep(part=first), ChainStep(part=second)))
    plan = ChainPlan(chain=chain, parts={"first": first, "second": second})
    progress = plan.steps(np.zeros(4, np.float32))
    next(progress)
    with pytest.raises(ComputeFailed) as failed:
        progress.send([np.array([0, 5, 1], np.float32)])
    assert str(failed.value) == (
        "Chain 'both' feeds 'second' with the output of 'first', which does not fit for this request: c holds 5.0; it "
        "must be from 0 to 1; give the step a feed that makes it fit."
    )
    # The chain's own input is the client's.
    with pytest.raises(InvalidInput, match=r"a holds 5\.0"):
        next(plan.steps(np.full(4, 5, np.float32)))


def test_numbers_of_another_dtype_are_converted_or_refused() -> None:
    assert as_chunk(FIRST.input, [1, 2, 3, 4]).dtype == np.float32
    with pytest.raises(InvalidInput, match="must be float32"):
        as_chunk(FIRST.input, [1, 2, 3])
    with pytest.raises(InvalidInput, match="lists of different lengths"):
        as_chunk(FIRST.input, [[1], [2, 3]])
    with pytest.raises(InvalidInput, match="finite"):
        as_chunk(FIRST.input, np.full(4, np.nan))


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Chained:
    return write_chained(tmp_path_factory.mktemp("chained"))


def test_a_loaded_chain_answers_for_no_one_and_many(chained: Chained) -> None:
    predictor = load_chain(chained.chain, chained.bundles)
    for marks in ([], [(1, 1)], [(1, 1), (4, 5), (7, 7)], [(row, 2) for row in range(8)]):
        found = predictor.predict(picture(*marks))
        assert found["weights"].tolist() == answer(*marks)
        assert found["missing"].tolist() == [False] * len(marks)
    with pytest.raises(InvalidInput):
        predictor.predict(np.zeros((3, 3), np.uint8))


def test_a_chain_without_one_of_its_parts_is_refused(chained: Chained) -> None:
    with pytest.raises(ApplicationError, match="Chain 'look' needs the application 'scale', which is not there; there"):
        load_chain(chained.chain, chained.bundles[:2])
    pinned = Chain(name="pinned", steps=(ChainStep(part="marks", weights="0" * 64),))
    with pytest.raises(ApplicationError, match="needs 'marks' with the weights 000000000000, but"):
        load_chain(pinned, chained.bundles)


def test_a_function_that_raises_or_gives_another_thing_fails_with_its_name(chained: Chained) -> None:
    def load(**fields: Any) -> Any:
        declared: dict[str, Any] = {"name": "bad", "steps": (ChainStep(part="marks"),)} | fields
        return load_chain(Chain(**declared), chained.bundles)

    spec = tensor(2, name="answer")
    with pytest.raises(ComputeFailed, match="The join of chain 'bad' failed on this input") as raised:
        load(join=lambda results, given: 1 / 0, output=spec).predict(picture())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(ComputeFailed, match="The join of chain 'bad' gives no answer: answer is"):
        load(join=lambda results, given: [1.0], output=spec).predict(picture())
    steps = (ChainStep(part="marks"), ChainStep(part="weigh", each=lambda results, given: 3))
    with pytest.raises(ComputeFailed, match="The each of step 'weigh' of chain 'bad' gives a int, not a list"):
        load(steps=steps, join=nothing, output=spec).predict(picture())
    patches = [np.zeros((2, 2), np.float32), np.zeros((1, 2), np.float32)]
    steps = (ChainStep(part="marks"), ChainStep(part="weigh", each=lambda results, given: patches))
    with pytest.raises(ComputeFailed, match="'weigh' of chain 'bad' gives no input of 'weigh' at index 1"):
        load(steps=steps, join=nothing, output=spec).predict(picture())
    with pytest.raises(ComputeFailed, match="The join of chain 'bad' failed on this input") as raised:
        load(join=lambda results, given: sys.exit(3), output=spec).predict(picture())
    assert isinstance(raised.value.__cause__, SystemExit)

    def refuse(results: Any, given: Any) -> Any:
        raise InvalidInput("There is nobody in the picture.")

    with pytest.raises(InvalidInput, match="nobody"):
        load(join=refuse, output=spec).predict(picture())


def test_a_function_is_a_step_and_its_value_the_answer(chained: Chained) -> None:
    def brightest(results: Any, given: Any) -> float:
        return float(results["marks"]["light"].max(initial=0))

    chain = Chain(name="light", steps=(ChainStep(part="marks"), ChainStep(run=brightest)), output=tensor(name="light"))
    assert load_chain(chain, chained.bundles).predict(picture((1, 1))) == 200


def test_a_file_without_a_chain_says_what_it_has(chained: Chained, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="has no Chain called 'chain'; it has the application 'marks': train it"):
        find_chain(str(chained.marks.parent / "marks.py"))
    assert find_chain(f"{chained.chain}:chain").chain.name == "look"
    # The same source and bundles have the same hash.
    twice = [load_chain(chained.chain, chained.bundles).content_hash for _ in range(2)]
    assert twice[0] == twice[1]
    assert load_chain(find_chain(str(chained.chain)).chain, chained.bundles).content_hash != twice[0]
