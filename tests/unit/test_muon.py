"""Muon: torch's steps of matrices, AdamW's of all else, parts of stacked weights, the contract of the trainer."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.tensor_parallel import WeightSlice
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.step import muon
from penstock.train.step.capturable_optimizer import CapturableOptimizer, check_optimizer
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.muon import Muon, orthogonal
from penstock.train.trainer import Trainer


def give(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def twins(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in shapes]
    return [nn.Parameter(each.clone()) for each in made], [nn.Parameter(each.clone()) for each in made]


def trained_alike(
    one: torch.optim.Optimizer, other: torch.optim.Optimizer, pairs: Any, rtol: float, atol: float
) -> None:
    """Step both with the same gradients, and compare pairs of weights."""
    first, second = zip(*pairs, strict=True)
    for step in range(1, 6):
        give(list(first), step)
        give(list(second), step)
        one.step()
        other.step()
    for weight, right in pairs:
        torch.testing.assert_close(weight, right, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_a_matrix_moves_as_with_torchs(shape: tuple[int, int]) -> None:
    (weight,), (right,) = twins(shape)
    torchs = torch.optim.Muon([right], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    # torch iterates in bf16.
    trained_alike(Muon([("w", weight)], lr=0.02, weight_decay=0.1), torchs, [(weight, right)], rtol=0, atol=2e-3)


def test_all_else_moves_as_with_adamw() -> None:
    # A vector, a number, a kernel of one channel a group, a learned token, an embedding and a last layer.
    shapes = (6,), (), (8, 1, 5), (1, 7, 4), (30, 4), (3, 8)
    weights, right = twins(*shapes)
    names = "norm.bias", "scale", "depthwise.weight", "token", "token_embedding.weight", "head.weight"
    vectors = [weight for weight in right if weight.ndim < 2]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [w for w in right if w.ndim > 1]}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)
    mixed = Muon(list(zip(names, weights, strict=True)), lr=0.01, weight_decay=0.2)
    trained_alike(mixed, adamw, list(zip(weights, right, strict=True)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (nn.GRU(6, 8), 3),
        (nn.LSTM(6, 8, bidirectional=True), 4),
        # The rows of all gates over the columns of the state are 8, and no whole number.
        (nn.LSTM(6, 8, 2, proj_size=4), 4),
        (nn.LSTM(6, 8, proj_size=3), 4),
        (nn.GRUCell(6, 8), 3),
        (nn.LSTMCell(6, 8), 4),
        (nn.RNN(6, 8), 1),
        (nn.MultiheadAttention(8, 2), 3),
        (nn.MultiheadAttention(8, 2, kdim=6), 1),
    ],
    ids=[
        *("gru", "lstm", "lstm with projection", "lstm with a third", "gru cell", "lstm cell", "rnn", "attention"),
        "attention of others",
    ],
)
def test_stacked_matrices_move_as_matrices_of_their_own(layer: nn.Module, parts: int) -> None:
    whole = ("out_proj", "weight_hr")
    matrices = {name: weight for name, weight in layer.named_parameters() if weight.ndim > 1}
    stacked = {name: weight for name, weight in matrices.items() if not name.startswith(whole)}
    assert stacked
    for name, weight in stacked.items():
        apart = [nn.Parameter(part.clone()) for part in weight.detach().chunk(parts)]
        generator = torch.Generator().manual_seed(1)
        weight.grad = torch.randn(weight.shape, generator=generator)
        for part, grad in zip(apart, weight.grad.chunk(parts), strict=True):
            part.grad = grad.clone()
        # Of the layer's weights this one alone has a gradient.
        Muon(list(layer.named_parameters()), lr=0.1).step()
        Muon([(str(number), part) for number, part in enumerate(apart)], lr=0.1).step()
        torch.testing.assert_close(
            weight.detach(), torch.cat([part.detach() for part in apart]), rtol=1e-5, atol=1e-6, msg=name
        )
        weight.grad = None


def test_a_kernel_is_a_matrix_of_its_output_channels() -> None:
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(5, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    grad = torch.randn(5, 3, 2, 2)
    kernel.grad, matrix.grad = grad.contiguous(memory_format=torch.channels_last), grad.flatten(1)
    Muon([("conv.weight", kernel)], lr=0.1).step()
    Muon([("w", matrix)], lr=0.1).step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach())


def test_many_matrices_of_a_shape_move_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_TOGETHER", 100)
    weights, right = twins(*[(6, 8)] * 5)
    grads = [torch.randn(6, 8) for _ in weights]
    for weight, other, grad in zip(weights, right, grads, strict=True):
        weight.grad, other.grad = grad.clone(), grad.clone()
        Muon([("w", other)], lr=0.1).step()
    Muon([(str(number), weight) for number, weight in enumerate(weights)], lr=0.1).step()
    for weight, other in zip(weights, right, strict=True):
        torch.testing.assert_close(weight, other)


def test_singular_values_come_near_1_and_zeros_stay() -> None:
    torch.manual_seed(0)
    made = orthogonal(torch.stack([torch.randn(20, 12), torch.zeros(20, 12)]))
    values = torch.linalg.svdvals(made[0])
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert not made[1].any()
    assert orthogonal(torch.randn(1, 4, 4, dtype=torch.float64)).dtype == torch.float64


def stepped(optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """Take a step, and return the names of each weight's state."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    give(weights, 1)
    optimizer.step()
    return [set(optimizer.state[weight]) for weight in weights]


def test_the_matrices_of_a_group_are_known_however_it_came() -> None:
    adam, momentum = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}
    # torch takes any iterable, and names need not be unique.
    groups = [{"params": iter(weights_of()[:2]), "lr": 0.1}, {"params": weights_of()[:2], "others": ("a",)}]
    optimizer = Muon(groups)
    optimizer.add_param_group({"params": weights_of()[:1]})
    assert stepped(optimizer) == [momentum, adam, adam, adam, momentum]
    assert stepped(copy.deepcopy(optimizer)) == [momentum, adam, adam, adam, momentum]
    lazy = nn.LazyLinear(4)
    optimizer = Muon(list(lazy.named_parameters()))
    lazy(torch.zeros(2, 8))
    assert stepped(optimizer) == [momentum, adam]


def test_weights_of_several_types_decay_alike() -> None:
    # In bf16, 1 - 1e-3 is 1.
    half, single = (nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    half.grad, single.grad = torch.zeros_like(half), torch.zeros_like(single)
    Muon([("half", half), ("single", single)], lr=0.01, weight_decay=0.1).step()
    torch.testing.assert_close(single.detach(), torch.full((4, 4), 0.999))


def a_sparse_step() -> None:
    layer = nn.Embedding(4, 4, sparse=True)
    optimizer = Muon(list(layer.named_parameters()))
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()


def a_complex_step() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    Muon([("w", weight)]).step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon(nn.Linear(4, 4).parameters()), "needs the names of weights"),  # pyright: ignore[reportArgumentType]
        (lambda: Muon(weights_of(), others="head"), "others 'head'; it must be a list of words"),
        (lambda: Muon(weights_of(), betas=(0.9,)), "they must be two numbers"),  # pyright: ignore[reportArgumentType]
        (a_sparse_step, "Muon cannot step by sparse gradients"),
        (a_complex_step, "Muon cannot step complex weights"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        make()


def weights_of() -> list[tuple[str, nn.Parameter]]:
    (matrix, vector, last), _ = twins((6, 8), (8,), (4, 6))
    return [("a.weight", matrix), ("a.bias", vector), ("head.weight", last)]


def test_a_rate_on_the_device_gives_the_same_bits_as_a_number() -> None:
    ends: list[list[Tensor]] = []
    for as_tensor in (False, True):
        named = weights_of()
        optimizer = Muon(named, lr=0.3)
        for step in range(1, 5):
            give([weight for _, weight in named], step)
            optimizer.param_groups[0]["lr"] = torch.tensor(0.3 / step) if as_tensor else 0.3 / step
            optimizer.step()
        ends.append([weight.detach() for _, weight in named])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_step_whose_gradients_overflowed_leaves_everything_as_it_is() -> None:
    named = weights_of()
    weights = [weight for _, weight in named]
    optimizer = Muon(named, lr=0.1)
    stepper = CapturableOptimizer(optimizer, torch.device("cpu"), skips=True)
    for step, overflows in enumerate((False, True, False, True), 1):
        give(weights, step)
        if overflows:
            for weight in weights:
                assert weight.grad is not None
                weight.grad[0] = torch.inf
        before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
        stepper.step(torch.tensor(1.0 if overflows else 0.0))
        same = [torch.equal(weight, was) for weight, was in zip(weights, before[0], strict=True)]
        assert all(same) if overflows else not any(same)
        for index, values in before[1].items() if overflows else ():
            state = optimizer.state_dict()["state"][index]
            assert all(torch.equal(state[name], value) for name, value in values.items())
    # The weights that AdamW steps have no momentum of a matrix.
    assert [len(state) for state in optimizer.state.values()] == [1, 3, 3]


def test_nothing_is_read_by_the_host() -> None:
    # Of tensors on "meta" there is nothing to read.
    named = [(name, nn.Parameter(torch.empty_like(weight, device="meta"))) for name, weight in weights_of()]
    optimizer = Muon(named)
    for _ in range(2):
        for _, weight in named:
            weight.grad = torch.empty_like(weight)
        optimizer.found_inf = torch.zeros((), device="meta")
        optimizer.param_groups[0]["lr"] = torch.zeros((), device="meta")
        optimizer.step()
    assert all(value.is_meta for values in optimizer.state.values() for value in values.values())


def test_slices_of_weights_are_refused() -> None:
    with pytest.raises(TrainError, match="Muon may need whole weights"):
        check_optimizer(Muon(weights_of()), {"a.weight": WeightSlice(dim=1, sizes=(4, 4))})


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer("muon", lr=0.1, layer_decay=0.9), partial(Muon, lr=0.1), partial(Muon, lr=0.1, others=("5",))],
    ids=["declared", "class", "others"],
)
def test_a_network_learns_and_goes_on_from_a_checkpoint(optimizer: Callable[..., Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 8)).astype(np.float32)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).astype(np.int64)
    batch = (torch.from_numpy(inputs), torch.from_numpy(labels))

    def trainer() -> Trainer:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)]
        nothing = ArraySet(inputs=inputs, targets=labels)
        recipe = Recipe(
            data=lambda: Data(train=nothing, validation=nothing),
            loss=CrossEntropy(),
            optimizer=optimizer,
            batch_size=64,
            steps=40,
        )
        return Trainer(nn.Sequential(*layers), recipe, 40, inputs=inputs)

    one = trainer()
    first = one.step(batch, 0).item()
    for step in range(1, 39):
        one.step(batch, step)
    with Saver(tmp_path, one.world) as saver:
        save_checkpoint(saver, one, History(step=39))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    other = trainer()
    restore_checkpoint(checkpoint, other)
    ends = [together.step(batch, 39).item() for together in (one, other)]
    assert ends[0] == ends[1] < 0.4 * first
    assert all(torch.equal(*pair) for pair in zip(one.module.parameters(), other.module.parameters(), strict=True))
