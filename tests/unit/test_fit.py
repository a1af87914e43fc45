"""`penstock.fit` in this process: arrays and tensors in, a trained network out, and an error for what is wrong."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import penstock
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.checkpoint.format import parameter_hash
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.interrupt import Interrupt
from penstock.train.recipe import ArraySet, CheckpointPolicy, Selection, StepExecution, accuracy

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 8))
Y = (X[:, 0] + X[:, 1] > 0).astype(np.uint8)
ONE_THREAD = StepExecution(threads=1)
IN_PARTS = {"batch_size": 4, "execution": StepExecution(accumulation_steps=4)}
SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "batch_size": 32,
    "execution": ONE_THREAD,
    "quiet": True,
    "device": "cpu",
}


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, outputs))


def fit(module: nn.Module, train: Any, **changes: Any) -> penstock.Fitted:
    return penstock.fit(module, train, **(SETTINGS | changes))


def test_a_network_learns_from_arrays() -> None:
    module = network()
    before = parameter_hash(module)
    fitted = fit(module, (X[:200], Y[:200]), validation=(X[200:], Y[200:]), epochs=30)
    assert fitted.metrics.keys() == {"loss", "accuracy"}
    assert fitted.metrics["accuracy"] > 0.8
    assert fitted.metrics["loss"] == min(line["validation_loss"] for line in fitted.history)
    assert (len(fitted.history), fitted.history[-1]["step"]) == (32, 188)
    assert all(line["samples_per_s"] > 0 and "mfu" not in line for line in fitted.history)
    assert parameter_hash(module) == before
    outputs = fitted.network(torch.from_numpy(X[200:]).float())
    assert (outputs.argmax(1).numpy() == Y[200:]).mean() == pytest.approx(fitted.metrics["accuracy"])


def test_tensors_arrays_lists_and_examples_are_the_same() -> None:
    x, y = X[:100].astype(np.float32), Y[:100].astype(np.int64)
    given = [
        (x, y),
        (X[:100], Y[:100]),
        (torch.tensor(X[:100], requires_grad=True), torch.from_numpy(y)),
        [x.tolist(), y.tolist()],
        ArraySet(inputs=x, targets=y),
    ]
    fits = [fit(network(), one, epochs=1) for one in given]
    assert len({fitted.parameter_hash for fitted in fits}) == 1
    assert fits[0].metrics.keys() == {"train_loss"}
    assert fits[0].parameter_hash == parameter_hash(fits[0].network)
    assert fit(network(), given[0], epochs=1, seed=1).parameter_hash != fits[0].parameter_hash


def test_a_mean_square_is_learned_from_numbers_and_weights_say_their_type() -> None:
    fitted = fit(network(1).double(), (X, X[:, :1] ** 2), optimizer=torch.optim.Adam, epochs=2)
    assert next(fitted.network.parameters()).dtype == torch.float64


@pytest.mark.thorough
def test_a_folder_keeps_what_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"validation": (X[200:], Y[200:]), "checkpoints": CheckpointPolicy(every_steps=5)}
    train = X[:200], Y[:200]
    undisturbed = fit(network(), train, **changes)
    asked = iter([False] * 8 + [True] * 999)
    with monkeypatch.context() as patch:
        patch.setattr(
            Interrupt, "requested", property(lambda self: next(asked), lambda self, value: None), raising=False
        )
        with pytest.raises(KeyboardInterrupt):
            fit(network(), train, out=tmp_path / "run", **changes)
    stopped = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stopped["state"] == "stopped"
    resumed = fit(network(), train, out=tmp_path / "run", **changes)
    assert resumed.parameter_hash == undisturbed.parameter_hash
    assert resumed.metrics == undisturbed.metrics
    assert [line["step"] for line in resumed.history] == [line["step"] for line in undisturbed.history]
    fields = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (fields["state"], fields["parameter_hash"]) == ("finished", resumed.parameter_hash)
    assert fields["samples_per_s"] > 0
    assert (tmp_path / "run" / "curves.png").exists()
    # It is finished: nothing more is learned.
    assert fit(network(), train, out=tmp_path / "run", **changes).parameter_hash == resumed.parameter_hash
    with pytest.raises(TrainError, match=r"holds a training of something else \(seed: 0 and now 1\)"):
        fit(network(), train, out=tmp_path / "run", seed=1, **changes)
    # It flips the direction of every update.
    with pytest.raises(TrainError, match=r"holds a training of something else \(learned: .*'maximize': 'True'"):
        fit(
            network(),
            train,
            out=tmp_path / "run",
            optimizer=lambda own: torch.optim.AdamW(own, 1e-3, maximize=True),
            **changes,
        )
    with pytest.raises(TrainError, match=r"train examples changed since the run in .*\(the numbers changed\)"):
        fit(network(), (train[0] + 1, train[1]), out=tmp_path / "run", **changes)


def test_weights_are_not_chosen_by_two_validation_sets(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": None, "steps": 2, "out": tmp_path / "run"}
    fit(network(), (X, Y), validation=(X[200:], Y[200:]), **changes)
    with pytest.raises(TrainError, match=r"validation examples changed since the run in .*\(the numbers changed\)"):
        fit(network(), (X, Y), validation=(X[200:] + 1, Y[200:]), **changes)


def test_it_works_in_a_thread_as_in_a_notebook() -> None:
    found: list[penstock.Fitted] = []
    thread = threading.Thread(target=lambda: found.append(fit(network(), (X, Y), epochs=1)))
    thread.start()
    thread.join()
    assert found[0].metrics.keys() == {"train_loss"}


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_it_learns_where_its_caller_does_not(block: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    # The order of sums, and so the hash, depends on the number of threads, which MKL lowers on a busy machine.
    expected = fit(network(), (X, Y), epochs=1, execution=ONE_THREAD)
    with block():
        # Its weights and inputs are of inference alone, too.
        module, inputs = network(), torch.from_numpy(X) * 1
        fitted = fit(module, (inputs, Y), epochs=1, execution=ONE_THREAD)
        assert not torch.is_grad_enabled()
    assert fitted.parameter_hash == expected.parameter_hash
    assert all(weight.requires_grad and not weight.is_inference() for weight in fitted.network.parameters())


class Positions(nn.Module):
    """Keeps the factors of the longest input so far, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)
        self.factors = torch.zeros(0, 1)

    def forward(self, ids: Tensor, ids_length: Tensor) -> Tensor:
        if len(self.factors) < ids.shape[1]:
            self.factors = torch.linspace(0.5, 1.5, ids.shape[1])[:, None]
        return self.head((self.embedding(ids) * self.factors[: ids.shape[1]]).mean(1))


def test_what_a_network_keeps_of_a_validation_serves_its_next_step() -> None:
    def examples(*lengths: int) -> Any:
        return {"ids": [np.arange(length) % 10 for length in lengths]}, np.arange(len(lengths)) % 2

    validation = examples(3, 3, 9, 9)
    fitted = fit(Positions(), examples(3, 4, 5, 4), validation=validation, epochs=None, steps=2, batch_size=4)
    assert math.isfinite(fitted.metrics["loss"])


class Spectrum(nn.Module):
    """Gives complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.layer(x))


@pytest.mark.parametrize(
    ("module", "dtype"), [(Spectrum(), torch.complex64), (nn.Linear(8, 1).double(), torch.float64)]
)
def test_a_validation_has_the_numbers_that_the_network_gives(module: nn.Module, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        seen.append(outputs.dtype)
        return 0.0

    fit(
        module,
        (X, X[:, 0]),
        validation=(X, X[:, 0]),
        loss=lambda outputs, targets: (outputs.squeeze() - targets).abs().mean(),
        metrics={"kinds": metric},
        epochs=1,
    )
    assert set(seen) == {dtype}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_a_network_may_give_its_loss_alone() -> None:
    module = OwnLoss()
    fitted = fit(module, (X, Y), validation=(X, Y), loss=lambda loss, targets: loss, metrics={}, epochs=1)
    with torch.no_grad():
        whole = fitted.network(torch.from_numpy(X).float())
    assert fitted.metrics["loss"] == pytest.approx(whole.item(), rel=1e-5)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, a: Tensor, a_length: Tensor) -> Tensor:
        return self.layer(a.sum(1, keepdim=True))


def test_examples_may_have_no_numbers() -> None:
    # A silent recording, and a picture without boxes.
    inputs: Any = {"a": [np.ones(3), np.zeros(0)]}
    boxes = {"boxes": [np.ones((1, 4)), np.zeros((0, 4))]}
    fitted = fit(
        Sums(),
        (inputs, boxes),
        loss=lambda outputs, targets: (outputs - targets["boxes"].sum(1)).square().mean(),
        batch_size=2,
        epochs=1,
    )
    assert math.isfinite(fitted.metrics["train_loss"])


def test_whole_numbers_of_another_byte_order_are_taken() -> None:
    ids = (np.arange(40) % 10).astype(">i4")
    fits = [
        fit(nn.Sequential(nn.Embedding.from_pretrained(torch.eye(10), freeze=False)), (given, ids % 2), epochs=1)
        for given in (ids, ids.astype(np.int32))
    ]
    assert fits[0].parameter_hash == fits[1].parameter_hash


class NoGradient(nn.Linear):
    """The gradient of the root of 0 is infinite, and its product with 0 NaN."""

    def forward(self, input: Tensor) -> Tensor:
        outputs = super().forward(input)
        return outputs + (outputs * 0).float().square().sum().sqrt()


def test_fp16_does_not_skip_every_step_in_silence() -> None:
    with pytest.raises(TrainError, match=r"at every loss scale of fp16.*up to step \d+; check the data"):
        fit(NoGradient(8, 2), (X, Y), precision="fp16", epochs=None, steps=60, batch_size=300)


def test_weights_that_overflow_are_said_and_no_checkpoint_is_promised() -> None:
    def overflowing(outputs: Tensor, targets: Tensor) -> Tensor:
        # A root at 0: a finite loss with a gradient that is not.
        return nn.functional.cross_entropy(outputs, targets) + (outputs * 0).square().sum().sqrt()

    with pytest.raises(TrainError, match=r"weights are not finite after step 1: .* check the data and the loss\.$"):
        fit(network(), (X, Y), loss=overflowing, epochs=None, steps=1)


def test_it_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    fit(network(), (X, Y), epochs=1, quiet=False)
    said = capsys.readouterr().out
    assert "Training Sequential: step 9/9  loss " in said
    assert "samples/s" in said


def few_fail(outputs: Tensor, targets: Tensor) -> float:
    """A metric that needs more examples than are tried before the first step."""
    if len(targets) < 20:
        raise ValueError("only one class is there")
    return float((outputs.argmax(1) == targets).float().mean())


def test_what_fails_in_a_validation_is_said_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    wanted = "the metric 'each' is a Tensor of shape [8]; a metric gives a number, or a mapping of numbers by name"
    with pytest.raises(TrainError, match="the metric 'each' is a Tensor"):
        fit(network(), (X, Y), validation=(X, Y), metrics={"each": each}, epochs=1, quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    begin = said.index(f"Note: a validation of the untrained network on 8 validation examples fails ({wanted}")
    assert "the first validation, after step 9, ends the training if it fails like that." in said[begin:]
    assert "step 1/9" not in said[:begin]


def test_a_metric_that_needs_more_examples_than_are_tried_is_said_and_trained_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"few": few_fail}
    tried = fit(network(), (X, Y), validation=(X, Y), metrics=metrics, epochs=1, quiet=False)
    # Which of the metrics fails, too.
    wanted = "fails (ValueError: only one class is there; The metric 'few' was given outputs float32[8, 2]"
    assert wanted in " ".join(capsys.readouterr().out.split())
    # The trial changes nothing that is learned.
    plain = fit(network(), (X, Y), validation=(X, Y), epochs=1)
    assert tried.parameter_hash == plain.parameter_hash
    few = fit(network(), (X, Y), validation=(X[:3], Y[:3]), epochs=1, quiet=False)
    assert few.metrics["loss"] > 0
    assert "Note:" not in capsys.readouterr().out


@pytest.mark.parametrize("selected", ["loss", "share"])
def test_what_selects_the_weights_and_is_nan_is_said_before_the_first_step(
    selected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # In training there is a gradient.
        return nn.functional.cross_entropy(outputs, targets) * (1 if outputs.requires_grad else math.nan)

    with pytest.raises(TrainError, match=r"is nan|is NaN"):
        fit(
            network(),
            (X, Y),
            validation=(X, Y),
            loss=loss,
            metrics={"share": lambda outputs, targets: math.nan},
            selection=Selection(metric=selected, mode="min"),
            epochs=1,
            quiet=False,
        )
    assert f"fails (the metric '{selected}', which selects the best weights, is NaN" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_error_of_a_loss_is_said_with_its_kind_and_names() -> None:
    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets["kind"])

    wanted = r"of train, targets 'label': int64 \[2\]: KeyError: 'kind'; The loss was given outputs float32\[2, 2\]"
    with pytest.raises(TrainError, match=wanted) as raised:
        fit(network(), (X, {"label": Y}), loss=loss, epochs=1)
    # The traceback of the loss is there.
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_batch_norm_over_a_picture_takes_one_example() -> None:
    module = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(18, 2)
    )
    assert fit(module, (X, Y), epochs=None, steps=2, batch_size=1).best_step == 2


HOLES = X.copy()
HOLES[[17, 40], 3] = np.nan


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


class NoExamples(Examples):
    input_dtype, input_shape = np.dtype(np.float32), (8,)

    def __len__(self) -> int:
        return 0

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        raise NotImplementedError


def plateau(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("module", "train", "changes", "sentence"),
    [
        (None, (X, Y), {}, "the network is a NoneType; give a torch.nn.Module"),
        (nn.ReLU(), (X, Y), {}, "no parameters to train"),
        (network().bfloat16(), (X, Y), {}, "'0.weight' is bfloat16, in which most.*network.float.*'bf16'"),
        (network().half(), (X, Y), {}, "'0.weight' is float16"),
        (network(), None, {}, r"there is no training set; give train=\(X, y\)"),
        (network(), X, {}, r"train is a ndarray of shape \[300, 8\]; give a pair"),
        (network(), (X, Y[:299]), {}, "X of train has 300 examples and y has 299"),
        (network(), (X[:0], Y[:0]), {}, r"X of train has the shape \[0, 8\]; give at least one"),
        (network(), NoExamples(), {}, "train has no examples; give at least one"),
        (network(), (HOLES, Y), {}, "NaN or infinite numbers in 2 of 300 examples, first in example 17"),
        (network(1), (X, HOLES[:, 3:4]), {}, "y of train has NaN"),
        (network(), (1e300 * X, Y), {}, "X of train has numbers that float32 cannot hold in .* of 300 .* in example 0"),
        (network(), (X.astype(str), Y), {}, "X of train is <U.*; give numbers"),
        (network(), ([[1.0], [1.0, 2.0]], [0, 1]), {}, "X of train is no array"),
        (network(), (X[:, :5], Y), {}, r"does not take float32 \[2, 5\] of train.*mat1 and mat2"),
        (network(), (X, Y), {"validation": (X[:, :5], Y)}, r"does not take float32 \[2, 5\] of validation"),
        (network(), (X, Y + 1), {}, "y of train has labels from 1 to 2, and the network gives 2 scores"),
        (network(), (X, X[:, 0]), {}, r"outputs float32 \[2, 2\] and targets float32 \[2\]; reshape y"),
        (Pair(), (X, Y), {}, "the network gives a tuple"),
        (network(), (X, Y), {"loss": lambda outputs, targets: outputs}, r"a Tensor of shape \[2, 2\]; it must"),
        (network(), (X, Y), {"optimizer": torch.optim.SGD(network().parameters())}, "is a SGD of the original network"),
        (network(), (X, Y), {"learning_rate": 1}, "fit has no argument 'learning_rate'; .* accepts"),
        (network(), (X, Y), {"metrics": {"q": lambda outputs, targets: 1}}, "give validation="),
        (network(), (X, Y), {"selection": Selection(metric="loss.a")}, "selection by 'loss.a' needs validation"),
        (network(), (X, Y), {"validation": (X, Y), "metrics": {"loss": accuracy}}, "a metric 'loss', and the loss is"),
        (network(), (X, Y), {"validation": (X, Y), "metrics": {"loss.q": accuracy}}, "metric 'loss.q'.*another name"),
        (network(), (X, Y), {"steps": 5}, "epochs=6 and steps=5"),
        (network(), (X, Y), {"schedule": plateau}, "ReduceLROnPlateau, which depends on a metric.*Use a Schedule"),
        (network(), (X, Y), {"batch_size": 1}, "of 1 gives the batch norm '1' a single.*a batch size of 2 or more.$"),
        (network(), (X, Y), IN_PARTS, "of 4 in 4 parts gives.*a batch size of 8 or more.$"),
        (network(), (X, Y), {"precision": "fp8"}, "precision 'fp8'"),
        (network(), (X, Y), {"device": "tpu"}, "the device is 'tpu'"),
        (network(), (X, Y), {"device": "meta"}, "choose 'cpu' or 'cuda'"),
        (network(), (X, Y), {"device": "cuda:77"}, "torch sees .* GPUs; choose another"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(module: Any, train: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        fit(module, train, **changes)
