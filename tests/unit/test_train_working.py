"""bf16 copies of weights: a network computes with them what autocast makes of its fp32 weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from penstock.nn.entry import EntryConv2d
from penstock.train.gradients import Gradients
from penstock.train.working import WorkingWeights, steps_copies
from penstock.train.world import World


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


def made(make: Callable[[Any], Optimizer] = sgd) -> tuple[Net, Optimizer, WorkingWeights]:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net.parameters())
    with autocast():
        return net, optimizer, WorkingWeights(net, optimizer, [torch.tensor(0.01)], torch.randn(2, 3, 9, 9))


def test_only_weights_that_are_used_in_bf16_alone_have_copies() -> None:
    net, _, working = made()
    copied = {name for name, leaf in working.leaves.items() if leaf.dtype == torch.bfloat16}
    assert copied == {"entry.weight", "entry.bias", "twice.weight", "odd.bias", "frozen.weight", "frozen.bias"} | {
        "head.weight",
        "head.bias",
    }
    before = dict(net.named_parameters())
    with working.entered():
        assert net.head.weight is working.leaves["head.weight"]
        assert dict(net.named_parameters()).keys() == before.keys()
        assert net.state_dict()["head.weight"].dtype == torch.float32
    assert net.head.weight is before["head.weight"]
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
    assert steps_copies(optimizer)
    gradients = Gradients(working.leaves, [], World(), ready=working.step, as_sent=True)
    run: Any = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    for step in range(4):
        x_BCHW = torch.randn(6, 3, 9, 9, generator=torch.Generator().manual_seed(step))
        gradients.start()
        gradients.travel()
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


def test_what_has_other_steps_has_no_copies() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert steps_copies(SGD(parameters, lr=0.1))
    assert not steps_copies(SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5))
    assert not steps_copies(SGD(parameters, lr=0.1, maximize=True))
    assert steps_copies(AdamW(parameters))
    assert not steps_copies(AdamW(parameters, amsgrad=True))
    assert not steps_copies(RMSprop(parameters))
    hooked = SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    assert not steps_copies(hooked)
