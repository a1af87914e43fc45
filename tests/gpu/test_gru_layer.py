"""The kernels of a GRU layer's training beside their reference in float64, and beside cuDNN."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.kernels.gru_layer import dispatch, gru_layer, operations, reference
from penstock.nn import GRU

# Rows, frames, features and hidden units: one of each, a group that is not full, and as many groups as an H200 runs.
SHAPES = (
    (1, 1, 3, 64), (5, 2, 8, 128), (16, 3, 16, 512), (33, 20, 24, 256), (160, 40, 512, 512), (256, 100, 64, 512),
)  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ENABLED", True)


# The errors of cuDNN are about half as large.
NEAR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def examples(rows: int, frames: int, features: int, hidden: int, dtype: torch.dtype) -> tuple[nn.GRU, Tensor, Tensor]:
    """A layer, frames, and the gradient of the layer's output."""
    torch.manual_seed(rows + frames)
    cell = nn.GRU(features, hidden, batch_first=True, device="cuda", dtype=dtype)
    x_BTF = torch.randn(rows, frames, features, device="cuda", dtype=dtype)
    return cell, x_BTF, torch.randn(rows, frames, hidden, device="cuda", dtype=dtype)


def trained(run: Callable[[Tensor], Tensor], cell: nn.GRU, x_BTF: Tensor, grad_BTH: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the four parameters."""
    for parameter in cell.parameters():
        parameter.grad = None
    given = x_BTF.detach().requires_grad_()
    out_BTH = run(given)
    out_BTH.backward(grad_BTH.to(out_BTH.dtype))
    found = [out_BTH.detach(), given.grad, *(parameter.grad for parameter in cell.parameters())]
    tensors = [tensor for tensor in found if tensor is not None]
    assert len(tensors) == 6
    return tensors


def far(given: Tensor, exact: Tensor) -> float:
    return float((given.detach().double() - exact).norm() / exact.norm().clamp_min(1e-9))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(("rows", "frames", "features", "hidden"), SHAPES)
def test_the_kernels_give_the_references_answers(
    rows: int, frames: int, features: int, hidden: int, dtype: torch.dtype
) -> None:
    cell, x_BTF, grad_BTH = examples(rows, frames, features, hidden, dtype)
    # What is not written is likely this.
    torch.full((rows, frames, 16 * hidden), torch.nan, device="cuda", dtype=dtype)
    ours = trained(lambda x: operations.persistent_gru(x, dtype, *cell.all_weights[0]), cell, x_BTF, grad_BTH)
    wide = copy.deepcopy(cell).double()
    exact = trained(lambda x: reference.gru_layer(x, *wide.all_weights[0]), wide, x_BTF.double(), grad_BTH)
    for mine, theirs in zip(ours, exact, strict=True):
        assert far(mine, theirs) < NEAR[dtype]


def test_repeated_runs_give_the_same_numbers() -> None:
    cell, x_BTF, grad_BTH = examples(160, 200, 512, 512, torch.bfloat16)
    first, *others = (trained(lambda x: gru_layer(x, cell), cell, x_BTF, grad_BTH) for _ in range(10))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))


def test_a_layer_is_trained_by_them_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GRU(24, 512).cuda()
    x_BTF = torch.randn(20, 10, 24, device="cuda")
    monkeypatch.setattr(nn.GRU, "forward", lambda *_: pytest.fail("cuDNN ran"))
    with torch.autocast("cuda", torch.bfloat16):
        out_BTH = layer(x_BTF)
    out_BTH.float().square().sum().backward()
    assert out_BTH.dtype == torch.bfloat16
    weights = (weight.detach().double() for weight in layer.cell.all_weights[0])
    assert far(out_BTH, reference.gru_layer(x_BTF.double(), *weights)) < NEAR[torch.bfloat16]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # torch's own, of weights that it copies
def test_cudnn_runs_where_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_forward", lambda *_: pytest.fail("the kernel ran"))
    for hidden, dtype in ((512, torch.float32), (96, torch.bfloat16)):
        cell, x_BTF, _ = examples(4, 5, 8, hidden, dtype)
        assert torch.equal(gru_layer(x_BTF, cell), cell(x_BTF)[0])
    cell, x_BTF, _ = examples(4, 5, 8, 512, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(gru_layer(x_BTF, cell), cell(x_BTF)[0])


def test_a_captured_step_gives_the_same_numbers() -> None:
    cell, x_BTF, grad_BTH = examples(160, 50, 512, 512, torch.bfloat16)
    eager = [tensor.clone() for tensor in trained(lambda x: gru_layer(x, cell), cell, x_BTF, grad_BTH)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trained(lambda x: gru_layer(x, cell), cell, x_BTF, grad_BTH)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = trained(lambda x: gru_layer(x, cell), cell, x_BTF, grad_BTH)
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(eager, captured, strict=True))


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates itself
def test_torch_compiles_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # By default, torch's compiler runs whatever touches a recurrent layer of torch uncompiled.
    monkeypatch.setattr("torch._dynamo.config.allow_rnn", True)
    cell, x_BTF, grad_BTH = examples(20, 10, 64, 512, torch.bfloat16)
    network = torch.compile(lambda x: gru_layer(torch.relu(x), cell) * 2, fullgraph=True)
    ours = trained(network, cell, x_BTF, grad_BTH)
    plain = trained(lambda x: gru_layer(torch.relu(x), cell) * 2, cell, x_BTF, grad_BTH)
    for one, other in zip(ours, plain, strict=True):
        assert far(one, other.double()) < NEAR[torch.bfloat16]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_nan_stays_in_its_row_and_no_program_waits_for_it(dtype: torch.dtype) -> None:
    cell, x_BTF, grad_BTH = examples(32, 6, 64, 512, dtype)
    x_BTF[3, 2] = torch.nan
    out_BTH, grad_BTF, *_ = trained(lambda x: gru_layer(x, cell), cell, x_BTF, grad_BTH)
    assert out_BTH[3, 2:].isnan().all()
    assert not out_BTH[3, :2].isnan().any()
    assert grad_BTF[3].isnan().all()
    others = [row for row in range(32) if row != 3]
    assert not out_BTH[others].isnan().any()
    assert not grad_BTF[others].isnan().any()
