"""A network after Deep Speech 2 is trained with CTC on a GPU, its recurrent layers in a captured step."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW

import penstock
from penstock.core.spec import Array
from penstock.models.speech import SpeechNet
from penstock.nn import ctc_loss
from penstock.nn.ctc import takes_cudnn

# B signals, T samples, U frames, V symbols, L symbols of a signal, S states: the symbols with blanks between and around

# A warning of cuDNN is shown and is no failure.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
LAUNCHED = "operation by operation"
RATE_HZ, TONE_S, TONES, SYMBOLS = 16_000, 0.16, 4, 9
EXAMPLES, BATCH, STEPS = 64, 16, 300
# No logarithm of a probability, and yet a number that can be added to others.
NEVER = -1e30


def signals() -> tuple[Array, Array]:
    """Four of eight tones behind one another, some signals of fewer: int16 `[n, T]`, and which, zeros behind them."""
    rng = np.random.default_rng(0)
    symbols = rng.integers(1, SYMBOLS, (EXAMPLES, TONES))
    symbols[::4, -1] = 0
    at = 2 * np.pi * np.arange(round(TONE_S * RATE_HZ)) / RATE_HZ
    tones = np.sin(at * (300 * 1.4 ** np.arange(SYMBOLS))[:, None]) * (np.arange(SYMBOLS) > 0)[:, None]
    sound = tones[symbols].reshape(EXAMPLES, -1) + rng.normal(0, 0.02, (EXAMPLES, TONES * len(at)))
    return (8_000 * sound).astype(np.int16), symbols


def forward_ctc(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> Tensor:
    """CTC's loss by the forward variables of Graves et al. 2006, section 4.1: all on the device, lengths too."""
    scores_BUV = log_probabilities_BUV.float()
    batch, most = symbols_BL.shape
    states_BS = symbols_BL.new_zeros(batch, 2 * most + 1)
    states_BS[:, 1::2] = symbols_BL
    scores_BUS = scores_BUV.gather(2, states_BS[:, None].expand(-1, scores_BUV.shape[1], -1))
    # A symbol may follow the one before it without a blank, unless it is the same.
    skips_BS = torch.zeros_like(states_BS, dtype=torch.bool)
    skips_BS[:, 2:] = (states_BS[:, 2:] != 0) & (states_BS[:, 2:] != states_BS[:, :-2])
    never_B1 = scores_BUV.new_full((batch, 1), NEVER)
    now_BS = torch.cat([scores_BUS[:, 0, :2], never_B1.expand(-1, 2 * most - 1)], 1)
    for score_BS in scores_BUS.unbind(1)[1:]:
        one_BS = torch.cat([never_B1, now_BS[:, :-1]], 1)
        two_BS = torch.cat([never_B1, never_B1, now_BS[:, :-2]], 1).where(skips_BS, NEVER)
        now_BS = torch.logsumexp(torch.stack([now_BS, one_BS, two_BS]), 0) + score_BS
    words_B = (symbols_BL != 0).sum(1)
    ends_B2 = torch.stack([2 * words_B, 2 * words_B - 1], 1)
    return -(now_BS.gather(1, ends_B2).logsumexp(1) / words_B).mean()


def learned(loss: Any, precision: str) -> penstock.Fitted:
    torch.manual_seed(0)
    return penstock.fit(
        SpeechNet(hidden=96, layers=2, symbols=SYMBOLS, bands=40, convolved=64),
        train=signals(),
        loss=loss,
        optimizer=lambda weights: AdamW(weights, lr=3e-3),
        batch_size=BATCH,
        steps=STEPS,
        precision=precision,
        clip_norm=10.0,
        device=DEVICE,
    )


def check_falls(fitted: penstock.Fitted) -> None:
    losses = [line["train_loss"] for line in fitted.history]
    assert len(losses) == STEPS * BATCH // EXAMPLES
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.6 * losses[0], losses
    assert all(tensor.isfinite().all() for tensor in fitted.network.state_dict().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [forward_ctc, ctc_loss])
def test_recurrent_layers_and_ctc_are_captured(loss: Any, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = learned(loss, precision)
    said = capsys.readouterr().out
    assert f"step {STEPS}/{STEPS}" in said
    assert LAUNCHED not in said
    check_falls(fitted)


def test_where_the_loss_asks_the_host_the_steps_go_on_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    fitted = learned(native_ctc, "fp32")
    said = [line for line in capsys.readouterr().out.splitlines() if LAUNCHED in line]
    assert len(said) == 1
    assert "captur" in said[0], said
    check_falls(fitted)


def test_forward_variables_give_torchs_loss() -> None:
    _, symbols = signals()
    scores = torch.randn(EXAMPLES, 30, SYMBOLS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_same_loss(forward_ctc, native_ctc, scores.float(), torch.from_numpy(symbols))


@pytest.mark.parametrize("frames", [30, 400])
def test_cudnn_gives_torchs_loss(frames: int) -> None:
    rng = torch.Generator().manual_seed(frames)
    scores = torch.randn(EXAMPLES, frames, SYMBOLS, generator=rng)
    symbols = torch.randint(1, SYMBOLS, (EXAMPLES, 40), generator=rng)
    # Padding, no symbol at all, and in 30 frames more symbols than fit.
    symbols[torch.arange(40) >= torch.randint(0, 41, (EXAMPLES, 1), generator=rng)] = 0
    symbols[0] = 0
    assert takes_cudnn(scores.to(DEVICE), symbols.to(DEVICE))
    check_same_loss(ctc_loss, native_ctc, scores.to(DEVICE), symbols.to(DEVICE))


def check_same_loss(one: Any, other: Any, scores: Tensor, symbols_BL: Tensor) -> None:
    scores_BUV = scores.requires_grad_()
    found, expected = (loss(scores_BUV.log_softmax(2), symbols_BL) for loss in (one, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(loss, scores_BUV, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def native_ctc(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> Tensor:
    """CTC's loss by torch, which reads the lengths on the host."""
    batch, frames, _ = log_probabilities_BUV.shape
    scores_UBV = log_probabilities_BUV.float().transpose(0, 1)
    symbols_B = (symbols_BL != 0).sum(1)
    return functional.ctc_loss(scores_UBV, symbols_BL, torch.full((batch,), frames), symbols_B, zero_infinity=True)
