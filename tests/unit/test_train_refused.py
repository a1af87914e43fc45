"""What a device refuses is said with what to change."""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core.application import Application
from penstock.core.decode import _WARNINGS_OFF
from penstock.core.errors import TrainError
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.load import as_found
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.device_errors import explained
from penstock.train.named_values import checked_loss
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.run import train

X, Y = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
# As `penstock.fit` takes them.
PAIR: Any = (X, Y)
# More bytes than any machine can address.
TOO_MUCH = 1 << 58


def recipe() -> Recipe:
    part = ArraySet(inputs=X, targets=Y)
    return Recipe(
        data=lambda: Data(train=part, validation=part),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4096,
        steps=1,
        precision="tf32",
        execution=StepExecution(accumulation_steps=2),
    )


class Greedy(nn.Linear):
    """Wants its memory when it is trained, and not when it is looked at."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + torch.empty(TOO_MUCH)[0] if self.training else input)


class Scattered(nn.Linear):
    """Does what torch has no deterministic algorithm for."""

    def forward(self, input: Tensor) -> Tensor:
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
        return super().forward(input)


def test_a_step_that_does_not_fit_says_what_to_change() -> None:
    with pytest.raises(TrainError) as caught:
        penstock.fit(Greedy(2, 2), (X, Y), batch_size=3, steps=2, device="cpu", quiet=True)
    said = str(caught.value)
    assert said.startswith("a step needs more memory than the CPU has (it requested 1152921504606846976 bytes more);")
    assert (
        "(batch_size=3), compute it in more micro-batches (accumulation_steps=1), or in fewer bits (precision='fp32')"
        in said
    )


def test_a_gpu_that_is_full_is_told_with_the_process() -> None:
    with (
        pytest.raises(
            TrainError,
            match=r"rank 1 of 2 needs more memory than the CPU has \(it requested 256.00 GiB more\); "
            r"lower the batch size \(batch_size=4,096\), compute it in more micro-batches \(accumulation_steps=2\)",
        ),
        explained(recipe(), World(1, 2, group=object())),  # pyright: ignore[reportArgumentType]
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which ..."
        )


def test_what_has_no_deterministic_algorithm_is_named() -> None:
    with pytest.raises(TrainError, match=r"put_ has no deterministic algorithm on the CPU; give --no-deterministic"):
        penstock.fit(Scattered(2, 2), (X, Y), steps=2, device="cpu", quiet=True)
    done = penstock.fit(Scattered(2, 2), (X, Y), steps=2, device="cpu", quiet=True, deterministic=False)
    assert np.isfinite(done.metrics["train_loss"])


def test_what_else_fails_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"), explained(recipe(), World()):
        raise RuntimeError("CUDA error: unspecified launch failure")


class Column(nn.Linear):
    """One number a row, `[B]`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[:, 0]


@pytest.mark.parametrize("loss", [nn.functional.l1_loss, nn.MSELoss(), nn.functional.huber_loss])
def test_a_loss_that_would_compare_all_pairs_is_refused_by_its_first_step(loss: Any, tmp_path: Path) -> None:
    part = ArraySet(inputs=X, targets=Y[:, :1])
    declared = Application(
        name="column",
        input=TensorSpec(dtype="float32", shape=(2,), meaning="numbers"),
        output=TensorSpec(dtype="float32", shape=(), meaning="a number"),
        model=lambda: Column(2, 1),
    )
    given = replace(recipe(), data=lambda: Data(train=part, validation=part), loss=loss, batch_size=4, precision="fp32")
    said = r"the loss compares outputs \[\d\] with targets \[\d, 1\], which torch would expand"
    with pytest.raises(TrainError, match=said):
        train(as_found(declared), tmp_path / "run", given, overrides={}, quiet=True)


def test_fit_refuses_such_a_loss_too() -> None:
    with pytest.raises(TrainError, match=r"compares outputs \[2\] with targets \[2, 1\]"):
        penstock.fit(Column(2, 1), (X, Y[:, :1]), loss=nn.functional.l1_loss, steps=1, device="cpu", quiet=True)


def test_such_a_loss_is_refused_beside_threads_that_suppress_warnings() -> None:
    before = list(warnings.filters)
    decoding = ExitStack()

    def loss(outputs: Any, targets: Any) -> Any:
        # As a thread that reads pictures does at any time.
        decoding.enter_context(_WARNINGS_OFF)
        return nn.functional.l1_loss(outputs, targets)

    with decoding, pytest.raises(TrainError, match=r"compares outputs \[4\] with targets \[4, 1\]"):
        checked_loss(loss, torch.zeros(4), torch.zeros(4, 1), sizes=True)
    assert list(warnings.filters) == before


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_are_expanded_to_the_outputs_are_taken() -> None:
    def to_zero(outputs: Any, targets: Any) -> Any:
        return nn.functional.mse_loss(outputs, torch.zeros(()))

    fitted = penstock.fit(nn.Linear(2, 2), (X, Y), loss=to_zero, steps=1, device="cpu", quiet=True)
    assert fitted.metrics


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(
        TrainError, match=r"the loss does not depend on the network's trained parameters; compute it of"
    ):
        penstock.fit(
            nn.Linear(2, 2), (X, Y), loss=lambda out, y: (out.detach() - y).mean(), steps=1, device="cpu", quiet=True
        )


class Proxies(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.ones(2))

    def forward(self, outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        return ((outputs * self.proxies - targets) ** 2).mean() * scale


@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_a_loss_with_parameters_that_nobody_trains_is_said(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    proxies = Proxies()
    loss = {"module": proxies, "method": proxies.forward, "partial": partial(proxies, scale=2.0)}[form]
    penstock.fit(nn.Linear(2, 2), (X, Y), loss=loss, steps=1, device="cpu")
    assert "The loss has the parameters 'proxies', which are not trained:" in capsys.readouterr().out
    proxies.requires_grad_(False)
    penstock.fit(nn.Linear(2, 2), (X, Y), loss=loss, steps=1, device="cpu")
    assert "not trained" not in capsys.readouterr().out


def test_targets_that_are_not_finite_are_named(tmp_path: Path) -> None:
    targets = Y.copy()
    targets[2, 1] = np.nan
    wrong = ArraySet(inputs=X, targets=targets)
    with pytest.raises(TrainError) as caught:
        penstock.fit(nn.Linear(2, 2), wrong, loss=nn.functional.mse_loss, steps=2, device="cpu", quiet=True)
    said = (
        "the loss is nan at step 1; lower the learning rate or check the data: row 2 of the targets of the train data, "
        "counted from 0, has NaN or infinity."
    )
    assert str(caught.value) == said
    with pytest.raises(TrainError) as caught:
        penstock.fit(
            nn.Linear(2, 2), wrong, loss=nn.functional.mse_loss, steps=2, device="cpu", quiet=True, out=tmp_path / "run"
        )
    # No checkpoint was written, and none is promised.
    assert str(caught.value) == said
    right = ArraySet(inputs=X, targets=Y)
    with pytest.raises(TrainError, match="validation set is nan; check the data and the loss: row 2 of the targets"):
        penstock.fit(
            nn.Linear(2, 2), right, validation=wrong, loss=nn.functional.mse_loss, steps=1, device="cpu", quiet=True
        )


def test_no_examples_are_called_so() -> None:
    with pytest.raises(TrainError, match="the data has no examples; give at least one input with its target"):
        ArraySet(inputs=X[:0], targets=Y[:0])


def test_a_class_that_the_loss_lacks_is_not_compared_with_the_outputs() -> None:
    with pytest.raises(TrainError, match=r"^a target is 1, which is no class; give targets of its classes"):
        penstock.fit(
            nn.Linear(2, 2),
            (X, np.ones(4, np.int64)),
            loss=lambda out, y: nn.functional.cross_entropy(out[:, :1], y),
            steps=1,
            device="cpu",
            quiet=True,
        )


SOME = ArraySet(inputs=X, targets=Y)


class NoExamples(Examples):
    input_dtype, input_shape = np.dtype(np.float32), (2,)

    def __len__(self) -> int:
        return 0

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            lambda: (ArraySet(inputs=X, targets=Y),) * 2,
            "the `data` of the recipe of 'pairs' gives a tuple; let it retu",
        ),
        (
            lambda: Data(train=PAIR, validation=PAIR),
            r"the train data is a tuple; give Examples, such as ArraySet\(",
        ),
        (lambda: Data(train=SOME, validation=cast(Any, None)), "has no validation examples, and the golden examples"),
        (lambda: Data(train=NoExamples(), validation=SOME), "the train data of application 'pairs' has no examples"),
        (lambda: Data(train=SOME, validation=NoExamples()), "the validation data of application 'pairs' has no exam"),
        (lambda: Data(train=SOME, validation=SOME, test=NoExamples()), "the test data of application 'pairs' has no"),
    ],
)
def test_data_of_another_kind_is_refused(data: Any, said: str, tmp_path: Path) -> None:
    spec = TensorSpec(dtype="float32", shape=(2,), meaning="numbers")
    declared = Application(name="pairs", input=spec, output=spec, model=lambda: nn.Linear(2, 2))
    with pytest.raises(TrainError, match=said):
        train(as_found(declared), tmp_path / "run", replace(recipe(), data=data), overrides={}, quiet=True)


class Table:
    """Rows as pandas has them: `[]` takes names, and `to_numpy` gives the numbers."""

    def __init__(self, numbers: Any = X) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)

    def to_numpy(self) -> Any:
        return self._numbers


class Stored:
    """Rows in a file, of which those are read that are asked for."""

    shape, dtype = X.shape, X.dtype

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, rows: Any) -> Any:
        return X[rows]

    def __array__(self, *_: Any, **__: Any) -> Any:
        pytest.fail("all rows were read")


@pytest.mark.parametrize(
    "inputs", [torch.tensor(X), torch.tensor(X, requires_grad=True), torch.tensor(X).bfloat16(), Table(), Stored()]
)
def test_tensors_tables_and_stored_rows_are_examples(inputs: Any) -> None:
    part = ArraySet(inputs=inputs, targets=torch.tensor(Y))
    assert (part.describe(), len(part)) == ("float32[2]", 4)
    read = part.empty(2)
    assert part.read(np.array([0, 3]), np.zeros(2, np.uint64), read).shape == (2, 2)  # pyright: ignore
    assert np.allclose(read, X[[0, 3]], rtol=0.01)


@pytest.mark.parametrize("given", [torch.zeros(4, 2, requires_grad=True), torch.ones(4, 2).bfloat16(), Table(Y)])
def test_named_inputs_and_targets_are_tensors_and_tables_too(given: Any) -> None:
    part = ArraySet(
        inputs={"a": given, "b": [given[:1], given[1:]] * 2 if isinstance(given, Tensor) else Y}, targets=given
    )
    assert (len(part), part.targets.dtype, part.targets.shape) == (4, np.float32, (4, 2))


@pytest.mark.parametrize("numbers", [X.astype(object), np.zeros(4, "datetime64[s]")])
def test_tables_and_arrays_without_numbers_are_refused(numbers: Any) -> None:
    for inputs in (Table(numbers), numbers):
        with pytest.raises(TrainError, match=r"the inputs are an array of \S+; give columns of numbers alone"):
            ArraySet(inputs=cast(Any, inputs), targets=Y)


@pytest.mark.parametrize("inputs", [None, 3, np.float32(3), tuple(X)])
def test_inputs_that_are_no_array_are_refused(inputs: Any) -> None:
    with pytest.raises(TrainError, match=r"the inputs are a \w+; give an array, \[n, ...\], a list of arrays, or"):
        ArraySet(inputs=inputs, targets=Y)


def test_one_number_for_all_targets_is_refused() -> None:
    with pytest.raises(TrainError, match=r"targets is float64\[\]; give an array of numbers, \[n, ...\]"):
        ArraySet(inputs=X, targets=np.array(1.0))


def test_targets_that_are_texts_are_refused() -> None:
    with pytest.raises(TrainError, match=r"targets is <U4\[4\]; give an array of numbers"):
        ArraySet(inputs=X, targets=np.array(["bull", "ring", "miss", "ring"]))


def test_a_run_without_validation_examples_may_not_choose_by_a_metric(tmp_path: Path) -> None:
    spec = TensorSpec(dtype="float32", shape=(2,), meaning="numbers")
    declared = Application(name="pairs", input=spec, output=spec, model=lambda: nn.Linear(2, 2))
    chosen = replace(
        recipe(), data=lambda: Data(train=SOME, validation=cast(Any, None)), metrics={"q": lambda out, y: 1.0}
    )
    with pytest.raises(TrainError, match="has no validation examples, and metrics, the selection of weights by one"):
        train(as_found(declared), tmp_path / "run", chosen, overrides={}, quiet=True)
