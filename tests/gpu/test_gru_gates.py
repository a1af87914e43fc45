"""The kernel of the GRU's gates beside its reference."""

import pytest
import torch

from penstock.kernels.gru_gates import chosen, reference

# Rows and hidden units.
SHAPES = ((1, 1), (3, 7), (1, 1024), (64, 1000), (256, 1024), (1024, 2560), (4096, 2560))

pytestmark = pytest.mark.gpu

NEAR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_the_kernel_gives_the_references_answers(rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + hidden)
    # A frame of a chunk, so that its rows do not follow one another.
    input_BG = torch.randn(rows, 2, 3 * hidden, device="cuda", dtype=dtype)[:, 1] * 3
    recurrent_BG = torch.randn(rows, 3 * hidden, device="cuda", dtype=dtype) * 3
    hidden_BH = torch.randn(rows, hidden, device="cuda", dtype=dtype)
    valid_B = torch.rand(rows, device="cuda") < 0.7
    torch.full((rows, hidden), torch.nan, device="cuda", dtype=dtype)  # what is not written is likely this
    kernel = chosen("cuda", dtype, False)
    assert kernel is not reference.gru_gates
    after_BH = kernel(input_BG, recurrent_BG, hidden_BH, valid_B)
    exact_BH = reference.gru_gates(input_BG.double(), recurrent_BG.double(), hidden_BH.double(), valid_B)
    assert (after_BH.double() - exact_BH).abs().max() <= NEAR[dtype]
    assert torch.equal(after_BH[~valid_B], hidden_BH[~valid_B])
