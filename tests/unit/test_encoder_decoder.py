"""The encoder and decoder: packed rows, steps, padding, and ONNX graphs of `begin` and `step`."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.models.encoder_decoder import EncoderDecoder
from penstock.nn.decoding import Beam, Decoding, Greedy, Sampled

FIRST, END = 1, 2
SOURCES = [[5, 6, 7, 8, 9], [11, 12, 13], [4]]
TARGETS = [[20, 21, 22], [30, 31], [10, 11, 12, 13, 14, 15]]
SHARED = ("memory", "source", "past")
NAN = float("nan")


def network() -> EncoderDecoder:
    torch.manual_seed(0)
    made = EncoderDecoder(40, width=16, heads=2, encoder_layers=2, decoder_layers=2, hidden=32)
    # Norms away from their first values, so that a missing one shows.
    for norm in made.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.bias)
    return made.eval()


def padded(rows: list[list[int]], room: int, fill: int = 0) -> Tensor:
    return torch.tensor([[*row, *[fill] * (room - len(row))] for row in rows])


def row_of(pairs: list[int], room: int) -> dict[str, Tensor]:
    """Some pairs in one packed row."""
    sources, targets = [SOURCES[pair] for pair in pairs], [[FIRST, *TARGETS[pair], END] for pair in pairs]
    made: dict[str, Tensor] = {}
    for name, texts in (("source", sources), ("target", targets)):
        numbers = [number for number, text in enumerate(texts, 1) for _ in text]
        made[name] = padded([[token for text in texts for token in text]], room)
        made[f"{name}_pair"] = padded([numbers], room)
    return made


@torch.no_grad()
def stepped(model: EncoderDecoder, poison: bool) -> list[Tensor]:
    """Log-probabilities of each target, token by token; with NaN in all that must not be read, if `poison`."""
    fill = 39 if poison else 0
    longest = max(map(len, SOURCES)) + 2
    state = model.begin(padded(SOURCES, longest, fill), torch.tensor([len(row) for row in SOURCES]))
    targets = [[FIRST, *target, END] for target in TARGETS]
    found: list[list[Tensor]] = [[] for _ in TARGETS]
    for step in range(max(map(len, targets)) - 1):
        state["cache"] = functional.pad(state["cache"], (0, 0, 0, 1 + step % 3))
        if poison:
            for name, length in (("cache", "past"), ("memory", "source")):
                beyond = torch.arange(state[name].shape[1]) >= state[length][:, None]
                state[name] = torch.where(beyond[..., None], NAN, state[name])
        tokens = torch.tensor([target[min(step, len(target) - 1)] for target in targets])
        logits, state = model.scores(state, tokens)
        assert state["past"].tolist() == [step + 1] * len(targets)
        for row, target in enumerate(targets):
            if step + 1 < len(target):
                found[row].append(logits[row].log_softmax(-1)[target[step + 1]])
    return [torch.stack(row) for row in found]


@torch.no_grad()
def test_pairs_of_one_row_do_not_see_one_another() -> None:
    model = network()
    together = model(**row_of([0, 1, 2], 24))
    alone = [model(**row_of([pair], 24)) for pair in range(3)]
    first = 0
    for pair, scored in enumerate(alone):
        count = len(TARGETS[pair]) + 1
        for ours, theirs in zip(together, scored, strict=True):
            assert torch.allclose(ours[0, first : first + count], theirs[0, :count], atol=1e-5)
        first += count + 1
    assert together.log_probability.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("poison", [False, True])
def test_steps_score_as_the_whole_does_whatever_the_padding_holds(poison: bool) -> None:
    model = network()
    for pair, found in enumerate(stepped(model, poison)):
        whole = model(**row_of([pair], 12)).log_probability[0, : len(found)]
        assert torch.allclose(found, whole, atol=1e-5)


@torch.no_grad()
def test_outputs_are_those_of_the_vocabulary() -> None:
    model = network()
    row = row_of([0], 10)
    logits: list[Tensor] = []
    state = model.begin(torch.tensor([SOURCES[0]]), torch.tensor([5]))
    for token in (FIRST, *TARGETS[0]):
        state["cache"] = functional.pad(state["cache"], (0, 0, 0, 1))
        scores, state = model.scores(state, torch.tensor([token]))
        logits.append(scores[0].log_softmax(-1))
    scored, log_TV = model(**row), torch.stack(logits)
    count = len(log_TV)
    assert torch.allclose(scored.mean_log_probability[0, :count], log_TV.mean(-1), atol=1e-5)
    labels = torch.tensor([*TARGETS[0], END])
    assert (scored.is_best[0, :count] == (log_TV.argmax(-1) == labels)).all()


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ApplicationError, match="width 10 for 4 heads"):
        EncoderDecoder(40, width=10, heads=4)


class Flat(nn.Module):
    """`begin` or `step` with lists of tensors in the place of dictionaries."""

    def __init__(self, decoding: Decoding, function: str, names: list[str]) -> None:
        super().__init__()
        self.decoding, self.function, self.names = decoding, function, names

    def forward(self, given: list[Tensor]) -> list[Tensor]:
        named = dict(zip(self.names, given, strict=True))
        if self.function == "begin":
            return list(self.decoding.begin(**named).values())
        output, state, done = self.decoding.step(named)
        return [*output.values(), *state.values(), done]


def exported(decoding: Decoding, function: str, named: dict[str, Tensor], axis: dict[str, int], file: Path) -> Any:
    """An ONNX graph with a dynamic batch, and a dynamic axis of some tensors."""
    dynamic = torch.export.Dim.DYNAMIC
    axes = [{0: dynamic} | ({axis[name]: dynamic} if name in axis else {}) for name in named]
    module = Flat(decoding, function, list(named))
    program = torch.onnx.export(
        module, (list(named.values()),), dynamo=True, dynamic_shapes=(axes,), verbose=False, report=False
    )
    assert program is not None
    program.save(str(file))
    return onnxruntime.InferenceSession(file)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choice", ["greedy", "sampled", "beam"])
def test_begin_and_step_export_to_onnx(choice: str, tmp_path: Path) -> None:
    model = network()
    make = {
        "greedy": lambda: Greedy(model, first=FIRST, end=END),
        "sampled": lambda: Sampled(model, first=FIRST, end=END, top_k=10, top_p=0.9),
        "beam": lambda: Beam(model, first=FIRST, end=END, beams=3, shared=SHARED),
    }
    decoding = make[choice]().eval()
    inputs = {"tokens": padded(SOURCES, 5), "source": torch.tensor([5, 3, 1])}
    if choice == "sampled":
        inputs["seed"] = torch.tensor([1, -2, 2**40])
    begin = exported(decoding, "begin", inputs, {"tokens": 1}, tmp_path / "begin.onnx")
    state = decoding.begin(**inputs)
    state["cache"] = functional.pad(state["cache"], (0, 0, 0, 5))
    axis = {"memory": 1, "cache": 2 if choice == "beam" else 1}
    step = exported(decoding, "step", state, axis, tmp_path / "step.onnx")
    # Another number of rows, and another length, than those of the export.
    given = {
        "tokens": padded([[7, 8, 9, 10, 11, 12, 13], [3, 4]], 7),
        "source": torch.tensor([7, 2]),
        "seed": torch.tensor([-9, 4]),
    }
    given = {name: given[name] for name in inputs}
    state = decoding.begin(**given)
    feeds = {place.name: array.numpy() for place, array in zip(begin.get_inputs(), given.values(), strict=True)}
    on_device = dict(zip(state, begin.run(None, feeds), strict=True))
    for _ in range(6):
        state["cache"] = functional.pad(state["cache"], (0, 0, 0, 1))
        on_device["cache"] = functional.pad(torch.from_numpy(on_device["cache"]), (0, 0, 0, 1)).numpy()
        with torch.no_grad():
            output, state, done = decoding.step(state)
        feeds = {place.name: array for place, array in zip(step.get_inputs(), on_device.values(), strict=True)}
        names = [*output, *state, "done"]
        results = dict(enumerate(step.run(None, feeds)))
        assert len(results) == len(names)
        for place, name in enumerate([*output]):
            assert results[place].tolist() == output[name].tolist()
        on_device = {name: results[len(output) + place] for place, name in enumerate(state)}
        assert results[len(names) - 1].tolist() == done.tolist()
        assert np.allclose(on_device["cache"], state["cache"].numpy(), atol=1e-5)
