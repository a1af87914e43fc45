"""CTC loss on the CPU; tests/gpu/test_speech.py compares it with torch's on a GPU."""

import pytest
import torch
from torch.nn import functional

from penstock.nn import ctc_loss
from penstock.nn.ctc import concatenated, doubled, of_silence

# B signals, U frames, V symbols, L symbols of a signal

SYMBOLS_BL = torch.tensor([[3, 1, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 1]])


def test_the_loss_is_the_mean_over_the_symbols_of_each_signal() -> None:
    scores_BUV = torch.randn(4, 9, 4, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    found = ctc_loss(scores_BUV, SYMBOLS_BL, torch.tensor([9, 9, 9, 5]))
    each = [
        functional.ctc_loss(scores_UV, symbols_L[:count], torch.tensor(frames), torch.tensor(count), reduction="sum")
        / max(count, 1)
        for scores_UV, symbols_L, frames, count in zip(scores_BUV, SYMBOLS_BL, (9, 9, 9, 5), (3, 1, 0, 4), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_a_signal_too_short_for_its_symbols_has_no_part() -> None:
    scores_BUV = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    # Two equal symbols behind one another need a blank between them.
    loss = ctc_loss(scores_BUV.log_softmax(2), torch.tensor([[1, 1, 2]]))
    loss.backward()
    assert loss == 0
    assert scores_BUV.grad is not None
    assert not scores_BUV.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_has_float32_at_least(dtype: torch.dtype) -> None:
    loss = ctc_loss(torch.randn(4, 9, 4).log_softmax(2).to(dtype), SYMBOLS_BL)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)


def test_symbols_of_all_signals_stand_behind_one_another() -> None:
    lengths_B = (SYMBOLS_BL != 0).sum(1)
    whole = concatenated(SYMBOLS_BL, lengths_B)
    assert whole.dtype == torch.int32
    assert whole.tolist() == [3, 1, 1, 2, 1, 2, 3, 1] + [0] * 8


def test_what_cudnn_does_not_give_is_torchs_loss() -> None:
    scores_BUV = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1)).log_softmax(2)
    frames_B = torch.tensor([6, 3, 0, 6])
    alone_B = of_silence(scores_BUV.transpose(0, 1), frames_B)
    none_BL, none_B = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    exact_B = functional.ctc_loss(scores_BUV.transpose(0, 1), none_BL, frames_B, none_B, reduction="none")
    torch.testing.assert_close(alone_B, exact_B)
    # A text fits into as many frames as it has symbols, and one more between equal ones.
    assert doubled(SYMBOLS_BL).tolist() == [1, 0, 0, 0]
    fits = torch.tensor([4, 1, 0, 4])
    for less, finite in ((0, True), (1, False)):
        losses_B = functional.ctc_loss(
            scores_BUV.transpose(0, 1),
            SYMBOLS_BL,
            (fits - less).clamp(min=0),
            (SYMBOLS_BL != 0).sum(1),
            reduction="none",
        )
        assert losses_B[[0, 1, 3]].isfinite().all() == finite
