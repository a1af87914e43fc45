"""Greedy decoding, sampling and beam search, on a decoder small enough to look at all its answers."""

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Application, Bundle, Dim, Generate, TensorSpec
from penstock.core.beams import best_beam
from penstock.core.errors import ApplicationError
from penstock.core.record import RecordSpec
from penstock.nn.decoding import Beam, Decoding, Greedy, Sampled, uniform
from penstock.runtime.named_network import NamedCall

FIRST, END, VOCABULARY = 0, 1, 5


class Toy(nn.Module):
    """A decoder whose scores depend on the row's start, on all tokens so far, and on their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.randn(7, VOCABULARY, VOCABULARY) * 2)

    def begin(self, start: Tensor) -> dict[str, Tensor]:
        return {"hash": start.clone(), "start": start}

    def scores(self, state: Mapping[str, Tensor], token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mixed = (state["hash"] * 3 + token) % 7
        return self.table[mixed, token], {"hash": mixed, "start": state["start"]}


def run(network: Decoding, steps: int, **inputs: Tensor) -> tuple[dict[str, np.ndarray], list[int]]:
    """All outputs `[B, T, ...]`, and the step at which each row ended."""
    state = network.begin(**inputs)
    outputs: list[dict[str, Tensor]] = []
    dones: list[Tensor] = []
    for _ in range(steps):
        output, state, done = network.step(state)
        outputs.append(output)
        dones.append(done)
    ends = torch.stack(dones, 1).long().argmax(1) + 1
    return {name: torch.stack([each[name] for each in outputs], 1).numpy() for name in outputs[0]}, ends.tolist()


def log_probability(toy: Toy, start: int, tokens: tuple[int, ...]) -> float:
    state = toy.begin(torch.tensor([start]))
    before, found = FIRST, 0.0
    for token in tokens:
        logits, state = toy.scores(state, torch.tensor([before]))
        found += logits.log_softmax(-1)[0, token].item()
        before = token
    return found


@torch.no_grad()
def test_greedy_takes_the_best_token_of_each_step() -> None:
    toy = Toy()
    outputs, _ = run(Greedy(toy, first=FIRST, end=END), 6, start=torch.arange(4))
    for start in range(4):
        state, token = toy.begin(torch.tensor([start])), torch.tensor([FIRST])
        for made in outputs["token"][start]:
            logits, state = toy.scores(state, token)
            token = logits.argmax(-1)
            assert made == token.item()


@torch.no_grad()
def test_done_comes_with_the_end_token() -> None:
    network = Greedy(Toy(), first=FIRST, end=END)
    state = network.begin(start=torch.arange(7))
    for _ in range(8):
        output, state, done = network.step(state)
        assert torch.equal(done, output["token"] == END)


@torch.no_grad()
@pytest.mark.parametrize("choice", [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 2.0}])
def test_sampling_draws_as_often_as_probable(choice: dict[str, float]) -> None:
    toy, count = Toy(), 40_000
    network = Sampled(toy, first=FIRST, end=END, **choice)  # type: ignore[arg-type]
    start = torch.full((count,), 3)
    outputs, _ = run(network, 1, start=start, seed=torch.arange(count))
    logits = toy.scores(toy.begin(start[:1]), torch.tensor([FIRST]))[0][0] / choice.get("temperature", 1)
    share = logits.softmax(-1)
    order = share.argsort(descending=True)
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    before = 0.0
    for place, token in enumerate(order.tolist()):
        kept[token] = place < choice.get("top_k", VOCABULARY) and before < choice.get("top_p", 1)
        before += share[token].item()
    share = torch.where(kept, share, 0)
    share /= share.sum()
    found = np.bincount(outputs["token"][:, 0], minlength=VOCABULARY) / count
    assert (found[~kept.numpy()] == 0).all()
    # Five standard deviations of the most uncertain share.
    assert np.abs(found - share.numpy()).max() < 5 * 0.5 / count**0.5


@torch.no_grad()
def test_a_seed_gives_the_same_answer_in_any_batch() -> None:
    network = Sampled(Toy(), first=FIRST, end=END, top_k=4)
    starts, seeds = torch.arange(16) % 7, torch.tensor([0, 1, -1, 2**62, -(2**63), *range(100, 111)])
    together, _ = run(network, 12, start=starts, seed=seeds)
    for row in (0, 2, 4, 9):
        alone, _ = run(network, 12, start=starts[row : row + 1], seed=seeds[row : row + 1])
        assert alone["token"][0].tolist() == together["token"][row].tolist()
    assert len({tuple(tokens) for tokens in together["token"]}) > 10


def test_uniform_numbers_are_uniform_along_seeds_and_counters() -> None:
    many = torch.arange(100_000)
    for seed, count in ((many, torch.zeros_like(many)), (torch.full_like(many, 7), many), (many << 32, many * 0 + 3)):
        numbers = uniform(seed, count)
        assert 0 <= numbers.min() <= numbers.max() < 1
        shares = torch.histc(numbers, 50, 0, 1) / len(many)
        assert (shares - 1 / 50).abs().max() < 5 * (0.02 / len(many)) ** 0.5
        both = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
        assert abs(both) < 5 / len(many) ** 0.5


@torch.no_grad()
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all_answers(length_penalty: float) -> None:
    toy, steps = Toy(), 4
    others = [token for token in range(VOCABULARY) if token != END]
    wide = Beam(toy, first=FIRST, end=END, beams=4**steps, length_penalty=length_penalty, shared=("start",))
    starts = torch.arange(7)
    outputs, ends = run(wide, steps, start=starts)
    for start, end in zip(range(7), ends, strict=True):
        whole = [(*before, END) for count in range(end) for before in itertools.product(others, repeat=count)]
        open_ = list(itertools.product(others, repeat=end))
        ranked = {
            tokens: log_probability(toy, start, tokens) / len(tokens) ** length_penalty for tokens in (*whole, *open_)
        }
        best = max(ranked, key=lambda tokens: ranked[tokens])
        found = best_beam(outputs["token"][start, :end], outputs["parent"][start, :end], END)
        assert tuple(found) == tuple(token for token in best if token != END)


@torch.no_grad()
def test_one_beam_is_greedy() -> None:
    toy = Toy()
    starts = torch.arange(7)
    greedy, _ = run(Greedy(toy, first=FIRST, end=END), 9, start=starts)
    beam, ends = run(Beam(toy, first=FIRST, end=END, beams=1), 9, start=starts)
    for row, end in enumerate(ends):
        tokens = greedy["token"][row, :end].tolist()
        assert best_beam(beam["token"][row, :end], beam["parent"][row, :end], END) == [t for t in tokens if t != END]


@torch.no_grad()
def test_beams_of_a_row_do_not_see_other_rows() -> None:
    network = Beam(Toy(), first=FIRST, end=END, beams=3)
    together, _ = run(network, 5, start=torch.arange(7))
    for row in range(7):
        alone, _ = run(network, 5, start=torch.tensor([row]))
        assert all((alone[name][0] == together[name][row]).all() for name in ("token", "parent"))


def test_begin_has_the_signature_of_the_decoder_and_the_seed() -> None:
    toy = Toy()
    assert list(inspect.signature(Greedy(toy, first=FIRST, end=END).begin).parameters) == ["start"]
    assert list(inspect.signature(Sampled(toy, first=FIRST, end=END).begin).parameters) == ["start", "seed"]


SRC = Dim("src", max=8)


class Reader(nn.Module):
    """A decoder that is given the lengths of its input, and whose `begin` does not return them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, VOCABULARY) * 2)

    def begin(self, ids: Tensor) -> dict[str, Tensor]:
        return {"memory": ids, "sum": torch.zeros(len(ids), dtype=torch.int64)}

    def scores(self, state: Mapping[str, Tensor], token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        memory = state["memory"]
        known = torch.arange(memory.shape[1]) < state["src"][:, None]
        read = torch.where(known, memory, 0).sum(1) + state["sum"]
        return self.table[read % VOCABULARY, token], {"memory": memory, "sum": state["sum"] + token}


def write_reader(folder: Path, shared: tuple[str, ...], beams: int) -> Any:
    def model() -> nn.Module:
        return Beam(Reader(), first=FIRST, end=END, beams=beams, shared=shared)

    number = TensorSpec(dtype="int64", shape=(beams,), meaning="number")
    app = Application(
        name="reader",
        inputs={"ids": TensorSpec(dtype="int64", shape=(SRC,), meaning="ids")},
        outputs={"token": number, "parent": number},
        generate=Generate(
            state={
                "memory": TensorSpec(dtype="int64", shape=(SRC,), meaning="ids"),
                **dict.fromkeys(("sum", "token", "count"), number),
                "score": replace(number, dtype="float32"),
                "ended": replace(number, dtype="bool"),
            },
            max_steps=6,
        ),
        model=model,
    )
    examples = [{"ids": np.arange(1, n + 1)} for n in (2, 5, 8)]
    return penstock.load(Bundle.write(app, model(), examples, to=folder).folder, app=app).predict(examples)


@torch.no_grad()
def test_lengths_of_the_inputs_are_shared_without_being_returned_by_begin(tmp_path: Path) -> None:
    answers = write_reader(tmp_path / "bundle", ("memory", "src"), beams=1)
    reader = Reader()
    for length, answer in zip((2, 5, 8), answers, strict=True):
        state = reader.begin(torch.arange(1, length + 1)[None]) | {"src": torch.tensor([length])}
        token = torch.tensor([FIRST])
        for made in answer["token"][:, 0].tolist():
            logits, after = reader.scores(state, token)
            token, state = logits.argmax(-1), state | after
            assert token.item() == made
    write_reader(tmp_path / "wide", ("memory", "src"), beams=3)


def test_lengths_that_are_not_shared_are_named(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r"Beam gets 'src' with one number for each row, .*name it in shared"):
        write_reader(tmp_path / "bundle", ("memory",), beams=3)


class Taken(Toy):
    def begin(self, start: Tensor) -> dict[str, Tensor]:
        return {"token": start}


def test_what_cannot_decode_is_refused() -> None:
    toy = Toy()
    for make, said in (
        (lambda: Greedy(nn.Linear(1, 1), first=0, end=1), "has no begin"),
        (lambda: Sampled(toy, first=0, end=1, temperature=0.0), "temperature=0.0"),
        (lambda: Sampled(toy, first=0, end=1, top_k=0), "top_k=0"),
        (lambda: Sampled(toy, first=0, end=1, top_p=1.5), "top_p=1.5"),
        (lambda: Beam(toy, first=0, end=1, beams=0), "beams=0"),
        (lambda: Beam(toy, first=0, end=1, length_penalty=-1), "length_penalty=-1"),
        (lambda: Greedy(Taken(), first=0, end=1).begin(start=torch.zeros(1)), "has 'token', which Greedy needs"),
        (lambda: run(Beam(toy, first=0, end=1, shared=("x",)), 1, start=torch.zeros(1).long()), "'x' in shared"),
    ):
        with pytest.raises(ApplicationError, match=said):
            make()


class Padded(Toy):
    """A decoder whose training ignores padding."""

    def forward(self, source: Tensor, before: Tensor, source_length: Tensor | None = None) -> Tensor:
        assert source_length is not None
        return before * source_length[:, None] + source[:, :1]


def test_training_gives_a_wrapped_decoder_its_lengths() -> None:
    lengths, before = (
        Dim("source_length", max=4),
        TensorSpec(name="before", dtype="int64", shape=(2,), meaning="before"),
    )
    source = TensorSpec(name="source", dtype="int64", shape=(lengths,), meaning="source")
    network = Greedy(Padded(), first=FIRST, end=END)
    call = NamedCall(network, RecordSpec((source, before)))
    given = {"source": torch.ones(1, 4), "before": torch.tensor([[1, 2]]), "source_length": torch.tensor([3])}
    assert call(network, given).tolist() == [[4, 7]]
