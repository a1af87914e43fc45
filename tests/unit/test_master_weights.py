"""bf16 copies of weights: a network computes with them what autocast makes of its fp32 weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from penstock.core.errors import TrainError
from penstock.nn.entry import EntryConv2d
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.overrides import with_overrides
from penstock.train.parallel.buckets import GradientBuckets
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, EMASettings, Recipe, StepExecution
from penstock.train.step.master_weights import MasterWeights, why_no_master_weights
from penstock.train.step.schedules import warm_up_cosine
from penstock.train.trainer import Trainer

NOTHING = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))


def recipe(**changes: Any) -> Recipe:
    plain = Recipe(
        data=lambda: Data(train=NOTHING, validation=NOTHING),
        loss=CrossEntropy(),
        optimizer=sgd,
        batch_size=8,
        steps=6,
        precision="bf16",
        execution=StepExecution(master_weights=True),
    )
    return with_overrides(plain, changes)


class Net(nn.Module):
    """Has every kind of layer: with copies, without, one that is used twice, one that is used otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = EntryConv2d(3, 8, 5, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.odd = nn.Linear(8, 8)
        self.embedding = nn.Embedding(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)
        # Nothing is seen of what only training uses.
        self.aside = nn.Linear(8, 5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.norm(self.entry(x_BCHW)).relu()
        x_BCHW = self.twice(self.twice(x_BCHW).relu())
        x_BC = self.tied(self.frozen(x_BCHW.mean((2, 3)))) + self.embedding.weight.sum()
        made_BC = self.head(self.odd(x_BC) * self.odd.weight.mean())
        return made_BC + self.aside(x_BC) if self.training else made_BC


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def sgd(parameters: Any, **changes: Any) -> SGD:
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}
    return SGD(parameters, **settings | changes)


def rate_of(group: int) -> Tensor:
    return torch.tensor(0.01)


def made(make: Callable[[Any], Optimizer] = sgd) -> tuple[Net, Optimizer, MasterWeights]:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net.parameters())
    with autocast():
        return net, optimizer, MasterWeights(net, optimizer, rate_of, torch.randn(2, 3, 9, 9))


def test_only_weights_that_are_used_in_bf16_alone_have_copies() -> None:
    net, _, working = made()
    copied = {name for name, leaf in working.leaves.items() if leaf.dtype == torch.bfloat16}
    assert copied == {"entry.weight", "entry.bias", "twice.weight", "odd.bias", "head.weight", "head.bias"}
    assert "6 of 14 weights" in working.describe()
    before = dict(net.named_parameters())
    with working.entered():
        assert net.head.weight is working.leaves["head.weight"]
        assert dict(net.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
    assert working.weight_of(working.leaves["head.weight"]) is net.head.weight
    assert working.weight_of(net.norm.weight) is net.norm.weight


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": sgd,
    "plain sgd": partial(sgd, momentum=0.0),
    "nesterov": partial(sgd, nesterov=True),
    # With a large eps, so that what is next to nothing does not become a step of full length.
    "adam": partial(Adam, lr=0.01, weight_decay=1e-3, eps=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99), eps=0.01),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_with_copies_is_training_under_autocast(make: Callable[[Any], Optimizer], *, compiled: bool) -> None:
    ours, optimizer, working = made(make)
    theirs, their_optimizer, _ = made(make)
    assert why_no_master_weights(recipe(), optimizer) is None
    gradients = GradientBuckets(working.leaves, [], World(), ready=working.step, keep_comm_dtype=True)
    run: Any = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    for step in range(4):
        x_BCHW = torch.randn(6, 3, 9, 9, generator=torch.Generator().manual_seed(step))
        gradients.start()
        gradients.begin_last_backward()
        with working.entered(), autocast():
            loss = run(x_BCHW).square().mean()
        loss.backward()
        made_of = {name: working.leaves[name].grad for name in working.leaves}
        gradients.finish()
        their_optimizer.zero_grad()
        with autocast():
            expected = theirs(x_BCHW).square().mean()
        expected.backward()
        if step == 0:
            assert torch.equal(loss, expected)
            for name, parameter in theirs.named_parameters():
                found = made_of[name]
                assert (found is None) == (parameter.grad is None)
                assert found is None or torch.equal(found.float(), parameter.grad), name  # pyright: ignore[reportArgumentType]
        their_optimizer.step()
        for (name, mine), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5, msg=name)
            leaf = working.leaves[name]
            assert leaf is mine or torch.equal(leaf, mine.to(torch.bfloat16)), name
    state, right_state = optimizer.state_dict()["state"], their_optimizer.state_dict()["state"]
    for index, values in right_state.items():
        for name, value in values.items():
            if value is not None:
                torch.testing.assert_close(state[index][name], value, rtol=1e-4, atol=1e-5)


def test_replaced_weights_are_copied_anew() -> None:
    net, optimizer, working = made()
    with torch.no_grad():
        net.head.weight.fill_(3.0)
    optimizer.state[net.head.weight]["momentum_buffer"] = torch.zeros_like(net.head.weight)
    working.refresh()
    assert working.leaves["head.weight"].eq(3).all()
    working.step([working.leaves["head.weight"]], [torch.ones(5, 8, dtype=torch.bfloat16)])
    torch.testing.assert_close(net.head.weight.detach(), torch.full((5, 8), 3 - 0.01 * (1 + 3e-3)))


@pytest.mark.parametrize(
    ("changes", "make", "why"),
    [
        ({"precision": "fp32"}, sgd, "the precision is fp32"),
        ({"clip_norm": 1.0}, sgd, "gradients are clipped"),
        ({"execution.accumulation_steps": 2}, sgd, "gradients are accumulated"),
        ({}, partial(sgd, dampening=0.5), "the optimizer has dampening"),
        ({}, partial(sgd, maximize=True), "the optimizer has maximize"),
        ({}, partial(AdamW, amsgrad=True), "the optimizer has amsgrad"),
        ({}, RMSprop, "the optimizer is RMSprop"),
    ],
    # Functions have no name that is the same in every process.
    ids=("fp32", "clipped", "accumulated", "dampening", "maximize", "amsgrad", "RMSprop"),
)
def test_where_there_are_no_copies_the_run_says_why(changes: dict[str, Any], make: Any, why: str) -> None:
    trainer = Trainer(nn.Linear(6, 3), recipe(optimizer=make, **changes), 1, inputs=np.zeros((2, 6), np.float32))
    assert [why in notice for notice in trainer.layout.notices] == [True]
    assert torch.isfinite(trainer.step((torch.randn(8, 6), torch.randint(0, 3, (8,))), 0))


def test_steps_that_somebody_watches_or_weights_of_other_types_have_no_copies() -> None:
    hooked = sgd(nn.Linear(2, 2).parameters())
    hooked.register_step_post_hook(lambda *_: None)
    assert why_no_master_weights(recipe(), hooked) == "the optimizer's steps have hooks"
    assert why_no_master_weights(recipe(), sgd(nn.Linear(2, 2).double().parameters())) == "not all weights are float32"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x_BI)).relu())


class Stashes(Small):
    """Has a weight in a list that torch knows nothing of."""

    def forward(self, x_BI: Tensor) -> Tensor:
        if not hasattr(self, "stashed"):
            self.stashed = [self.head.weight]
        return nn.functional.linear(self.norm(self.body(x_BI)), self.stashed[0], self.head.bias)


class Clamps(Small):
    def forward(self, x_BI: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.head.weight.clamp_(-0.01, 0.01)
        return super().forward(x_BI)


class Exact(Small):
    """Computes its last layer in fp32."""

    def forward(self, x_BI: Tensor) -> Tensor:
        x_BI = self.norm(self.body(x_BI)).relu()
        with torch.autocast("cpu", enabled=False):
            return self.head(x_BI.float())


def trainer_of(module: nn.Module, **changes: Any) -> Trainer:
    asked = recipe(**changes)
    return Trainer(module, asked, asked.steps or 1, inputs=np.zeros((2, 6), np.float32))


BATCHES = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]


@pytest.mark.parametrize("kind", [Stashes, Clamps])
def test_a_network_that_goes_round_its_layers_is_refused(kind: type[nn.Module]) -> None:
    trainer = trainer_of(kind())
    with pytest.raises(TrainError, match=r"'head.weight' .*; train it with master_weights=False"):
        trainer.step(BATCHES[0], 0)


def test_what_is_computed_in_fp32_or_watched_has_no_copies() -> None:
    trainer = trainer_of(Exact())
    assert "2 of 6" in trainer.layout.notices[-1]
    assert torch.isfinite(trainer.step(BATCHES[0], 0))
    module, seen = Small(), list[int]()
    module.head.weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    trainer = trainer_of(module)
    assert "3 of 6" in trainer.layout.notices[-1]
    trainer.step(BATCHES[0], 0)
    assert seen == [24]


@pytest.mark.filterwarnings("ignore")  # torch's own, of what its compiler does
def test_what_was_compiled_without_copies_is_compiled_anew() -> None:
    torch.compiler.reset()
    ends: list[Tensor] = []
    for copies in (False, True):
        torch.manual_seed(0)
        net = Small()
        optimizer = sgd(net.parameters())
        run: Any = torch.compile(net, backend="aot_eager")
        with autocast():
            working = MasterWeights(net, optimizer, rate_of, torch.randn(2, 6)) if copies else None
        if working is None:
            for inputs, targets in BATCHES:
                optimizer.zero_grad()
                with autocast():
                    loss = CrossEntropy()(run(inputs), targets)
                loss.backward()
                optimizer.step()
        else:
            gradients = GradientBuckets(working.leaves, [], World(), ready=working.step, keep_comm_dtype=True)
            for inputs, targets in BATCHES:
                gradients.start()
                gradients.begin_last_backward()
                with working.entered():
                    with autocast():
                        loss = CrossEntropy()(run(inputs), targets)
                    loss.backward()
                gradients.finish()
                working.check()
        ends.append(torch.cat([weight.detach().flatten() for weight in net.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_that_is_resumed_goes_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    def begun() -> Trainer:
        torch.manual_seed(0)
        return trainer_of(Small(), optimizer=make, schedule=warm_up_cosine(0.2), ema=EMASettings(decay=0.9))

    whole, first, second = begun(), begun(), begun()
    for step, batch in enumerate(BATCHES):
        whole.step(batch, step)
        if step < 3:
            first.step(batch, step)
    with Saver(tmp_path, World()) as saver:
        save_checkpoint(saver, first, History(step=3))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    restore_checkpoint(checkpoint, second)
    for step in range(3, 6):
        second.step(BATCHES[step], step)
    for mine, right in zip(second.module.state_dict().values(), whole.module.state_dict().values(), strict=True):
        assert torch.equal(mine, right)
    with whole.ema_weights(), second.ema_weights():
        assert torch.equal(whole.module.state_dict()["head.weight"], second.module.state_dict()["head.weight"])
