"""Every streaming layer, over any partition of its input, in any company: the answers of the whole sequence."""

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.core.errors import ApplicationError
from penstock.nn import (
    GRU,
    LSTM,
    CausalConv1d,
    CausalConv2d,
    LogMel,
    Lookahead,
    Residual,
    SequenceBatchNorm,
    Sequential,
    SplitFrames,
    Streaming,
    StreamingAttention,
    leaves,
    map_state,
)
from tests.support.generated import examples

# Of float64: what is left of the order in which sums are taken.
NEAR = 1e-10
FEATURES = 4


class Layer(NamedTuple):
    make: Callable[[], Streaming]
    frame: tuple[int, ...] = (FEATURES,)


class Swap(nn.Module):
    """Features of each channel and bin behind one another."""

    def forward(self, frames: Tensor) -> Tensor:
        return frames.flatten(2)


def deep() -> Streaming:
    """All kinds, one on the other, with strides and a look ahead."""
    return Sequential(
        LogMel(1000, window_ms=12, hop_ms=5, bands=FEATURES, full_scale=1.0),
        CausalConv1d(FEATURES, 6, 3, 2),
        SequenceBatchNorm(6),
        nn.ReLU(),
        GRU(6, 5),
        nn.LayerNorm(5),
        StreamingAttention(5, 1, 3),
        Lookahead(5, 2),
        nn.Linear(5, 3),
    )


LAYERS = {
    "conv": Layer(lambda: CausalConv1d(FEATURES, 3, 3)),
    "conv of one frame": Layer(lambda: CausalConv1d(FEATURES, 3, 1)),
    "conv with stride": Layer(lambda: CausalConv1d(FEATURES, 3, 5, 2)),
    "conv whose stride is its kernel": Layer(lambda: CausalConv1d(FEATURES, 3, 3, 3)),
    "grouped conv": Layer(lambda: CausalConv1d(FEATURES, 8, 4, groups=2, bias=False)),
    "conv in two dimensions": Layer(lambda: CausalConv2d(2, 3, (3, 3), (2, 2), bins=5), (2, 5)),
    "convs in two dimensions": Layer(
        lambda: Sequential(
            CausalConv2d(2, 3, (4, 3), (2, 1), bins=5), CausalConv2d(3, 2, (3, 5), (1, 2), bins=5), Swap(), GRU(6, 4)
        ),
        (2, 5),
    ),
    "lookahead": Layer(lambda: Lookahead(FEATURES, 3)),
    "lookahead at nothing": Layer(lambda: Lookahead(FEATURES, 0)),
    "lookaheads": Layer(lambda: Sequential(Lookahead(FEATURES, 2), Lookahead(FEATURES, 3))),
    "split frames": Layer(lambda: Sequential(CausalConv1d(FEATURES, 6, 3, 2), SplitFrames(3), GRU(2, 4))),
    "residual": Layer(lambda: Residual(GRU(FEATURES, 5), nn.Linear(5, FEATURES))),
    "residual in two dimensions": Layer(lambda: Residual(nn.LayerNorm([2, 5])), (2, 5)),
    "residuals": Layer(
        lambda: Sequential(Residual(SequenceBatchNorm(FEATURES), GRU(FEATURES, FEATURES)), Lookahead(FEATURES, 2))
    ),
    "gru": Layer(lambda: GRU(FEATURES, 5)),
    "lstm": Layer(lambda: LSTM(FEATURES, 5)),
    "attention": Layer(lambda: StreamingAttention(FEATURES, 2, 3)),
    "attention to itself": Layer(lambda: StreamingAttention(FEATURES, 1, 0)),
    "attention to far": Layer(lambda: StreamingAttention(FEATURES, 2, 30)),
    "batch norm": Layer(lambda: SequenceBatchNorm(FEATURES)),
    "log-mel": Layer(lambda: LogMel(1000, window_ms=7, hop_ms=3, bands=3, full_scale=1.0), ()),
    "deep": Layer(deep, ()),
}


def made(name: str) -> Streaming:
    """In float64, with statistics and biases that are not those of the start."""
    torch.manual_seed(7)
    layer = LAYERS[name].make().double().eval()
    with torch.no_grad():
        for own in [*layer.parameters(), *(part for key, part in layer.named_buffers() if "mean_D" in key)]:
            own.copy_(torch.randn_like(own) * 0.5)
    return layer


def sequences(name: str, lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, *LAYERS[name].frame, dtype=torch.float64, generator=generator) for length in lengths]


def alone(layer: Streaming, sequence: Tensor) -> Tensor:
    """The outputs of one whole sequence."""
    length_B = torch.tensor([len(sequence)])
    output = layer(sequence[None])[0]
    return output[: int(layer.output_lengths(length_B))]


def streamed(layer: Streaming, rows: list[Tensor], rng: np.random.Generator, room: int) -> list[Tensor]:
    """The outputs of several sequences that are cut at random and run side by side in chunks with so much room.

    What is not valid in a chunk is NaN, and a stream ends with its last frames or after them.
    """
    state = layer.initial_state(len(rows))
    at = [0] * len(rows)
    over = [False] * len(rows)
    outputs: list[list[Tensor]] = [[] for _ in rows]
    while not all(over):
        lengths = [int(rng.integers(0, min(room, len(row) - place) + 1)) for row, place in zip(rows, at, strict=True)]
        chunk_BT = torch.full((len(rows), room, *rows[0].shape[1:]), torch.nan, dtype=torch.float64)
        last = [False] * len(rows)
        for index, (row, place, length) in enumerate(zip(rows, at, lengths, strict=True)):
            chunk_BT[index, :length] = row[place : place + length]
            at[index] += length
            last[index] = not over[index] and at[index] == len(row) and bool(rng.integers(2))
        step = layer.step(chunk_BT, torch.tensor(lengths), state, torch.tensor(last))
        state = step.state
        for index, count in enumerate(step.length_B.tolist()):
            assert not over[index] or count == 0
            outputs[index].append(step.output_BU[index, :count])
        over = [before or now for before, now in zip(over, last, strict=True)]
    return [torch.cat(parts) for parts in outputs]


names = st.sampled_from(sorted(LAYERS))
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@given(names, lengths, st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=examples(150), deadline=None)
def test_any_partition_in_any_company_gives_the_answers_of_the_whole(
    name: str, rows: list[int], room: int, seed: int
) -> None:
    layer = made(name)
    sent = sequences(name, rows, seed)
    with torch.no_grad():
        for sequence, output in zip(sent, streamed(layer, sent, np.random.default_rng(seed), room), strict=True):
            if len(sequence):
                torch.testing.assert_close(output, alone(layer, sequence), rtol=0, atol=NEAR)
            else:
                assert len(output) == 0


@given(names, lengths, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_whole_sequences_of_several_lengths_are_padded_without_a_trace(name: str, rows: list[int], seed: int) -> None:
    layer = made(name)
    rows = [max(1, row) for row in rows]
    sent = sequences(name, rows, seed)
    padded = torch.full((len(rows), max(rows) + 3, *LAYERS[name].frame), 1e3, dtype=torch.float64)
    for index, sequence in enumerate(sent):
        padded[index, : len(sequence)] = sequence
    length_B = torch.tensor(rows)
    with torch.no_grad():
        output = layer(padded, length_B)
        for index, (sequence, count) in enumerate(zip(sent, layer.output_lengths(length_B).tolist(), strict=True)):
            torch.testing.assert_close(output[index, :count], alone(layer, sequence), rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_row_without_frames_keeps_its_state_to_the_bit_and_has_no_output(name: str) -> None:
    layer = made(name)
    chunk_BT = torch.stack(sequences(name, [7] * 3, 1))
    with torch.no_grad():
        state = layer.step(chunk_BT, torch.tensor([7, 4, 0]), layer.initial_state(3)).state
        then = layer.step(chunk_BT * torch.nan, torch.tensor([0, 0, 0]), state)
    assert then.length_B.tolist() == [0, 0, 0]
    for before, after in zip(leaves(state), leaves(then.state), strict=True):
        assert torch.equal(before, after)


@given(names, st.integers(0, 2**31), st.permutations(range(4)))
@settings(max_examples=60, deadline=None)
def test_rows_change_places_between_two_steps_and_continue_elsewhere(name: str, seed: int, order: list[int]) -> None:
    """Saved, loaded, joined with others in another order: the stream goes on as if nothing had been."""
    layer = made(name)
    sent = torch.stack(sequences(name, [12] * 4, seed))
    last_B = torch.ones(4, dtype=torch.bool)
    with torch.no_grad():
        first = layer.step(sent[:, :5], torch.tensor([5, 3, 0, 1]), layer.initial_state(4))
        stayed = layer.step(sent[:, 5:], torch.tensor([7, 2, 7, 0]), first.state, last_B)
        saved = io.BytesIO()
        torch.save(leaves(first.state), saved)
        saved.seek(0)
        loaded = iter(torch.load(saved))
        state = map_state(lambda leaf: next(loaded)[order], first.state)
        moved = layer.step(sent[order, 5:], torch.tensor([7, 2, 7, 0])[order], state, last_B)
    assert moved.length_B.tolist() == stayed.length_B[order].tolist()
    for row, place in enumerate(order):
        count = int(stayed.length_B[place])
        torch.testing.assert_close(moved.output_BU[row, :count], stayed.output_BU[place, :count], rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"log-mel"}))
def test_gradients_reach_every_parameter(name: str) -> None:
    layer = made(name).train()
    layer(torch.stack(sequences(name, [30, 30], 3)), torch.tensor([30, 21])).square().sum().backward()
    assert all(own.grad is not None and torch.isfinite(own.grad).all() for own in layer.parameters())


def test_a_lookahead_gives_what_it_held_back_when_the_stream_ends() -> None:
    layer = made("lookahead")
    chunk_BT = torch.stack(sequences("lookahead", [5], 2))
    with torch.no_grad():
        first = layer.step(chunk_BT, torch.tensor([5]), layer.initial_state(1))
        rest = layer.step(chunk_BT, torch.tensor([0]), first.state, torch.tensor([True]))
    assert (first.length_B.item(), rest.length_B.item()) == (2, 3)


def test_batch_norm_counts_valid_frames_alone() -> None:
    torch.manual_seed(0)
    linear, norm = nn.Linear(3, FEATURES), SequenceBatchNorm(FEATURES, momentum=1.0)
    frames = torch.randn(2, 6, 3)
    length_B = torch.tensor([6, 2])
    valid = torch.cat([frames[0], frames[1, :2]])
    spoiled = frames.clone()
    spoiled[1, 2:] = 1e6
    output = norm(linear(spoiled), length_B)
    kept = torch.cat([output[0], output[1, :2]])
    torch.testing.assert_close(kept.mean(0), torch.zeros(FEATURES), atol=1e-5, rtol=0)
    torch.testing.assert_close(kept.var(0, unbiased=False), torch.ones(FEATURES), atol=1e-3, rtol=0)
    torch.testing.assert_close(norm.variance_D, linear(valid).var(0))


def test_batch_norm_of_whole_sequences_is_that_of_their_lengths() -> None:
    torch.manual_seed(0)
    plain, counted = SequenceBatchNorm(FEATURES), SequenceBatchNorm(FEATURES)
    frames = torch.randn(3, 7, FEATURES) * 4 + 2
    inputs = [frames.clone().requires_grad_() for _ in range(2)]
    outputs = plain(inputs[0]), counted(inputs[1], torch.full((3,), 7))
    weights = torch.randn(3, 7, FEATURES)
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for one, other in zip(
        [*plain.parameters(), *plain.buffers()], [*counted.parameters(), *counted.buffers()], strict=True
    ):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.grad, other.grad)
    # The variance of a single frame is zero.
    torch.testing.assert_close(plain(torch.ones(1, 1, FEATURES)), torch.zeros(1, 1, FEATURES), atol=1e-5, rtol=0)


def test_the_spectrogram_finds_a_tone_in_its_band() -> None:
    layer = LogMel(16_000, bands=40)
    at = torch.arange(16_000) / 16_000
    energies = [
        layer((torch.sin(2 * torch.pi * hz * at) * 20_000)[None]).mean(1)[0].argmax().item() for hz in (200, 900, 4000)
    ]
    assert energies == sorted(energies)
    assert len(set(energies)) == 3
    silence = layer(torch.zeros(1, 800))
    assert torch.isfinite(silence).all()


def test_a_spectrogram_keeps_its_precision_and_gives_on_that_of_the_network() -> None:
    layer = LogMel(8000, bands=4).half().to("cpu")
    assert layer.bands_FD.dtype == torch.float32
    assert layer(torch.zeros(1, 800, dtype=torch.int16)).dtype == torch.float16


def test_batch_norm_learns_nothing_of_a_batch_without_frames_and_sums_beyond_half_precision() -> None:
    norm = SequenceBatchNorm(2)
    norm(torch.randn(2, 3, 2), torch.tensor([0, 0]))
    assert (norm.mean_D.tolist(), norm.variance_D.tolist()) == ([0, 0], [1, 1])
    norm = SequenceBatchNorm(2, momentum=1.0).half()
    norm((torch.randn(8, 1000, 2) + 20).half())
    torch.testing.assert_close(norm.mean_D.float(), torch.full((2,), 20.0), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CausalConv1d(2, 2, 2, 3),
        lambda: CausalConv2d(1, 1, (3, 2), bins=4),
        lambda: StreamingAttention(5, 2, 3),
        lambda: StreamingAttention(4, 2, -1),
        lambda: LogMel(8000, high_hz=5000),
    ],
)
def test_mistakes_are_said(make: Callable[[], object]) -> None:
    with pytest.raises(ApplicationError):
        make()


@pytest.mark.parametrize("layer", [lambda: Lookahead(4, 2), lambda: CausalConv1d(4, 4, 4, 2)])
def test_what_delays_frames_or_gives_fewer_is_no_residual(layer: Callable[[], Streaming]) -> None:
    with pytest.raises(ApplicationError, match="delays frames or gives fewer"):
        Residual(nn.ReLU(), layer())


def test_a_residual_keeps_the_shape() -> None:
    with pytest.raises(ApplicationError, match=r"make \(1, 2, 5\) of \(1, 2, 4\); they must keep the shape"):
        Residual(nn.Linear(4, 5))(torch.zeros(1, 2, 4))
