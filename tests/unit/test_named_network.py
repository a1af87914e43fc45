"""How a network takes its inputs and gives its outputs: arguments, mappings, tuples and objects."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec
from penstock.runtime.named_network import NamedNetwork
from penstock.runtime.torch_executor import TorchExecutor

TOKENS = Dim("tokens", max=6)
IDS = TensorSpec(name="ids", dtype="int64", shape=(TOKENS,), meaning="ids")
MASK = TensorSpec(name="mask", dtype="int64", shape=(TOKENS,), meaning="mask")
SUM = TensorSpec(name="sum", dtype="int64", shape=(), meaning="sum")
EACH = TensorSpec(name="each", dtype="int64", shape=(TOKENS,), meaning="twice each")
BOXES = Dim("boxes", max=6, min=0)
FOUND = TensorSpec(name="found", dtype="int64", shape=(BOXES,), meaning="ids above 2, largest first")
TEXT, ONE = RecordSpec((IDS, MASK)), RecordSpec((IDS,))
BOTH = RecordSpec((SUM, EACH))
PICTURE = TensorSpec(name="picture", dtype="float32", shape=(2,), meaning="picture")
EXAMPLES = [{"ids": np.arange(1, n + 1), "mask": np.ones(n, np.int64)} for n in (2, 5, 1)]


class Pair(NamedTuple):
    each: Tensor
    sum: Tensor


@dataclass
class Answer:
    sum: Tensor
    each: Tensor
    loss: None = None


class ByKeyword(nn.Module):
    def forward(self, mask: Tensor, ids: Tensor, hidden: Any = None) -> Any:
        return {"each": ids * 2, "sum": (ids * mask).sum(1), "hidden": None}


class ByMapping(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        assert batch["tokens"].tolist() == [len(example["ids"]) for example in EXAMPLES][: len(batch["tokens"])]
        return (batch["ids"] * batch["mask"]).sum(1), batch["ids"] * 2


class ByRest(nn.Module):
    def forward(self, **batch: Tensor) -> Any:
        return Answer(sum=(batch["ids"] * batch["mask"]).sum(1), each=batch["ids"] * 2)


class Optional(nn.Module):
    def forward(self, x: Tensor, picture: Tensor | None = None) -> Any:
        assert picture is None
        return x.sum(1)


def test_one_input_is_the_first_parameter_where_that_is_required() -> None:
    total = TensorSpec(name="total", dtype="float32", shape=(), meaning="sum")
    assert NamedNetwork(Optional(), PICTURE, total)(torch.ones(3, 2))[0].tolist() == [2, 2, 2]


class WithLengths(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor, tokens: Tensor) -> Any:
        valid = torch.arange(ids.shape[1]) < tokens[:, None]
        assert torch.equal(valid, mask != 0)
        return Pair(each=ids * 2, sum=(ids * valid).sum(1))


class Served(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        raise AssertionError("predict is served")

    def predict(self, ids: Tensor, mask: Tensor) -> Any:
        return [(ids * mask).sum(1), ids * 2]


@pytest.mark.parametrize("network", [ByKeyword, ByMapping, ByRest, WithLengths, Served])
def test_a_network_is_called_as_it_was_written(network: type[nn.Module]) -> None:
    outputs = TorchExecutor(network(), TEXT, BOTH).predict(TEXT.of_many(EXAMPLES))
    assert [BOTH.to_numbers(output) for output in outputs] == [
        {"sum": int(example["ids"].sum()), "each": (example["ids"] * 2).tolist()} for example in EXAMPLES
    ]


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_one_tensor_needs_no_name() -> None:
    records = ONE.of_many([{"ids": example["ids"]} for example in EXAMPLES])
    each = RecordSpec((EACH,))
    outputs = TorchExecutor(Doubles(), ONE, each).predict(records)
    assert [each.to_numbers(output)["each"] for output in outputs] == [(e["ids"] * 2).tolist() for e in EXAMPLES]
    pictures = np.ones((3, 2), np.float32)
    doubled = TensorSpec(name="doubled", dtype="float32", shape=(2,), meaning="doubled")
    assert TorchExecutor(Doubles(), PICTURE, doubled).predict(pictures).tolist() == (pictures * 2).tolist()


class Finds(nn.Module):
    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, ids: Tensor) -> Any:
        found = torch.where(ids > 2, ids, 0).sort(1, descending=True).values
        return {"found": found} | ({"boxes": (ids > 2).sum(1)} if self.counts else {})


@pytest.mark.parametrize(("counts", "expected"), [(True, [[], [5, 4, 3], []]), (False, None)])
def test_a_length_that_no_input_has_comes_from_the_network(counts: bool, expected: list[list[int]] | None) -> None:
    output = RecordSpec((FOUND,))
    records = ONE.of_many([{"ids": example["ids"]} for example in EXAMPLES])
    outputs = TorchExecutor(Finds(counts), ONE, output).predict(records)
    found = [output.to_numbers(each)["found"] for each in outputs]
    # Without counts, all that the network gives is valid.
    assert found == (expected or [[0] * 5, [5, 4, 3, 0, 0], [0] * 5])


@pytest.mark.parametrize(
    ("forward", "input", "sentence"),
    [
        (
            lambda ids, more: ids,
            TEXT,
            r"the network takes \(ids, more\), but the application's inputs are 'ids', 'mask'",
        ),
        (lambda: 0, TEXT, r"the network takes \(nothing\)"),
        (
            lambda first, second: first,
            ONE,
            r"takes \(first, second\).*inputs are 'ids' \(and lengths 'tokens'\); give its forward parameters",
        ),
    ],
)
def test_a_network_of_other_arguments_is_refused(forward: Any, input: RecordSpec, sentence: str) -> None:
    module = nn.Module()
    module.forward = forward
    with pytest.raises(ApplicationError, match=sentence):
        NamedNetwork(module, input, BOTH)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda ids: ids, r"the network gives one tensor \[3, 5\], but the application's outputs are 'sum', 'each'"),
        (lambda ids: (ids,), "the network gives 1 values"),
        (lambda ids: {"sum": ids}, "the network gives a mapping of 'sum'"),
        (lambda ids: {"sum": ids, "each": ids.numpy()}, "gives 'each' as a numpy.ndarray; give tensors of torch"),
        (lambda ids: {"sum": [1], "each": ids}, "gives 'sum' as a list; give tensors of torch"),
        (lambda ids: None, "the network gives a NoneType"),
        (lambda ids: (ids.sum(1), ids * 0.5), r"gives 'each' as float32\[3, 5\], but it is declared as int64"),
        (lambda ids: (ids, ids), r"gives 'sum' as int64\[3, 5\]"),
        (
            lambda ids: (ids.sum(1), ids[:, :4]),
            r"gives 'each' as int64\[3, 4\], but it is declared as int64\[tokens<=6\] for each row\.",
        ),
        (
            lambda ids: (ids.sum(1), ids[:, 0]),
            r"gives 'each' as int64\[3\], but it is declared as int64\[tokens<=6\] for each row; "
            r"the first dimension must be the rows\.",
        ),
    ],
)
def test_other_outputs_are_refused(answer: Any, sentence: str) -> None:
    module = nn.Module()
    module.forward = lambda ids, mask: answer(ids)
    with pytest.raises(ApplicationError, match=sentence):
        TorchExecutor(module, TEXT, BOTH).predict(TEXT.of_many(EXAMPLES))


@pytest.mark.parametrize("boxes", [torch.tensor([1, 2, 99]), torch.tensor([[1], [2], [3]]), torch.tensor([0.5, 1, 1])])
def test_lengths_that_cannot_be_are_refused(boxes: Tensor) -> None:
    module = nn.Module()
    module.forward = lambda ids: {"found": ids, "boxes": boxes}
    with pytest.raises(ApplicationError, match=r"the network gives the lengths 'boxes'.*whole numbers from 0 to 6"):
        TorchExecutor(module, ONE, RecordSpec((FOUND,))).predict(
            ONE.of_many([{"ids": example["ids"]} for example in EXAMPLES])
        )
