"""What training over processes is made of, in one process: gradients in buckets, layouts, losses, batch norm."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.nn.normalisation import SequenceBatchNorm
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.checkpoint.state import full_state, load_full_state, parts_of
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.overrides import with_overrides
from penstock.train.parallel import buckets as gradients_module
from penstock.train.parallel import losses
from penstock.train.parallel.batch_norm import SynchronizedBatchNorm, synchronize
from penstock.train.parallel.buckets import GradientBuckets
from penstock.train.parallel.layout import lay_out, rows_of
from penstock.train.parallel.losses import CrossEntropy, _VocabParallelLoss  # pyright: ignore[reportPrivateUsage]
from penstock.train.parallel.tensor_parallel import ParallelModel, WeightSlice, parallelize
from penstock.train.parallel.world import World
from penstock.train.placement import Placement
from penstock.train.recipe import ArraySet, Data, EMASettings, Parallel, Recipe, StepExecution
from penstock.train.step.capturable_optimizer import check_optimizer
from penstock.train.trainer import Trainer

NOTHING = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))


def recipe(**changes: Any) -> Recipe:
    made = Recipe(
        data=lambda: Data(train=NOTHING, validation=NOTHING),
        loss=CrossEntropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=8,
        steps=1,
    )
    return with_overrides(made, changes)


def company(size: int) -> World:
    """As if there were others; nothing is asked of them."""
    group: Any = object() if size > 1 else None
    return World(0, size, group=group)


def test_gradients_of_one_process_are_the_backward_passs() -> None:
    learned, fixed = nn.Linear(6, 5), nn.Linear(5, 2, bias=False).requires_grad_(False)
    net, unused = nn.Sequential(learned, fixed), nn.Linear(2, 2, bias=False)
    parameters = dict(net.named_parameters()) | {f"unused.{name}": own for name, own in unused.named_parameters()}
    gradients = GradientBuckets(parameters, [], World())
    for _ in range(2):
        gradients.start()
        inputs = torch.randn(3, 6)
        for part in (inputs[:1], inputs[1:]):
            net(part).sum().backward()
        gradients.finish()
        expected = torch.autograd.grad(net(inputs).sum(), [*learned.parameters()])
        for found, gradient in zip(gradients.tensors, expected, strict=False):
            torch.testing.assert_close(found, gradient)
        assert gradients.tensors[-1].count_nonzero() == 0
        assert fixed.weight.grad is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_of_several_processes_travel_in_buckets(
    monkeypatch: pytest.MonkeyPatch, precision: Literal["fp32", "bf16"], at_once: bool
) -> None:
    sent: list[Tensor] = []
    ready: list[nn.Parameter] = []

    def doubled(flat: Tensor, **_: Any) -> Any:
        # As if one other process had the same.
        sent.append(flat)
        return SimpleNamespace(wait=lambda: flat.mul_(2))

    monkeypatch.setattr(gradients_module.dist, "all_reduce", doubled)
    convolution, linear, own = nn.Conv2d(3, 4, 3), nn.Linear(16, 5), nn.Linear(5, 2)
    unused = nn.Linear(2, 2, bias=False)
    net = nn.Sequential(convolution, nn.Flatten(), linear, own)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    parameters = dict(net.named_parameters()) | {f"unused.{name}": own for name, own in unused.named_parameters()}
    cut = ["3.weight", "3.bias"]
    gradients = GradientBuckets(
        parameters,
        cut,
        company(2),
        precision=precision,
        bucket_bytes=300,
        ready=None if at_once else lambda done, _: ready.extend(done),
    )
    for _ in range(2):
        sent.clear()
        ready.clear()
        gradients.start()
        inputs = torch.randn(4, 3, 4, 4)
        net(inputs[:2]).sum().backward()
        assert not sent
        assert not ready
        gradients.begin_last_backward()
        net(inputs[2:]).sum().backward()
        # What the backward pass has not used is in the first bucket, which cannot be sent before the end.
        assert not sent
        gradients.finish()
        assert len(sent) == 2
        assert all(flat.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32) for flat in sent)
        assert {id(each) for each in ready} == (set() if at_once else {id(each) for each in parameters.values()})
        expected = torch.autograd.grad(net(inputs).sum(), [*net.parameters()])
        rtol, atol = (1e-5, 1e-6) if precision == "fp32" else (2**-7, 1e-3)
        for (name, parameter), gradient in zip(net.named_parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient if name in cut else 2 * gradient, rtol=rtol, atol=atol)
        assert convolution.weight.grad is not None
        assert convolution.weight.grad.stride() == convolution.weight.stride()
        assert unused.weight.grad is not None
        assert unused.weight.grad.count_nonzero() == 0


def test_gradients_travel_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        gradients_module.dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: seen.append("summed"))
    )
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.Sequential(first, last)
    gradients = GradientBuckets(
        dict(net.named_parameters()), [], company(2), bucket_bytes=60, ready=lambda *_: seen.append("ready")
    )
    for parameter in first.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("made"))
    gradients.start()
    gradients.begin_last_backward()
    net(torch.randn(2, 4)).sum().backward()
    assert seen[:2] == ["summed", "ready"]
    gradients.finish()
    assert sorted(seen[2:]) == ["made", "made", "ready", "summed"]
    assert [parameter is last.weight for parameter in gradients.bucket_boundaries] == [True]


def test_nothing_travels_while_layers_wait_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    names = {id(parameter): name for name, parameter in net.named_parameters()}

    def sent(*_: Any, **__: Any) -> Any:
        seen.append("sent")
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(gradients_module.dist, "all_reduce", sent)
    gradients = GradientBuckets(
        dict(net.named_parameters()),
        ["2.weight", "3.weight"],
        company(2),
        bucket_bytes=60,
        ready=lambda done, _: seen.extend(f"stepped {names[id(each)]}" for each in done),
    )
    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(f"made {names[id(parameter)]}"))
    for _ in range(2):
        seen.clear()
        gradients.start()
        gradients.begin_last_backward()
        net(torch.randn(2, 4)).sum().backward()
        gradients.finish()
        # Each hook of this test comes behind that of the gradients.
        assert seen == [
            "made 4.weight",
            "made 3.weight",
            "sent",
            "stepped 4.weight",
            "stepped 3.weight",
            "stepped 2.weight",
            "made 2.weight",
            "sent",
            "stepped 1.weight",
            "made 1.weight",
            "sent",
            "stepped 0.weight",
            "made 0.weight",
        ]


def test_the_norm_and_clipping_are_torchs() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    gradients = GradientBuckets(dict(net.named_parameters()), ["1.weight"], World(), bucket_bytes=100)
    gradients.start()
    net(torch.randn(4, 6)).square().sum().backward()
    own = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    total = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in own]))
    torch.testing.assert_close(gradients.norm(), total)
    gradients.clip(2 * total.item())
    assert all(
        torch.equal(parameter.grad, gradient)
        for parameter, gradient in zip(net.parameters(), own, strict=True)
        if parameter.grad is not None
    )
    gradients.clip(total.item() / 2)
    torch.testing.assert_close(gradients.norm(), total / 2)


def test_accumulated_parts_give_the_step_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    inputs, labels = torch.randn(8, 6), torch.from_numpy(rng.integers(0, 3, 8))
    ends: list[Tensor] = []
    for accumulate in (1, 4):
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Linear(6, 3), recipe(execution=StepExecution(accumulation_steps=accumulate)), 1, inputs=inputs.numpy()
        )
        loss = trainer.step((inputs, labels), 0)
        ends.append(torch.cat([loss[None], *(parameter.flatten() for parameter in trainer.module.parameters())]))
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize(
    ("changes", "size", "sentence"),
    [
        ({"batch_size": 3}, 4, "a batch of 3 is less than an example for each of 4 processes"),
        (
            {"batch_size": 8, "execution.accumulation_steps": 3},
            1,
            r"over 1 process is 8 examples each, .* into 3 equal parts \(execution.accumulation_steps=3\)",
        ),
        ({"batch_size": 10, "execution.accumulation_steps": 2}, 4, "2 to 3 examples each"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(changes: dict[str, Any], size: int, sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        rows_of(recipe(**changes), company(size))


def test_shares_of_a_batch() -> None:
    assert rows_of(recipe(batch_size=10), company(4)) == (3, 3, 2, 2)
    assert rows_of(recipe(batch_size=8, execution=StepExecution(accumulation_steps=2)), company(2)) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"execution.accumulation_steps": 0}, "execution.accumulation_steps 0; it must be a number above 0"),
        ({"clip_norm": -1.0}, "clip_norm -1.0"),
        ({"parallel.batch_norm": "shared"}, "batch_norm 'shared'; choose one of local, synchronized"),
        ({"parallel.gradient_precision": "fp8"}, "gradient_precision 'fp8'"),
        ({"parallel.placements": "best"}, "placements 'best'; give 'auto', or placements by layer"),
    ],
)
def test_a_recipe_for_several_that_cannot_be_followed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        recipe(**changes)


def test_alone_placements_are_checked_and_change_nothing() -> None:
    inputs = torch.randn(4, 6)
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    pair = {"0": Placement(kind="column-parallel"), "2": Placement(kind="row-parallel")}
    laid = lay_out(net, recipe(parallel=Parallel(placements=pair)), World(), inputs)
    assert isinstance(laid.model.module.get_submodule("0"), nn.Linear)
    with pytest.raises(TrainError, match="a row-parallel linear layer must come next"):
        lay_out(net, recipe(parallel=Parallel(placements={"0": Placement(kind="column-parallel")})), World(), inputs)


def test_parts_and_wholes_of_a_state() -> None:
    whole = {"a": torch.arange(10.0).reshape(5, 2), "b": torch.arange(3.0)}
    shard = WeightSlice(dim=0, sizes=(2, 2, 1))
    torch.testing.assert_close(torch.cat([shard.of(whole["a"], rank) for rank in range(3)]), whole["a"])
    other = WeightSlice(dim=1, sizes=(1, 1))
    assert other.of(whole["a"], 1).tolist() == [[1], [3], [5], [7], [9]]


def test_a_sharded_layer_keeps_its_names_and_counts_its_batches_once() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    inputs = torch.randn(6, 4)
    plain = net()
    plain(inputs).sum().backward()
    placed = parallelize(
        nn.Sequential(net()), {"0": Placement(kind="fully-sharded", activation_checkpointing=True)}, World(), (6,)
    )
    placed.module(inputs).sum().backward()
    state = full_state(placed, World(), placed.module.state_dict())
    assert state.keys() == {f"0.{name}" for name in plain.state_dict()}
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[f"0.{name}"], tensor)
    doubled = {name: tensor * 2 for name, tensor in state.items()}
    load_full_state(placed, World(), doubled)
    again = full_state(placed, World(), placed.module.state_dict())
    assert all(torch.equal(again[name], tensor) for name, tensor in doubled.items())
    assert parts_of(placed, World(), {"x": torch.zeros(1)}).keys() == {"x"}


def test_a_state_of_another_network_is_refused() -> None:
    with pytest.raises(TrainError, match="does not fit the network"):
        load_full_state(ParallelModel(module=nn.Linear(2, 2)), World(), {"weight": torch.zeros(3, 3)})


def test_cross_entropy_is_torchs() -> None:
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 2, 2, 1])
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(CrossEntropy(0.1)(logits, labels), expected)
    with pytest.raises(TrainError, match=r"the smoothing is 1.5; it must be from 0 to below 1"):
        CrossEntropy(1.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_cross_entropy_is_torchs(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    _alone(monkeypatch)
    labels = torch.tensor([0, 3, 2, 2, 1])
    for targets in (labels, torch.randn(5, 4).softmax(1), nn.functional.one_hot(labels, 4) * 0.5):
        logits = torch.randn(5, 4, requires_grad=True)
        expected = nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        (expected_grad,) = torch.autograd.grad(expected, logits)
        found = CrossEntropy(smoothing).vocab_parallel(World(), logits, targets, (5,))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, logits)[0], expected_grad)


def test_targets_that_are_no_classes_are_refused_and_where_nobody_looks_the_loss_is_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _alone(monkeypatch)
    logits, over = torch.randn(3, 4), CrossEntropy().vocab_parallel
    for label in (4, -1, -100):
        with pytest.raises(TrainError, match=f"a label is {label}; a vocab-parallel last layer takes 0..3"):
            over(World(), logits, torch.tensor([0, label, 1]), (3,))
        loss: Any = _VocabParallelLoss.apply(World(), logits, torch.tensor([0, label, 1]), (3,), 0.0)
        assert loss.isnan()
    with pytest.raises(TrainError, match=r"or probabilities as floats \[n, 4\], not torch.float32 \[3, 5\]"):
        over(World(), logits, torch.zeros(3, 5), (3,))


def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums and gathers of one process."""
    monkeypatch.setattr(losses, "start_all_gather", lambda world, name, own, **_: lambda: own[None])


class Odd(torch.optim.SGD):
    """Not one of torch's own."""


class Said(torch.optim.SGD):
    """Of which is said that it may."""

    elementwise = True


def test_optimizers_that_need_whole_weights_are_refused_where_weights_are_cut() -> None:
    cut = {"0.weight": WeightSlice(dim=0, sizes=(1, 1))}
    weights = [nn.Parameter(torch.zeros(2, 2))]
    for fine in (torch.optim.SGD(weights), torch.optim.AdamW(weights), Said(weights)):
        check_optimizer(fine, cut)
    check_optimizer(torch.optim.Adafactor(weights), {})
    for refused in (torch.optim.Adafactor(weights), Odd(weights)):
        with pytest.raises(TrainError, match=f"{type(refused).__name__} .* '0.weight'"):
            check_optimizer(refused, cut)


def test_a_synchronized_batch_norm_has_the_same_state_and_answers_when_served() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    net(torch.randn(4, 1, 5, 5))
    net.eval()
    names, inputs = list(net.state_dict()), torch.randn(2, 1, 5, 5)
    expected = net(inputs)
    synchronize(net, company(2), (4, 4))
    assert isinstance(net[1], SynchronizedBatchNorm)
    assert list(net.state_dict()) == names
    net.eval()
    torch.testing.assert_close(net(inputs), expected)


def test_a_batch_norm_with_one_example_in_a_process_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(TrainError, match=r"a batch of 3 over 2 processes .*'1'.* of 4 or more, or batch_norm='sync"):
        lay_out(net, recipe(batch_size=3), company(2), torch.randn(2, 4))
    assert net[1].training


@pytest.mark.parametrize(
    ("norm", "sentence"),
    [
        (SequenceBatchNorm(3), "'0' is a batch norm over sequences"),
        (nn.BatchNorm1d(3, affine=False), "without running statistics, weights or momentum"),
        (nn.BatchNorm1d(3, momentum=None), "without running statistics, weights or momentum"),
    ],
)
def test_a_batch_norm_that_cannot_be_synchronized_is_refused(norm: nn.Module, sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        synchronize(nn.Sequential(norm), company(2), (4, 4))


def test_the_running_mean_of_the_weights_is_kept_validated_and_restored(tmp_path: Path) -> None:
    inputs, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(nn.Linear(6, 3), recipe(ema=EMASettings(decay=0.75)), 4, inputs=inputs.numpy())

    def weight(of: Trainer) -> Tensor:
        return of.module.get_parameter("weight").detach()

    one = trainer()
    mean = weight(one).clone()
    for step in range(3):
        one.step((inputs, labels), step)
        mean = 0.75 * mean + 0.25 * weight(one)
    last = weight(one).clone()
    with one.ema_weights():
        torch.testing.assert_close(weight(one), mean)
    assert torch.equal(weight(one), last)
    with Saver(tmp_path, World()) as saver:
        save_checkpoint(saver, one, History(step=3))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    other = trainer()
    restore_checkpoint(checkpoint, other)
    for together in (one, other):
        together.step((inputs, labels), 3)
    with one.ema_weights(), other.ema_weights():
        assert torch.equal(weight(one), weight(other))
        assert not torch.equal(weight(one), last)
