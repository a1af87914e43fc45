"""Faults of a network that are found before its training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.errors import TrainError
from penstock.core.generate import Generate
from penstock.core.spec import TensorSpec
from penstock.runtime.load import as_found
from penstock.train.preflight import check_untrained
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.run import train

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
PART = ArraySet(inputs=X, targets=np.zeros(8, np.int64))
DATA = Data(train=PART, validation=PART)
RECIPE = Recipe(
    data=lambda: DATA,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
    steps=1,
)


class Drawn(nn.Linear):
    """Random numbers in evaluation mode, in one element of one example."""

    def forward(self, input: Tensor) -> Tensor:
        noise = torch.zeros(len(input), 2)
        noise[2, 1] = torch.rand(1)
        return super().forward(input) + noise


class Empty(nn.Linear):
    """No number before its buffer is fitted."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / torch.zeros(())


def application(model: Any, **more: Any) -> Application:
    return Application(
        name="tried",
        input=TensorSpec(dtype="float32", shape=(3,), meaning="numbers"),
        output=TensorSpec(dtype="float32", shape=(2,), meaning="scores"),
        model=model,
        recipe=lambda: RECIPE,
        **more,
    )


def notes(model: Any, **more: Any) -> list[str]:
    return list(check_untrained(as_found(application(model, **more)), RECIPE, DATA).notes)


def test_a_sound_network_passes_and_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert notes(lambda: nn.Linear(3, 2)) == []
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_example_and_the_element_that_differ_are_named() -> None:
    with pytest.raises(
        TrainError, match=r"'tried' .* before it: .* each time \(most in example 2, element \[1\]: \S+ instead of"
    ):
        notes(lambda: Drawn(3, 2))


class Rounded(nn.Linear):
    """Whole numbers of which one is next to a border: another row changes its last bits."""

    def forward(self, input: Tensor) -> Tensor:
        near = 0.5 + 1e-6 * (len(input) - 1.5)
        return torch.stack([torch.full((len(input),), near).round(), torch.zeros(len(input))], 1).to(torch.uint8)


def test_whole_numbers_that_are_rounded_are_not_taken_for_rows_that_depend_on_one_another() -> None:
    pictures = replace(
        application(lambda: Rounded(3, 2)), output=TensorSpec(dtype="uint8", shape=(2,), meaning="rounded")
    )
    with pytest.raises(
        TrainError, match=r"other whole numbers for examples alone .* 0 instead of 1; most likely a fraction"
    ):
        check_untrained(as_found(pictures), RECIPE, DATA)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(3, 4), r"gives float32\[4, 4\] for 4 chunks, but its output is declared"),
        (lambda: nn.Linear(5, 2), r"cannot answer its examples, float32\[4, 3\]"),
    ],
)
def test_other_inputs_or_outputs_than_declared_are_refused(model: Any, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        notes(model)


def test_an_untrained_network_may_give_no_numbers_yet() -> None:
    assert notes(lambda: Empty(3, 2)) == []


def test_a_reply_that_fails_is_a_note() -> None:
    def reply(output: Any) -> Any:
        return {"label": ("a",)[len(output)]}

    (note,) = notes(lambda: nn.Linear(3, 2), reply=reply)
    assert note.startswith("Note: the reply of 'tried' fails on the answer of the untrained network to example 0")


def test_a_reply_that_is_no_json_is_a_note() -> None:
    (note,) = notes(lambda: nn.Linear(3, 2), reply=lambda output: {"scores": output.tobytes()})
    assert "(TypeError: Type is not JSON serializable: bytes); a server would answer status 500." in note
    assert notes(lambda: nn.Linear(3, 2), reply=lambda output: {"scores": output.tolist()}) == []


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    found = as_found(application(lambda: Drawn(3, 2)))
    with pytest.raises(TrainError, match="no bundle could be made of application 'tried'"):
        train(found, tmp_path / "run", replace(RECIPE, steps=5), overrides={}, quiet=True)
    assert not (tmp_path / "run/run.json").exists()


class Counts(nn.Module):
    """Counts up from a number, and never ends."""

    def __init__(self, name: str = "count", of: str = "now") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.name, self.of = name, of

    def forward(self, number: Tensor) -> Tensor:
        return self.layer(number[:, None].float())

    def begin(self, number: Tensor) -> dict[str, Tensor]:
        return {"now": number}

    def step(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        now = state["now"]
        return {self.name: now}, {self.of: now + 1}, torch.zeros_like(now, dtype=torch.bool)


def counting(**network: str) -> Application:
    whole = TensorSpec(dtype="int64", shape=(), meaning="a number")
    return Application(
        name="counting",
        inputs={"number": whole},
        outputs={"count": whole},
        model=lambda: Counts(**network),
        generate=Generate(state={"now": whole}, max_steps=1 << 20),
    )


NUMBERS = ArraySet(inputs=np.arange(8), targets=np.zeros(8, np.int64))


def test_the_first_steps_of_an_answer_that_takes_steps_are_checked() -> None:
    data = Data(train=NUMBERS, validation=NUMBERS)
    assert check_untrained(as_found(counting()), RECIPE, data).notes == ()
    with pytest.raises(TrainError, match=r"after a training, .* gives a mapping of 'token', .* outputs are 'count'"):
        check_untrained(as_found(counting(name="token")), RECIPE, data)
    # Seen in the second step alone, or in the state that the first one gives.
    with pytest.raises(TrainError, match=r"after a training, .*'now'"):
        check_untrained(as_found(counting(of="later")), RECIPE, data)


def test_examples_without_an_input_of_the_application_are_refused_before_a_training() -> None:
    application = replace(counting(), inputs={**counting().inputs, "seed": counting().inputs["number"]})
    pairs = ArraySet(inputs={"number": np.arange(8), "before": np.arange(8)}, targets=np.zeros(8, np.int64))
    with pytest.raises(
        TrainError, match=r"'counting' takes 'seed', which .* do not have, .* give the recipe raw_examp"
    ):
        check_untrained(as_found(application), RECIPE, Data(train=pairs, validation=pairs))
