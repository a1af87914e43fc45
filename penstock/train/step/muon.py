"""Muon: matrices are stepped along the orthogonal matrix that is nearest to their momentum, all else by AdamW."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast, final

import torch
from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.step.optimizers import OnDevice, Part
from penstock.train.step.parameter_groups import HEADS, NamedParameters

# N matrices of one shape, R rows, C columns

# Embeddings and last layers by their usual names.
OTHERS = ("*embed*", "wte", "wpe", *HEADS)
# Five iterations with these bring all singular values to between 0.7 and 1.2.
_FIRST, _THIRD, _FIFTH = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_TINY = 1e-7
# The root mean square of a step at a learning rate of 1: Adam's is 0.2 to 0.4.
_LENGTH = 0.2
# Numbers of the matrices of one shape that are multiplied at once: these products need five times their memory.
_TOGETHER = 1 << 24
# Of recurrent layers and cells, and of attention: several matrices, one below the other.
_GATES = re.compile(r"(?P<layer>(?:.*\.)?)weight_(?:ih|hh)(?P<number>(?:_l\d+(?:_reverse)?)?)")
_QUERY_KEY_VALUE = "in_proj_weight"
_many: Any = cast(Any, torch)


@final
class Muon(OnDevice):
    """Steps of matrices along the nearest orthogonal matrix of their momentum; AdamW for all other weights.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; with the weight decay and the length
    of a step of Liu et al. 2025, "Muon is scalable for LLM training", section 2.2, so that learning rates of AdamW
    apply. A weight of more than two dimensions, such as the kernel of a convolution, is a matrix with a row for each
    index of its first dimension. The gates of recurrent layers and cells of torch, and the queries, keys and values of
    its attention, are matrices of their own. A weight whose first or second dimension is 1, such as a depthwise kernel,
    is not a matrix.

    Each process needs whole matrices: all placements are `"data"`.

    Args:
        named_parameters: Pairs of names and parameters, as a recipe's optimizer function gets them; or groups of such
            pairs with their own settings.
        lr: Learning rate of all weights.
        momentum: Decay rate of the momentum of a matrix, which is Nesterov's.
        weight_decay: Share of a weight, times the learning rate, by which each step shrinks it; vectors have none.
        betas: Decay rates of AdamW.
        eps: Added to the root of AdamW's mean square.
        others: Patterns of names or of their parts between dots: matrices that AdamW steps. By default embeddings and
            last layers, where they have one of the usual names.

    Raises:
        TrainError: A setting is out of range, or a weight has no name.
    """

    _blocks: dict[int, int]

    def __init__(
        self,
        named_parameters: NamedParameters | Iterable[dict[str, Any]],
        *,
        lr: float | Tensor = 2e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        others: Sequence[str] = OTHERS,
    ) -> None:
        if isinstance(others, str):
            raise TrainError(f"Muon has others {others!r}; it must be a list of words.")
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(cast(Any, named_parameters), settings | {"others": tuple(others)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of pairs of names and weights.

        Args:
            param_group: The pairs under `"params"`, and settings of their own.

        Raises:
            TrainError: The weights have no names.
        """
        super().add_param_group(param_group)
        if "param_names" not in param_group:
            raise TrainError(
                "Muon needs the names of weights: give it network.named_parameters(), and in a recipe call the first "
                "parameter of the optimizer's function 'named_parameters'."
            )
        self._find_blocks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_blocks()

    def _find_blocks(self) -> None:
        groups = [(group, list(zip(group["param_names"], group["params"], strict=True))) for group in self.param_groups]
        named = {name: weight for _, pairs in groups for name, weight in pairs}
        # By identity: groups may be divided later.
        self._blocks = {
            id(weight): _blocks(name, named)
            for group, pairs in groups
            for name, weight in pairs
            if not _is_other(name, group["others"])
        }

    def _is_adapted(self, weight: Tensor, group: dict[str, Any]) -> bool:
        # Lazy layers have no shape before the first step.
        is_matrix = weight.ndim > 1 and min(weight.shape[:2]) > 1 and weight.is_floating_point()
        return is_matrix and id(weight) in self._blocks

    def _step(self, parts: Sequence[Part]) -> None:
        for part in parts:
            directions = self._orthogonal(part) if part.adapted else self._adam(part)
            rate = part.rate()
            decayed = [weight for weight in part.weights if weight.ndim > 1]
            if decayed and part.group["weight_decay"]:
                _many._foreach_mul_(decayed, 1 - rate * part.group["weight_decay"])
            _many._foreach_mul_(directions, rate)
            _many._foreach_sub_(part.weights, directions)

    def _orthogonal(self, part: Part) -> list[Tensor]:
        momenta, momentum = self._state_of(part.weights, "momentum_buffer"), part.group["momentum"]
        _many._foreach_mul_(momenta, part.unless_left_out(momentum, 1.0))
        _many._foreach_add_(momenta, part.grads)
        directions = list(_many._foreach_add(part.grads, momenta, alpha=momentum))
        flat_RC = [direction.flatten(1) for direction in directions]
        found: dict[torch.Size, list[Tensor]] = {}
        for weight, rows_RC in zip(part.weights, flat_RC, strict=True):
            for block_RC in rows_RC.chunk(self._blocks[id(weight)]):
                found.setdefault(block_RC.shape, []).append(block_RC)
        for shape, blocks in found.items():
            many = max(1, _TOGETHER // shape.numel())
            for first in range(0, len(blocks), many):
                _replace_by_steps(blocks[first : first + many])
        for direction, rows_RC in zip(directions, flat_RC, strict=True):
            # Otherwise the rows are a view.
            if not direction.is_contiguous():
                direction.copy_(rows_RC.view(direction.shape))
        return directions


def _replace_by_steps(blocks: list[Tensor]) -> None:
    # The products of all these matrices are one operation.
    made_NRC = orthogonal(torch.stack(blocks)).to(blocks[0].dtype)
    # An orthogonal matrix has a root mean square of 1 over the root of its longer side.
    made_NRC = made_NRC * (_LENGTH * max(blocks[0].shape) ** 0.5)
    _many._foreach_copy_(blocks, made_NRC.unbind())


def orthogonal(matrix_NRC: Tensor) -> Tensor:
    """Bring the singular values of matrices near 1, by Newton-Schulz iterations; zeros stay zeros.

    In float64 if they are, otherwise in bf16 on a GPU and in float32 on a CPU.

    Args:
        matrix_NRC: Matrices of one shape.
    """
    is_double = matrix_NRC.dtype == torch.float64
    made_NRC = matrix_NRC if is_double else matrix_NRC.to(torch.bfloat16 if matrix_NRC.is_cuda else torch.float32)
    is_tall = made_NRC.shape[1] > made_NRC.shape[2]
    if is_tall:
        made_NRC = made_NRC.mT
    made_NRC = made_NRC / torch.linalg.matrix_norm(made_NRC, keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram_NRR = made_NRC @ made_NRC.mT
        factor_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_THIRD, alpha=_FIFTH)
        made_NRC = torch.baddbmm(made_NRC, factor_NRR, made_NRC, beta=_FIRST)
    return made_NRC.mT if is_tall else made_NRC


def _blocks(name: str, named: Mapping[str, Tensor]) -> int:
    """Count the matrices that a weight consists of."""
    if name.rpartition(".")[2] == _QUERY_KEY_VALUE:
        return 3
    gates = _GATES.fullmatch(name)
    if gates is None:
        return 1
    recurrent, projection = (named.get(f"{gates['layer']}weight_{each}{gates['number']}") for each in ("hh", "hr"))
    if recurrent is None:
        return 1
    # The rows of all gates over those of one.
    count, rest = divmod(recurrent.shape[0], (recurrent if projection is None else projection).shape[1])
    return 1 if rest else count


def _is_other(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, *name.split(".")))
