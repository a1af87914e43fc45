"""A network whose answer takes steps, with exact arithmetic: sums of small whole numbers, the same in any order."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock import Application, Bundle, Dim, Generate, TensorSpec
from penstock.core.spec import Array

# B rows, L digits, P past tokens, H heads, D features

WORDS = 31
MOST = 64
LENGTH, PAST = Dim("length", max=40), Dim("past", max=50)


class Counter(nn.Module):
    """Each token is a function of all digits and of all tokens before it; one in seven ends the answer.

    Args:
        in_place: Write the cache in place, as a fast network does.
    """

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        numbers = np.random.default_rng(5).integers(-3, 4, (WORDS, 4)).astype(np.float32)
        self.embed = nn.Parameter(torch.from_numpy(numbers))
        self.in_place = in_place

    def forward(self, digits: Tensor) -> Tensor:
        return self.embed[digits]

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        rows = len(digits)
        return {
            "memory": self.embed[digits],
            "keys": torch.zeros(rows, 2, 0, 4),
            # Views of one number, as networks make them: no memory of their own.
            "past": torch.zeros((), dtype=torch.int64).expand(rows),
            "last": digits[:, 0],
            "seed": seed,
        }

    def step(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        memory, keys, past, last = (state[name] for name in ("memory", "keys", "past", "last"))
        of_input = torch.arange(memory.shape[1]) < state["length"][:, None]
        memory_BD = torch.where(of_input[..., None], memory, 0.0).sum(1)
        at = torch.arange(keys.shape[2])
        keys_BHD = torch.where((at < past[:, None])[:, None, :, None], keys, 0.0).sum(2)
        score = memory_BD.sum(1) + 3 * keys_BHD[:, 0].sum(1) + keys_BHD[:, 1, 0] + state["seed"] + 7 * last
        token = score.long() % WORDS
        new = self.embed[token][:, None].expand(-1, 2, -1)
        if self.in_place:
            keys[torch.arange(len(keys)), :, past] = new
        else:
            keys = torch.where((at == past[:, None])[:, None, :, None], new[:, :, None], keys)
        after = {**state, "keys": keys, "past": past + 1, "last": token}
        return {"token": token, "sums": keys_BHD.sum(1)}, after, token % 7 == 0


class FunctionalCounter(Counter):
    """The same, with a new cache at each step."""

    def __init__(self) -> None:
        super().__init__(in_place=False)


class Endless(Counter):
    """The same, without an end of its own."""

    def step(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        output, after, done = super().step(state)
        return output, after, torch.zeros_like(done)


class FullAtBegin(Counter):
    """The same; with the seed `SEED`, its growing dimension is full at the beginning."""

    SEED = 400

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        full = torch.where(seed == self.SEED, int(PAST), 0)
        return super().begin(digits, seed) | {"keys": torch.zeros(len(digits), 2, int(PAST), 4), "past": full}


class Failing(Counter):
    """The same; it raises in `begin` on a digit 29 at the front, and in the fourth step on a 30."""

    def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
        if (digits[:, 0] == 29).any():
            raise ValueError("29 is no beginning")
        return super().begin(digits, seed) | {"seed": seed + 1000 * (digits[:, 0] == 30)}

    def step(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        if ((state["seed"] >= 1000) & (state["past"] == 3)).any():
            raise ValueError("30 goes no further")
        output, after, done = super().step(state)
        return output, after, done & (state["seed"] < 1000)


SLOW, SLOWEST = 500, 501


class Served(Failing):
    """The same; with a seed of 500 or 501, steps take 20 or 150 ms and the answer has no end of its own."""

    def step(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        output, after, done = super().step(state)
        slow = (state["seed"] == SLOW) | (state["seed"] == SLOWEST)
        if slow.any():
            time.sleep(0.15 if (state["seed"] == SLOWEST).any() else 0.02)
        return output, after, done & ~slow


def tensor(dtype: str, *shape: int, **more: Any) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="numbers", **more)


COUNTER = Application(
    name="counter",
    inputs={
        "digits": tensor("int64", LENGTH, limits=(0, WORDS - 1)),
        "seed": tensor("int64", default=0),
        "most": tensor("int64", default=MOST, limits=(1, MOST)),
    },
    outputs={"token": tensor("int64"), "sums": tensor("float32", 4)},
    model=Counter,
    generate=Generate(
        state={
            "memory": tensor("float32", LENGTH, 4),
            "keys": tensor("float32", 2, PAST, 4),
            "last": tensor("int64"),
            "seed": tensor("int64"),
        },
        max_steps=MOST,
        max_steps_input="most",
    ),
)


def counter(model: Any = Counter, **changed: Any) -> Application:
    """The application, with another network or other fields."""
    return replace(COUNTER, model=model, **changed)


assert COUNTER.generate is not None
SERVED = replace(
    COUNTER, model=Served, generate=replace(COUNTER.generate, first_ms=5000, step_ms=2000, partial_replies=True)
)


def digits(length: int, seed: int = 0) -> dict[str, Array]:
    """One input; each seed gives another."""
    return {"digits": np.random.default_rng((seed, length)).integers(0, WORDS - 3, length)}


def examples(count: int = 12) -> list[dict[str, Array]]:
    """Inputs of many lengths."""
    return [digits(1 + 7 * seed % int(LENGTH), seed) for seed in range(count)]


def counter_bundle(folder: Path, application: Application = COUNTER) -> Bundle:
    """A bundle of the application."""
    model: Any = application.model
    return Bundle.write(application, model(), examples(), to=folder)
