"""Muon: matrices are stepped along the orthogonal matrix that is nearest to their momentum, all else by AdamW."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast, final

import torch
from torch import Tensor

from penstock.train.step.optimizers import OnDevice, Part
from penstock.train.step.parameter_groups import NamedParameters

# N matrices of one shape, R rows, C columns

# Embeddings and last layers by their usual names.
OTHERS = ("*embed*", "wte", "wpe", "head", "heads", "classifier", "fc", "lm_head", "score")
# Five iterations with these bring all singular values to between 0.7 and 1.2.
_FIRST, _THIRD, _FIFTH = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_TINY = 1e-7
# The root mean square of a step at a learning rate of 1: Adam's is 0.2 to 0.4.
_LENGTH = 0.2
# Of recurrent layers, and of attention: several matrices, one below the other.
_GATES = re.compile(r"(?P<layer>(?:.*\.)?)weight_(?:ih|hh)_(?P<number>l\d+(?:_reverse)?)")
_QUERY_KEY_VALUE = "in_proj_weight"
_many: Any = cast(Any, torch)


@final
class Muon(OnDevice):
    """Steps of matrices along the nearest orthogonal matrix of their momentum; AdamW for all other weights.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; with the weight decay and the length
    of a step of Liu et al. 2025, "Muon is scalable for LLM training", section 2.2, so that learning rates of AdamW
    apply. A kernel of a convolution is a matrix with a row for each output channel. The gates of recurrent layers of
    torch, and the queries, keys and values of its attention, are matrices of their own.

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
        TrainError: A setting is out of range.
    """

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
        given: list[Any] = list(named_parameters)
        named: dict[str, Tensor] = {}
        for each in given:
            named.update(each["params"] if isinstance(each, dict) else [each])
        # By identity: groups may be divided later.
        self._blocks = {
            id(weight): _blocks(name, named)
            for name, weight in named.items()
            if weight.ndim > 1 and weight.shape[1] > 1 and not _is_other(name, others)
        }
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(given, settings)

    def _is_adapted(self, weight: Tensor, group: dict[str, Any]) -> bool:
        return id(weight) in self._blocks

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
        # By shape: the products of all matrices of a shape are one operation.
        found: dict[torch.Size, list[Tensor]] = {}
        for weight, direction in zip(part.weights, directions, strict=True):
            for block_RC in direction.flatten(1).chunk(self._blocks[id(weight)]):
                found.setdefault(block_RC.shape, []).append(block_RC)
        made = {shape: iter(_scaled(orthogonal(torch.stack(blocks)))) for shape, blocks in found.items()}
        moves: list[Tensor] = []
        for weight, direction in zip(part.weights, directions, strict=True):
            flat_RC = direction.flatten(1)
            whole_RC = torch.cat([next(made[block_RC.shape]) for block_RC in flat_RC.chunk(self._blocks[id(weight)])])
            moves.append(torch.empty_like(weight).copy_(whole_RC.view(weight.shape)))
        return moves


def orthogonal(matrix_NRC: Tensor) -> Tensor:
    """Bring the singular values of matrices near 1, by Newton-Schulz iterations; zeros stay zeros.

    In bf16 on a GPU, otherwise in float32.

    Args:
        matrix_NRC: Matrices of one shape.
    """
    made_NRC = matrix_NRC.to(torch.bfloat16 if matrix_NRC.is_cuda else torch.float32)
    is_tall = made_NRC.shape[1] > made_NRC.shape[2]
    if is_tall:
        made_NRC = made_NRC.mT
    made_NRC = made_NRC / torch.linalg.matrix_norm(made_NRC, keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram_NRR = made_NRC @ made_NRC.mT
        factor_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_THIRD, alpha=_FIFTH)
        made_NRC = torch.baddbmm(made_NRC, factor_NRR, made_NRC, beta=_FIRST)
    return made_NRC.mT if is_tall else made_NRC


def _scaled(matrix_NRC: Tensor) -> tuple[Tensor, ...]:
    # An orthogonal matrix has a root mean square of 1 over the root of its longer side.
    return (matrix_NRC.float() * (_LENGTH * max(matrix_NRC.shape[1:]) ** 0.5)).unbind()


def _blocks(name: str, named: Mapping[str, Tensor]) -> int:
    """Count the matrices that a weight consists of."""
    if name.rpartition(".")[2] == _QUERY_KEY_VALUE:
        return 3
    gates = _GATES.fullmatch(name)
    recurrent = None if gates is None else named.get(f"{gates['layer']}weight_hh_{gates['number']}")
    # The rows of all gates over those of one; a projected state has fewer columns than that.
    if recurrent is None or recurrent.shape[0] % recurrent.shape[1]:
        return 1
    return recurrent.shape[0] // recurrent.shape[1]


def _is_other(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, *name.split(".")))
