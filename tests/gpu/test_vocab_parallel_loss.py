"""The kernels of cross-entropy over processes beside their reference in float64, captured, and how long they take."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.vocab_parallel_loss import class_gradient, class_sums, reference
from penstock.kernels.vocab_parallel_loss.dispatch import chosen
from penstock.train.parallel import losses
from penstock.train.parallel.losses import CrossEntropy, _VocabParallelLoss  # pyright: ignore[reportPrivateUsage]
from penstock.train.parallel.world import World

# Rows, and classes of this process.
SHAPES = (
    (1, 1),
    (3, 1),
    (1, 10),
    (64, 1000),
    (5, 8192),
    (7, 8193),
    (256, 43_690),
    (2, 1_400_000),
    (9, 699_999),
    (256, 700_000),
)

pytestmark = pytest.mark.gpu

# Of one rounding; in float32, of exponents of numbers down to -40.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
EVEN, WANTED = 1e-7, 0.9


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums and gathers of one process."""
    monkeypatch.setattr(losses, "start_all_gather", lambda world, name, own, **_: lambda: own[None])


def labels_of(rows: int, classes: int) -> Tensor:
    """Labels of these classes, and of others before and behind them."""
    labels_N = torch.randint(0, classes, (rows,), device="cuda")
    labels_N[1::4], labels_N[2::4], labels_N[3::8] = -1, classes, 2**40
    return labels_N


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("rows", "classes"), SHAPES)
def test_the_kernels_give_the_references_answers(rows: int, classes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + classes)
    logits_NC = (torch.randn(rows, classes, device="cuda") * 4 + 20).to(dtype)
    labels_N = labels_of(rows, classes)
    assert chosen("cuda", dtype, False) is not reference
    torch.full((8, rows, 200), torch.nan, device="cuda")  # what is not written is likely this
    sums_5N = class_sums(logits_NC, labels_N)
    exact_5N = reference.class_sums(logits_NC.double(), labels_N)
    assert sums_5N.dtype == torch.float32
    torch.testing.assert_close(sums_5N.double(), exact_5N, rtol=3e-6, atol=3e-6)
    scale = torch.tensor(1 / rows, device="cuda")
    max_logit_N, softmax_scale_N = exact_5N[0], 0.5 / exact_5N[1]
    exact_NC = reference.class_gradient(logits_NC.double(), labels_N, max_logit_N, softmax_scale_N, scale, EVEN, WANTED)
    torch.full_like(logits_NC, torch.nan)
    found_NC = class_gradient(logits_NC, labels_N, max_logit_N.float(), softmax_scale_N.float(), scale, EVEN, WANTED)
    assert found_NC.dtype == dtype
    # Where the two parts of a gradient nearly cancel out, what is left is as exact as the parts.
    least = 2**-24 if dtype == torch.float16 else 1e-12
    torch.testing.assert_close(found_NC.double(), exact_NC, rtol=ROUNDING[dtype], atol=least)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_loss_and_its_gradient_are_torchs(dtype: torch.dtype, smoothing: float) -> None:
    torch.manual_seed(0)
    logits_NC = (torch.randn(64, 30_000, device="cuda") * 3).to(dtype).requires_grad_()
    labels_N = torch.randint(0, 30_000, (64,), device="cuda")
    exact_NC = logits_NC.detach().double().requires_grad_()
    expected = F.cross_entropy(exact_NC, labels_N, label_smoothing=smoothing)
    loss = CrossEntropy(smoothing).vocab_parallel(World(), logits_NC, labels_N, (64,))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=5e-6, atol=0)
    # As a scaled loss of float16 is.
    (found,) = torch.autograd.grad(loss * 1024, logits_NC)
    (right,) = torch.autograd.grad(expected * 1024, exact_NC)
    least = 2**-24 if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(found.double(), right, rtol=ROUNDING[dtype], atol=least)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_that_are_not_finite_give_what_torch_gives(smoothing: float) -> None:
    torch.manual_seed(0)
    logits_NC = torch.randn(8, 20_000, device="cuda")
    logits_NC[0, :9000], logits_NC[1, 9000:], logits_NC[2, 5] = -torch.inf, -torch.inf, -torch.inf
    logits_NC[3] = -torch.inf
    logits_NC[4, 7], logits_NC[5, 19_999], logits_NC[6] = torch.inf, torch.nan, torch.nan
    labels_N = torch.tensor([9500, 17, 5, 3, 7, 3, 3, 3], device="cuda")
    for row in range(8):
        own_1C, own_1 = logits_NC[row : row + 1], labels_N[row : row + 1]
        expected = F.cross_entropy(own_1C, own_1, label_smoothing=smoothing)
        found = CrossEntropy(smoothing).vocab_parallel(World(), own_1C, own_1, (1,))
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.usefixtures("alone")
def test_a_label_of_no_class_makes_the_loss_nan() -> None:
    logits_NC = torch.randn(3, 40, device="cuda")
    for label in (40, -1, -100):
        labels_N = torch.tensor([0, label, 1], device="cuda")
        assert CrossEntropy().vocab_parallel(World(), logits_NC, labels_N, (3,)).isnan()


def test_more_numbers_than_32_bits_count() -> None:
    rows, classes = 1540, 1_400_000
    assert rows * classes > 2**31
    logits_NC = torch.empty(rows, classes, device="cuda", dtype=torch.bfloat16)
    logits_NC.random_(-4, 5)
    labels_N = torch.arange(rows, device="cuda") * 909
    sums_5N = class_sums(logits_NC, labels_N)
    softmax_scale_N, scale = 1 / sums_5N[1], torch.ones((), device="cuda")
    grad_NC = class_gradient(logits_NC, labels_N, sums_5N[0], softmax_scale_N, scale, 0.0, 1.0)
    for row in (slice(0, 2), slice(766, 770), slice(rows - 2, rows)):
        part_NC, own_N = logits_NC[row].double(), labels_N[row]
        exact_5N = reference.class_sums(part_NC, own_N)
        torch.testing.assert_close(sums_5N[:, row].double(), exact_5N, rtol=1e-5, atol=1e-6)
        exact_NC = reference.class_gradient(part_NC, own_N, exact_5N[0], 1 / exact_5N[1], scale, 0.0, 1.0)
        torch.testing.assert_close(grad_NC[row].double(), exact_NC, rtol=2**-7, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_it_is_captured_and_follows_its_inputs() -> None:
    torch.manual_seed(0)
    logits_NC = torch.randn(32, 50_000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels_N = torch.randint(0, 50_000, (32,), device="cuda")

    def computed() -> tuple[Tensor, Tensor]:
        loss = _VocabParallelLoss.apply(World(), logits_NC, labels_N, (32,), 0.1)
        assert isinstance(loss, Tensor)
        return loss.detach(), torch.autograd.grad(loss, logits_NC)[0]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        computed()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = computed()
    for _ in range(2):
        with torch.no_grad():
            logits_NC.copy_(torch.randn_like(logits_NC))
            labels_N.copy_(torch.randint_like(labels_N, 0, 50_000))
        graph.replay()
        for found, expected in zip(captured, computed(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "classes"), [(256, 700_000), (512, 700_000), (512, 699_999), (4096, 1000)])
def test_how_long_it_takes(rows: int, classes: int, capsys: pytest.CaptureFixture[str]) -> None:
    logits_NC = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    labels_N = torch.randint(0, classes, (rows,), device="cuda")
    scale = torch.ones((), device="cuda")
    for name, by in (("torch", reference), ("the kernels", chosen("cuda", torch.bfloat16, False))):
        sums_5N = by.class_sums(logits_NC, labels_N)
        given = logits_NC, labels_N, sums_5N[0], 1 / sums_5N[1], scale, 0.0, 1.0
        forward_ms = _took_ms(partial(by.class_sums, logits_NC, labels_N))
        backward_ms = _took_ms(partial(by.class_gradient, *given))
        gigabytes = logits_NC.nbytes / 1e9
        with capsys.disabled():
            print(
                f"\n{rows} x {classes:,} in bf16 by {name}: forward {forward_ms:.3f} ms, {gigabytes / forward_ms:.2f} "
                f"TB/s; backward {backward_ms:.3f} ms, {2 * gigabytes / backward_ms:.2f} TB/s",
                end="",
            )


def _took_ms(run: Callable[[], object], times: int = 20) -> float:
    """The median, by the device's clock."""
    for _ in range(3):
        run()
    taken: list[float] = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken)[times // 2]
