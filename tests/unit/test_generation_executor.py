"""Answers that take steps, in one process: the executor, bundles and `penstock.load`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock
from penstock.core.bundles.bundle import read_bundle
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, BundleError, GoldenMismatch, InvalidInput
from penstock.core.generate import END, MAX_STEPS, Generate
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.runtime.joined_rows import joined_answers
from penstock.serve.engine.generation_faults import step_isolated
from tests.support.generating import (
    COUNTER,
    MOST,
    PAST,
    Counter,
    Endless,
    FunctionalCounter,
    counter,
    counter_bundle,
    digits,
    examples,
    tensor,
)


def records(*given: dict[str, Array]) -> Array:
    assert isinstance(COUNTER.input, RecordSpec)
    return COUNTER.input.of_many(list(given))


def by_hand(given: dict[str, Array], seed: int = 0, most: int = MOST) -> list[int]:
    """The tokens of one answer, in plain Python."""
    embed = Counter().embed.detach().numpy()
    memory = embed[given["digits"]].sum()
    last, tokens = int(given["digits"][0]), []
    while len(tokens) < min(most, int(PAST)):
        past = embed[tokens]
        token = int(memory + 3 * past.sum() + past[:, 0].sum() + seed + 7 * last) % 31
        tokens.append(token)
        last = token
        if token % 7 == 0:
            break
    return tokens


@pytest.mark.parametrize("network", [Counter, FunctionalCounter])
def test_whole_answers_of_a_batch_are_those_by_hand(network: type[Counter]) -> None:
    given = examples(30)
    executor = GenerationExecutor(network(), COUNTER, padding=float("nan"))
    answers = executor.predict(records(*given))
    expected = [by_hand(each) for each in given]
    assert len({len(each) for each in expected}) > 5
    assert [answer["token"][: answer["steps"]].tolist() for answer in answers] == expected


def test_an_option_takes_its_default_and_another_value_changes_the_answer() -> None:
    predict = GenerationExecutor(Counter(), COUNTER).predict
    one = digits(5)
    answers = predict(records(one, one | {"seed": np.array(0)}, one | {"seed": np.array(4)}))
    assert answers[0] == answers[1]
    assert answers[2]["token"][: answers[2]["steps"]].tolist() == by_hand(one, seed=4) != by_hand(one)


def test_a_network_without_an_end_stops_at_the_maximum_of_steps_the_input_and_the_growing_dimension() -> None:
    executor = GenerationExecutor(Endless(), counter(Endless))
    one = digits(3)
    steps = list(executor.run(records(one, one | {"most": np.array(2)})))
    assert [step.rows_B.tolist() for step in steps[:3]] == [[0, 1], [0, 1], [0]]
    assert steps[1].ended == [None, MAX_STEPS]
    # There is room for 50 past tokens.
    assert len(steps) == int(PAST)
    assert steps[-1].ended == [MAX_STEPS]


def test_the_network_ends_an_answer_with_the_output_of_that_step() -> None:
    one = next(each for each in examples() if 1 < len(by_hand(each)) < 10)
    *_, last = GenerationExecutor(Counter(), COUNTER).run(records(one))
    assert last.ended == [END]
    assert last.output_B["token"].tolist() == [by_hand(one)[-1]]


def test_a_bundle_holds_whole_answers_and_load_gives_them_again(tmp_path: Path) -> None:
    bundle = counter_bundle(tmp_path / "bundle")
    golden = read_bundle(bundle.folder).golden
    assert [answer["token"][: answer["steps"]].tolist() for answer in golden.outputs] == [*map(by_hand, examples())]
    counting = penstock.load(bundle.folder, app=COUNTER)
    one, other = digits(9, 1), digits(2, 2)
    assert counting.predict(one)["token"].tolist() == by_hand(one)
    assert counting.predict(one)["sums"].shape == (len(by_hand(one)), 4)
    assert [answer["token"].tolist() for answer in counting.predict([one, other])] == [by_hand(one), by_hand(other)]
    assert [int(output["token"]) for output in counting.generate(one)] == by_hand(one)
    both = list(counting.generate([one, other]))
    assert [int(first["token"]) for first, _ in both if first is not None] == by_hand(one)
    assert [int(second["token"]) for _, second in both if second is not None] == by_hand(other)


def test_a_single_output_is_an_array_over_steps(tmp_path: Path) -> None:
    class Tokens(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output["token"], after, done

    application = counter(Tokens, outputs={"token": tensor("int64")}, reply=lambda token: {"tokens": token.tolist()})
    bundle = counter_bundle(tmp_path / "bundle", application)
    counting = penstock.load(bundle.folder, app=application)
    assert counting.predict(digits(9, 1)).tolist() == by_hand(digits(9, 1))
    assert [int(token) for token in counting.generate(digits(9, 1))] == by_hand(digits(9, 1))


def test_a_network_that_depends_on_padding_is_found_when_the_bundle_is_written(tmp_path: Path) -> None:
    class Padded(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output | {"token": (output["token"] + state["memory"].shape[1]) % 31}, after, done

    with pytest.raises(ApplicationError, match="depends on padding"):
        counter_bundle(tmp_path / "bundle", counter(Padded))


class Kept(Counter):
    """Keeps in itself what belongs into the state."""

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        self.steps = 0
        return super().begin(digits, seed)

    def step(self, state: dict[str, Tensor]) -> Any:
        output, after, done = super().step(state)
        self.steps += 1
        return output | {"token": (output["token"] + self.steps) % 31}, after, done


class KeptRows(Counter):
    """The same, with a tensor whose rows are those that began last."""

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        self.seeds = seed
        return super().begin(digits, seed)

    def step(self, state: dict[str, Tensor]) -> Any:
        output, after, done = super().step(state)
        if len(done) > len(self.seeds):
            raise IndexError(f"{len(self.seeds)} seeds for {len(done)} rows")
        return output, after, done


@pytest.mark.parametrize(
    ("network", "cause"), [(Kept, "is not the recorded one, element"), (KeptRows, "1 seeds for 2 rows")]
)
def test_a_network_that_keeps_state_in_itself_is_found_when_the_bundle_is_written(
    tmp_path: Path, network: type[Counter], cause: str
) -> None:
    with pytest.raises(ApplicationError, match=f"begins while others are in progress.*{cause}.*nothing of it in the"):
        counter_bundle(tmp_path / "bundle", counter(network))


def test_rows_that_begin_one_after_another_get_the_answers_of_rows_that_begin_together() -> None:
    given = records(*examples(9))
    executor = GenerationExecutor(Counter(), COUNTER, padding=float("nan"))
    assert (joined_answers(executor, given) == executor.predict(given)).all()


def test_another_network_fails_the_golden_check_by_its_tokens(tmp_path: Path) -> None:
    bundle = counter_bundle(tmp_path / "bundle")

    class Other(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output | {"token": (output["token"] + (state["past"] == 3)) % 31}, after, done

    with pytest.raises(GoldenMismatch, match="'token' of golden example"):
        penstock.load(bundle.folder, app=counter(Other))
    with pytest.raises(BundleError, match=r"at most 64 steps.*now declares answers of at most 63"):
        penstock.load(bundle.folder, app=counter(generate=replace(COUNTER.generate, max_steps=63)))  # pyright: ignore
    # Budgets change no answer.
    penstock.load(bundle.folder, app=counter(generate=replace(COUNTER.generate, first_ms=9.0)))  # pyright: ignore


def wrong(**changed: Any) -> type[Counter]:
    class Wrong(Counter):
        def begin(self, digits: Tensor, seed: Tensor) -> Any:
            return super().begin(digits, seed) | {
                name: None if made is None else made(len(digits)) for name, made in changed.items() if name != "done"
            }

        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output, after, changed["done"](done) if "done" in changed else done

    return Wrong


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (torch.nn.Linear, "has no begin; give it"),
        (wrong(past=None), "without the lengths 'past'"),
        (wrong(last=None), "without the tensor 'last'"),
        (wrong(more=lambda rows: torch.zeros(rows)), "'more', which is not declared"),
        (wrong(last=lambda rows: torch.zeros(rows, 2)), r"'last' of the state as float32\[\d+, 2\]"),
        (wrong(last=lambda rows: torch.zeros(rows)), r"'last' of the state as float32"),
        (wrong(past=lambda rows: torch.full((rows,), 3)), "room for 0 past"),
        (
            wrong(past=lambda rows: torch.full((rows,), 50), keys=lambda rows: torch.zeros(rows, 2, 50, 4)),
            "'keys' with 50 past, which is all",
        ),
        (
            wrong(past=lambda rows: torch.zeros(rows, 3, dtype=torch.int64)),
            r"lengths; if the network is a Beam, name 'past' in its shared",
        ),
        (wrong(done=lambda done: done.long()), r"gives int64\[\d+\] as done"),
        (wrong(done=lambda done: done[:0]), r"gives bool\[0\] as done"),
    ],
)
def test_what_a_network_may_not_give_is_said(network: Any, message: str) -> None:
    module = network(1, 1) if network is torch.nn.Linear else network()
    with pytest.raises(ApplicationError, match=message):
        GenerationExecutor(module, COUNTER).predict(records(digits(3), digits(5)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"generate": {"state": {}}}, "at least one"),
        ({"generate": {"state": {"a b": tensor("int64")}}}, "Python identifier"),
        ({"generate": {"state": {"last": tensor("int64")}, "max_steps": 0}}, "max_steps=0"),
        ({"generate": {"state": {"last": tensor("int64")}, "step_ms": -1}}, "step_ms=-1"),
        ({"generate": {"state": {"last": tensor("int64")}, "max_steps_input": "digits"}}, "name an input that is one"),
        ({"generate": {"state": {"last": tensor("int64")}, "max_steps_input": "no"}}, "there is no such input"),
        ({"generate": {"state": {"last": tensor("int64", Dim("length", max=3))}}}, "'length' is declared as"),
        ({"generate": {"state": {"length": tensor("int64")}}}, "the name of a Dim of its inputs"),
        ({"outputs": {"token": tensor("int64", Dim("some", max=3))}}, "a fixed size"),
        ({"outputs": {"steps": tensor("int64")}}, "choose another"),
        ({"outputs": {"token": tensor("int64", default=1)}}, "a default for its output"),
        ({"chunks": 3}, "chunks=3"),
        ({"generate": 5}, "it must be a Generate"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = changed.get("generate")
    with pytest.raises(ApplicationError, match=message):
        counter(**changed | ({"generate": Generate(**given)} if isinstance(given, dict) else {}))


@pytest.mark.parametrize("default", ["x", 1.5, 1 << 70, [1]])
def test_a_default_that_is_no_valid_number_is_refused(default: Any) -> None:
    with pytest.raises(ApplicationError, match="default="):
        tensor("int64", default=default)


def test_a_default_needs_a_fixed_size_and_the_limits() -> None:
    with pytest.raises(ApplicationError, match="lengths that vary"):
        tensor("int64", PAST, default=0)
    with pytest.raises(ApplicationError, match="from 1 to 5"):
        tensor("int64", default=0, limits=(1, 5))


def test_generate_of_an_application_of_one_step_is_refused(tmp_path: Path) -> None:
    plain = counter(
        FunctionalCounter,
        generate=None,
        inputs={"digits": tensor("int64", 3)},
        outputs={"vectors": tensor("float32", 3, 4)},
    )
    bundle = penstock.Bundle.write(plain, FunctionalCounter(), np.ones((2, 3), np.int64), to=tmp_path / "b")
    with pytest.raises(InvalidInput, match="one step; use predict"):
        penstock.load(bundle.folder, app=plain).generate(np.ones(3, np.int64))


class Shared(Counter):
    """The same, with a cache that lies in a buffer of the network and needs no more room."""

    start: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.zeros(8, 2, 16, 4))

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        return super().begin(digits, seed) | {"keys": self.start[: len(digits)]}


def test_a_step_does_not_write_into_what_begin_gave() -> None:
    network = Shared()
    answers = GenerationExecutor(network, counter(Shared)).predict(records(*examples(8)))
    assert not network.start.any()
    assert [answer["token"][: answer["steps"]].tolist() for answer in answers] == [*map(by_hand, examples(8))]


def test_tensors_of_one_memory_that_grow_are_apart_after_begin() -> None:
    state = {name: tensor("float32", PAST) for name in ("one", "other")}

    class Twins(Counter):
        def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
            both = torch.zeros(len(digits), 16)
            return {"one": both, "other": both, "past": torch.zeros(len(digits), dtype=torch.int64)}

        def step(self, state: dict[str, Tensor]) -> Any:
            one, other, past = (state[name] for name in ("one", "other", "past"))
            one[:, 0], other[:, 0] = 1.0, 5.0
            return one[:, 0].long(), {"one": one, "other": other, "past": past + 1}, past >= 0

    application = counter(
        Twins, outputs={"token": tensor("int64")}, generate=Generate(state=state, max_steps_input="most")
    )
    answer = GenerationExecutor(Twins(), application).predict(records(digits(3)))[0]
    assert answer["token"][:1].tolist() == [1]


def test_a_step_that_gives_one_growing_tensor_twice_is_refused() -> None:
    state = {name: tensor("float32", PAST) for name in ("one", "other")}

    class Same(Counter):
        def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
            zeros = torch.zeros(len(digits), 1)
            return {"one": zeros, "other": zeros, "past": torch.zeros(len(digits), dtype=torch.int64)}

        def step(self, state: dict[str, Tensor]) -> Any:
            one, past = state["one"], state["past"]
            return past, {"one": one, "other": one, "past": past + 1}, past > 2

    generate = Generate(state=state, max_steps_input="most")
    application = counter(Same, outputs={"token": tensor("int64")}, generate=generate)
    with pytest.raises(ApplicationError, match=r"one tensor as 'one' and as 'other'.*'other': tensor.clone\(\)"):
        GenerationExecutor(Same(), application).predict(records(digits(3)))


def test_a_step_that_appends_to_what_grows_reads_where_to_write() -> None:
    class Appends(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output, after | {"keys": torch.cat([after["keys"], after["keys"][:, :, -1:]], 2)}, done

    with pytest.raises(ApplicationError, match=r"as it was given; there is room already: write .* that 'past' has"):
        GenerationExecutor(Appends(), counter(Appends)).predict(records(digits(3)))


@pytest.mark.parametrize(
    ("give", "wanted"),
    [
        (lambda keys: keys.long(), r"as int64\[1, 2, \d+, 4\]; it must be float32\[1, 2, \d+, 4\], as it was given\.$"),
        (lambda keys: keys[:, :1], r"as float32\[1, 1, \d+, 4\]; .* as it was given\.$"),
        (lambda keys: keys[0], r"as float32\[2, \d+, 4\]; .* as it was given\.$"),
    ],
)
def test_a_step_that_gives_a_growing_tensor_of_another_kind_reads_nothing_of_room(give: Any, wanted: str) -> None:
    class Other(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output, after | {"keys": give(after["keys"])}, done

    with pytest.raises(ApplicationError, match=wanted):
        GenerationExecutor(Other(), counter(Other)).predict(records(digits(3)))


def test_a_step_that_gives_lengths_below_0_is_refused() -> None:
    class Back(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            return output, after | {"past": after["past"] - 2}, done

    with pytest.raises(ApplicationError, match=r"gives the lengths \[-1\] as 'past' of the state; they must be 0"):
        GenerationExecutor(Back(), counter(Back)).predict(records(digits(3)))


def test_rows_beside_one_that_fails_are_right_though_the_step_wrote_its_lengths_in_place() -> None:
    class InPlace(Counter):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            state["past"] += 1
            state["last"].copy_(after["last"])
            if (state["seed"] == 30).any():
                raise ValueError("30 is no seed")
            return output, after | {"past": state["past"], "last": state["last"]}, done

    executor = GenerationExecutor(InPlace(), counter(InPlace))
    given = [digits(9, 1), digits(2, 2), digits(5) | {"seed": np.array(30)}]
    state = executor.join([executor.begin(records(each)) for each in given])
    step, failed_B = step_isolated(executor, state)
    assert failed_B.tolist() == [False, False, True]
    assert step.output_B["token"][:2].tolist() == [by_hand(each)[0] for each in given[:2]]
    assert step.state.lengths["past"][:2].tolist() == [1, 1]
