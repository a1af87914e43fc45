"""The choice of what trains a GRU layer, and its reference, without a GPU."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from penstock.kernels.common import NO_TRITON
from penstock.kernels.gru_layer import dispatch, operations, reference
from penstock.nn import GRU

# What the kernels take: an H200, and the largest batch of it.
TAKEN: dict[str, Any] = {
    "capability": (9, 0), "multiprocessors": 132, "dtype": torch.bfloat16, "hidden": 512, "rows": 256, "frames": 400
}  # fmt: skip
LEFT = (
    ({"capability": None}, "the kernels are for GPUs"),
    ({"capability": (10, 0)}, "the kernels are for compute capability 9.0, not 10.0"),
    ({"dtype": torch.float32}, "the kernels compute in bf16 or fp16, not in torch.float32"),
    ({"hidden": 2560}, "the kernels were measured with 512 hidden units, not with 2,560"),
    ({"rows": 257}, "the kernels take 1 to 256 rows on 132 multiprocessors, not 257"),
    ({"rows": 0}, "the kernels take 1 to 256 rows on 132 multiprocessors, not 0"),
    ({"multiprocessors": 7}, "the kernels take 1 to 0 rows on 7 multiprocessors, not 256"),
    ({"frames": 40_000}, "the kernels take up to 32,768 frames, not 40,000"),
)


@pytest.mark.parametrize(("changed", "why"), LEFT)
def test_what_the_kernels_do_not_take_has_a_reason(
    changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    assert dispatch.why_not(**TAKEN) == ""
    assert dispatch.why_not(**(TAKEN | changed)) == why
    with caplog.at_level(logging.INFO):
        dispatch._say.__wrapped__(why)
    assert [record.getMessage() for record in caplog.records] == [f"GRU layers are trained by torch: {why}"]


def test_a_missing_triton_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    why = dispatch.why_not(**TAKEN)
    dispatch._say.__wrapped__(why)
    assert why == NO_TRITON
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(("rows", "frames"), [(1, 1), (3, 7)])
def test_the_reference_gives_the_answers_of_torchs_layer(rows: int, frames: int) -> None:
    torch.manual_seed(0)
    layer = nn.GRU(5, 4, batch_first=True).double()
    x_BTF = torch.randn(rows, frames, 5, dtype=torch.float64)
    torch.testing.assert_close(reference.gru_layer(x_BTF, *layer.all_weights[0]), layer(x_BTF)[0])


def test_a_layer_on_a_cpu_is_trained_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "persistent_gru", lambda *_: pytest.fail("the kernel ran"))
    layer, x_BTF = GRU(5, 512), torch.randn(2, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x_BTF), layer.cell(x_BTF)[0])
    layer(x_BTF).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_compiler_knows_the_shapes_of_the_operations() -> None:
    x_BTF = torch.empty(3, 7, 5, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer = nn.GRU(5, 64, batch_first=True, device="meta")
    out_BTH = operations.persistent_gru(x_BTF, torch.bfloat16, *layer.all_weights[0])
    assert (out_BTH.shape, out_BTH.dtype) == ((3, 7, 64), torch.bfloat16)
    out_BTH.sum().backward()
    assert x_BTF.grad is not None
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float32)
