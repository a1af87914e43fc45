"""A process's part of a cross-entropy, by plain torch, and the parts put together."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.vocab_parallel_loss import class_gradient, class_sums, reference
from penstock.kernels.vocab_parallel_loss.dispatch import chosen
from penstock.train.parallel import losses
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World

# Of five rows two processes have three and two, and of eight classes four each.
ROWS = (3, 2)
LABELS_N = torch.tensor([0, 7, 4, 3, 5])


def plain(logits_NK: Tensor) -> None:
    """Nothing odd."""


def masked(logits_NK: Tensor) -> None:
    """Some classes that cannot be, and in some rows all of one process's."""
    logits_NK[:, 6] = -torch.inf
    logits_NK[1, :4] = -torch.inf
    logits_NK[3, 4:] = -torch.inf


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("change", [plain, masked])
def test_the_parts_of_two_processes_are_torchs_loss_and_gradient(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None], smoothing: float
) -> None:
    logits_NK = _logits(change)
    given_NK = logits_NK.clone().requires_grad_()
    expected = F.cross_entropy(given_NK, LABELS_N, label_smoothing=smoothing)
    (expected_grad_NK,) = torch.autograd.grad(expected, given_NK)
    found, grad_NK = _of_two(monkeypatch, logits_NK, smoothing)
    torch.testing.assert_close(found, expected.detach())
    assert bool(found.isfinite()) == (change is plain or not smoothing)
    torch.testing.assert_close(grad_NK, expected_grad_NK)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_makes_the_loss_of_every_process_nan(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    logits_NK = _logits(plain)
    logits_NK[1, 2], logits_NK[4, 1] = value, value
    assert F.cross_entropy(logits_NK, LABELS_N).isnan()
    for rank in range(2):
        assert _loss(monkeypatch, logits_NK, rank, 0.0)[0].isnan()


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    torch.manual_seed(1)
    logits_NC = torch.randn(4, 50).bfloat16()
    labels_N = torch.tensor([0, 49, -1, 50])
    sums_5N, exact_5N = class_sums(logits_NC, labels_N), class_sums(logits_NC.double(), labels_N)
    assert (sums_5N.dtype, exact_5N.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(sums_5N.double(), exact_5N, rtol=1e-6, atol=1e-6)
    assert sums_5N[4].tolist() == [1, 1, 0, 0]
    assert sums_5N[2, 2:].tolist() == [0, 0]
    max_logit_N, softmax_scale_N, scale = exact_5N[0], 1 / exact_5N[1], torch.tensor(0.25).double()
    exact_NC = class_gradient(logits_NC.double(), labels_N, max_logit_N, softmax_scale_N, scale, 0.01, 0.9)
    found_NC = class_gradient(
        logits_NC, labels_N, max_logit_N.float(), softmax_scale_N.float(), scale.float(), 0.01, 0.9
    )
    assert found_NC.dtype == torch.bfloat16
    torch.testing.assert_close(found_NC.double(), exact_NC, rtol=2**-8, atol=1e-7)


def test_the_backward_pass_keeps_the_logits_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, logits_NC = _loss(monkeypatch, _logits(plain), 0, 0.1)
    kept: Any = loss.grad_fn
    kept_N = [tensor.data_ptr() for tensor in kept.saved_tensors if tensor.ndim == 2]
    assert kept_N == [logits_NC.data_ptr()]


@pytest.mark.parametrize(
    ("device", "dtype", "shares", "why"),
    [
        ("cpu", torch.bfloat16, False, "the kernels are for GPUs"),
        ("cuda", torch.float64, False, "the kernels do not compute in torch.float64"),
        ("cuda", torch.float32, True, "the kernels take labels, not shares of classes"),
    ],
)
def test_what_the_kernels_are_not_for_is_torchs_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, device: str, dtype: torch.dtype, shares: bool, why: str
) -> None:
    chosen.cache_clear()
    with caplog.at_level(logging.INFO):
        assert chosen(device, dtype, shares) is reference
    assert caplog.messages == [f"cross-entropy over processes is computed by torch: {why}"]


def _logits(change: Callable[[Tensor], None]) -> Tensor:
    torch.manual_seed(0)
    logits_NK = torch.randn(5, 8) * 3
    change(logits_NK)
    return logits_NK


def _of_two(monkeypatch: pytest.MonkeyPatch, logits_NK: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of all rows, and the gradient, from both processes."""
    shares_R: list[Tensor] = []
    grads_R: list[Tensor] = []
    for rank, rows in enumerate(ROWS):
        loss, logits_NC = _loss(monkeypatch, logits_NK, rank, smoothing)
        shares_R.append(loss * (rows / sum(ROWS)))
        grads_R += torch.autograd.grad(shares_R[-1], logits_NC)
    return torch.stack(shares_R).sum().detach(), torch.cat(grads_R, 1)


def _loss(monkeypatch: pytest.MonkeyPatch, logits_NK: Tensor, rank: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """A process's loss, and its logits."""
    classes = logits_NK.shape[1] // 2
    sums_R5N = torch.stack([class_sums(part, LABELS_N - r * classes) for r, part in enumerate(logits_NK.chunk(2, 1))])
    monkeypatch.setattr(losses, "start_all_gather", lambda world, name, own, **_: lambda: sums_R5N)
    group: Any = object()
    logits_NC = logits_NK.chunk(2, 1)[rank].clone().requires_grad_()
    own_B = LABELS_N.split(ROWS)[rank]
    over = CrossEntropy(smoothing).vocab_parallel
    return over(World(rank, 2, group=group), logits_NC, own_B, ROWS, lambda: LABELS_N), logits_NC
