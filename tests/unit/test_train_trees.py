"""Training of networks and losses over trees of tensors, of varying length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core.errors import TrainError
from penstock.train.data.examples import ArraySet
from penstock.train.data.loader import first_batch
from penstock.train.parallel.dataflow import OUTPUTS, linear_uses
from penstock.train.parallel.gathered import gathered
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.planner import check
from penstock.train.parallel.world import World
from penstock.train.placement import Placement
from penstock.train.recipe import Data, Recipe, Selection, StepExecution, accuracy
from penstock.train.trainer import Trainer
from tests.support.checkpoints import done, together
from tests.support.trees import Scores, texts


@dataclass
class Found:
    scores: Any
    other: Any = None


def loss_of(outputs: Any, targets: Any) -> Tensor:
    tags = nn.functional.cross_entropy(outputs["tags"].flatten(0, 1), targets["tags"].flatten())
    return nn.functional.cross_entropy(outputs["label"], targets["label"]) + tags + 0.001 * outputs["penalty"]


def fit(examples: Any, module: nn.Module | None = None, **more: Any) -> penstock.Fitted:
    given: dict[str, Any] = {"epochs": 3} | more
    return penstock.fit(module or Scores(), examples, quiet=True, device="cpu", **given)


def tag_accuracy(outputs: Any, targets: Any) -> float:
    assert outputs["extra"] is outputs["kept"] is None
    assert outputs["penalty"].ndim == 0
    known = targets["tags"] >= 0
    return (outputs["tags"].argmax(2) == targets["tags"])[known].double().mean().item()


def test_fit_trains_and_validates_on_trees(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(1, 9, 400).tolist()
    train, validation = texts(sizes, tags=True), texts([12, *sizes[:99]], tags=True)
    given: dict[str, Any] = {
        "validation": validation,
        "loss": loss_of,
        "metrics": {"tags": tag_accuracy},
        "epochs": 8,
        "batch_size": 32,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "execution": StepExecution(threads=1),
    }
    fitted = fit(train, **given)
    assert fitted.metrics["tags"] > 0.95
    in_parts: dict[str, Any] = given | {"execution": StepExecution(threads=1, accumulation_steps=2)}
    parts = fit(train, **in_parts)
    assert parts.metrics["tags"] > 0.95
    stopped = fit(train, **given, out=tmp_path / "run")
    assert stopped.parameter_hash == fitted.parameter_hash
    assert fit(train, **given, out=tmp_path / "run").parameter_hash == fitted.parameter_hash
    with pytest.raises(TrainError, match="the train examples changed since the run"):
        fit(texts(sizes[::-1], tags=True), **given, out=tmp_path / "run")


def test_fit_takes_dictionaries_of_arrays() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.a(a) + self.b(b)

    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {"a": torch.randn(50, 3).double(), "b": rng.normal(size=(50, 4))}
    fitted = fit((inputs, rng.integers(0, 2, 50)), Added(), epochs=1)
    assert np.isfinite(fitted.metrics["train_loss"])
    both = fit((inputs, (rng.normal(size=50), rng.normal(size=(50, 2)))), Added(), epochs=1, loss=two_losses)
    assert np.isfinite(both.metrics["train_loss"])
    with pytest.raises(TrainError, match="targets are a tuple; give loss"):
        fit((inputs, (np.zeros(50), np.zeros(50))), Added())
    with pytest.raises(TrainError, match="50 examples and y has 49"):
        fit((inputs, np.zeros(49)), Added())
    with pytest.raises(TrainError, match="50 examples and another array has 2"):
        fit((inputs | {"b": [[1.0], [2.0, 3.0]]}, np.zeros(50)), Added())
    with pytest.raises(TrainError, match=r"network takes \(a, b\), but the inputs of train are 'a', 'c'"):
        fit(({"a": inputs["a"], "c": inputs["b"]}, np.zeros(50, int)), Added())
    with pytest.raises(TrainError, match="give both the same tensors"):
        fit((inputs, np.zeros(50, int)), Added(), validation=(np.zeros((2, 3)), np.zeros(2, int)))


def two_losses(outputs: Tensor, targets: Any) -> Tensor:
    return (outputs[:, 0] - targets[0]).square().mean() + (outputs - targets[1]).square().mean()


def test_a_network_gets_lengths_under_their_name() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(1, 1)

        def forward(self, x: Tensor, x_length: Tensor) -> Tensor:
            return self.out((x.sum(1) / x_length)[:, None])

    rows = [np.ones(size, np.float32) for size in (1, 5, 3)]
    fitted = fit(({"x": rows}, np.zeros((3, 1))), Means(), epochs=1)
    assert np.isfinite(fitted.metrics["train_loss"])


def test_a_loss_of_one_tensor_refuses_a_mapping() -> None:
    with pytest.raises(TrainError, match="gives a dict, and cross_entropy takes one tensor; give loss"):
        fit(texts([1, 2]))


def test_outputs_of_a_mapping_are_traced_as_several() -> None:
    batch = first_batch(texts([2, 3]), 2).inputs
    uses = linear_uses(Scores(), batch, lambda network, inputs: network(inputs["ids"], inputs["mask"]))
    assert OUTPUTS in uses["out"].goes_to


def test_a_vocab_parallel_layer_needs_one_tensor_of_outputs() -> None:
    batch = first_batch(texts([2, 3]), 2).inputs
    uses = linear_uses(Scores(), batch, lambda network, inputs: network(inputs["ids"], inputs["mask"]))
    placements = {"out": Placement(kind="vocab-parallel")}
    with pytest.raises(TrainError, match="is vocab-parallel, but it is not the network's last layer"):
        check(Scores(), placements, uses, (2, 2), CrossEntropy())


def test_a_dataclass_of_outputs_reaches_the_loss_and_the_metrics() -> None:
    class Gives(Scores):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            return Found(super().forward(ids, mask)["label"])

    def loss(outputs: Found, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.scores, targets)

    def metric(outputs: Found, targets: Tensor) -> float:
        assert (type(outputs), outputs.other, len(outputs.scores)) == (Found, None, len(targets))
        return 1.0

    examples = texts([3, 1, 4, 1, 5])
    assert fit(examples, Gives(), validation=examples, loss=loss, metrics={"one": metric}).metrics["one"] == 1


class Tagger(nn.Module):
    """Scores of three classes for every token, `[B, 3, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).transpose(1, 2)


def test_processes_gather_outputs_with_a_length_of_their_own() -> None:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), int(x.sum(1).max()), 2) * self.out(x)[:, None]

    inputs = np.zeros((6, 4), np.float32)
    inputs[:, 0], inputs[3:] = 1, 1
    examples = ArraySet(inputs=inputs, targets=np.arange(6))
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=lambda outputs, targets: outputs.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
    )

    def run(world: World) -> None:
        predictions = Trainer(Boxes(), recipe, 1, world, inputs=inputs[:2]).predict(examples)
        if predictions is not None:
            assert predictions.outputs.shape == (6, 4, 2)
            assert (predictions.outputs[:3, 1:] == 0).all()
        labels = torch.ones(1, 1 + world.rank, dtype=torch.uint8)
        assert gathered(world, "labels", labels, 2, fills=True).tolist() == [[1, -100], [1, 1]]

    done(together(2, run))


def test_floats_padded_with_zeros_need_a_loss() -> None:
    rows = [np.ones(size, np.float32) for size in (1, 3, 2)]
    with pytest.raises(TrainError, match=r"floats of different lengths.*give loss=FUNCTION"):
        fit(({"x": rows}, rows), nn.Linear(1, 1))


def test_the_accuracy_of_tokens_leaves_the_padding_out() -> None:
    scores = torch.tensor([[[1.0, 0, 1], [0, 1, 0]]])
    assert accuracy(scores, torch.tensor([[0, 0, -100]])) == 0.5
    assert accuracy(scores, scores) == 1
    ids = [np.arange(size) for size in (3, 7, 5, 9)]
    labels = [row % 3 for row in ids]
    given: dict[str, Any] = {"validation": ({"ids": ids}, labels), "epochs": 100}
    fitted = fit(({"ids": ids}, labels), Tagger(), optimizer=lambda of: torch.optim.Adam(of, lr=0.1), **given)
    assert fitted.metrics["accuracy"] == 1


def test_a_tuple_of_rows_is_one_array_of_targets() -> None:
    inputs, labels = zip(*[(torch.randn(4), torch.tensor(place % 2)) for place in range(6)], strict=True)
    assert np.isfinite(fit((inputs, labels), nn.Linear(4, 2)).metrics["train_loss"])
    rows = tuple(torch.randn(2) for _ in range(6))
    assert np.isfinite(fit((inputs, rows), nn.Linear(4, 2)).metrics["train_loss"])
    tokens = tuple(torch.arange(size) % 3 for size in range(1, 7))
    assert np.isfinite(fit(({"ids": list(tokens)}, tokens), Tagger()).metrics["train_loss"])


def test_labels_of_tokens_that_are_no_class_are_refused() -> None:
    ids = [np.arange(size) for size in (1, 2, 3)]
    with pytest.raises(TrainError, match="labels from 0 to 3, and the network gives 3 scores"):
        fit(({"ids": ids}, [row % 4 for row in [*ids[:2], np.array([0, 1, 3])]]), Tagger())


def test_batches_of_a_validation_of_records_are_as_large_as_a_few_of_the_training() -> None:
    seen: list[int] = []

    class Counts(Tagger):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(len(ids))
            return super().forward(ids)

    ids = [np.arange(2)] * 50
    fit(({"ids": ids}, ids), Counts(), validation=({"ids": ids}, ids), batch_size=2, epochs=1)
    assert max(seen) == 8


def test_exchanged_targets_are_another_training(tmp_path: Path) -> None:
    ones, zeros = np.ones(4, int), np.zeros(4, int)
    given: dict[str, Any] = {"loss": lambda outputs, targets: outputs.mean() * len(targets), "out": tmp_path / "run"}
    fit((np.ones((4, 2)), {"p": ones, "q": zeros}), nn.Linear(2, 2), **given)
    with pytest.raises(TrainError, match="the train examples changed since the run"):
        fit((np.ones((4, 2)), {"q": ones, "p": zeros}), nn.Linear(2, 2), **given)


def parts_of_loss(outputs: Any, targets: Any) -> dict[str, Tensor]:
    tags = nn.functional.cross_entropy(outputs["tags"].flatten(0, 1), targets["tags"].flatten())
    return {"label": nn.functional.cross_entropy(outputs["label"], targets["label"]), "tags": tags}


def shares(outputs: Any, targets: Any) -> dict[str, float]:
    of_label = (outputs["label"].argmax(1) == targets["label"]).double().mean().item()
    return {"label": of_label, "tags": tag_accuracy(outputs, targets)}


def test_a_mapping_of_losses_is_summed_and_each_is_reported(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(1, 9, 100).tolist()
    given: dict[str, Any] = {
        "validation": texts(sizes[:30], tags=True),
        "epochs": 2,
        "execution": StepExecution(threads=1, accumulation_steps=2),
        "batch_size": 20,
    }
    whole = fit(texts(sizes, tags=True), loss=lambda *both: sum(parts_of_loss(*both).values()), **given)
    selection = Selection(metric="share.tags", mode="max")
    named = {"loss": parts_of_loss, "metrics": {"share": shares}, "selection": selection}
    fitted = fit(texts(sizes, tags=True), **named, **given, out=tmp_path / "run")
    last = fitted.history[-1]
    assert last["validation_loss"] == pytest.approx(last["validation_loss.label"] + last["validation_loss.tags"])
    assert [line["train_loss"] for line in fitted.history] == [line["train_loss"] for line in whole.history]
    assert fitted.metrics["share.tags"] == max(line["validation_share.tags"] for line in fitted.history)
    assert '"validation_loss.tags"' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_processes_agree_on_named_losses_and_metrics() -> None:
    inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    examples = ArraySet(inputs=inputs, targets=np.arange(8))
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=lambda outputs, targets: {"a": outputs.square().mean(), "b": outputs.abs().mean()},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        metrics={"size": lambda outputs, targets: {"rows": len(outputs), "width": outputs.shape[1]}},
        batch_size=8,
        epochs=1,
    )
    torch.manual_seed(0)
    weights = nn.Linear(4, 2).state_dict()

    def run(world: World) -> None:
        module = nn.Linear(4, 2)
        module.load_state_dict(weights)
        trainer = Trainer(module, recipe, 1, world, inputs=inputs[:2])
        values = trainer.validate(examples)
        assert world.all_gather_objects(values) == [values, values]
        assert (values["size.rows"], values["size.width"]) == (8, 2)
        assert values["loss"] == pytest.approx(values["loss.a"] + values["loss.b"])
        batch = torch.from_numpy(inputs[trainer.rows]), torch.arange(8)[trainer.rows]
        assert world.sum_on_host(trainer.step(batch, 0)) == pytest.approx([values["loss"]])

    done(together(2, run))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": lambda outputs, targets: {}}, "the loss of .* is an empty mapping"),
        (
            {"loss": lambda outputs, targets: {"a": outputs}},
            r"the loss 'a' of .* is a Tensor of shape \[\d+, 2\]; it must be one scalar tensor",
        ),
        ({"loss": lambda outputs, targets: 1.0}, "the loss of .* is a float; it must be one scalar tensor"),
        (
            {"metrics": {"m": lambda outputs, targets: {"k": [1]}}},
            r"the metric 'm.k' is a list; a metric gives a number",
        ),
        ({"metrics": {"m": lambda outputs, targets: outputs}}, r"the metric 'm' is a Tensor of shape \[6, 2\]"),
        ({"selection": Selection(metric="loss.x")}, "by the metric 'loss.x', and a validation gives loss, accuracy;"),
        ({"selection": Selection(metric="x.y")}, "selection.metric 'x.y'; choose one of loss, accuracy"),
    ],
)
def test_losses_and_metrics_of_other_kinds_are_refused(given: dict[str, Any], says: str) -> None:
    examples = np.ones((6, 3), np.float32), np.zeros(6, int)
    with pytest.raises(TrainError, match=says):
        fit(examples, nn.Linear(3, 2), validation=examples, **given)
