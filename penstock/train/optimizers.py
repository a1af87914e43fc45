"""Optimizers for large batches: how far a weight moves is a share of its own norm, whatever that of its gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.core.errors import TrainError

# W weights, each a tensor

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
Total = Callable[[Tensor], Tensor]
# Each is one operation on many tensors, on a GPU one or few launches.
_many: Any = cast(Any, torch)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Weights of a group that are treated alike.

    Args:
        group: Their group's settings.
        weights: They.
        grads: Their gradients.
        adapted: Whether each has a rate of its own.
        left_out: Whether the step is to be left out, a bool on the device; None where it never is.
    """

    group: dict[str, Any]
    weights: list[Tensor]
    grads: list[Tensor]
    adapted: bool
    left_out: Tensor | None

    @property
    def decay(self) -> float:
        """How much of a weight is added to its direction."""
        return self.group["weight_decay"] if self.adapted else 0.0

    def rate(self) -> Tensor:
        """The learning rate, on the device; 0 where the step is left out."""
        rate, like = self.group["lr"], self.weights[0]
        if not isinstance(rate, Tensor):
            # Filled on the device: to copy it there could not be captured.
            rate = torch.full((), rate, dtype=like.dtype, device=like.device)
        return rate if self.left_out is None else torch.where(self.left_out, 0.0, rate)

    def unless_left_out(self, value: float, otherwise: float) -> Tensor | float:
        """One number where the step is taken, another where it is left out."""
        return value if self.left_out is None else torch.where(self.left_out, otherwise, value)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Move:
    """Where weights are to go.

    Args:
        part: They.
        directions: Of each, in memory of its own.
        beside: Beside whose norms those of the weights are put.
    """

    part: Part
    directions: list[Tensor]
    beside: list[Tensor]


class Layerwise(Optimizer, ABC):
    """An optimizer whose step of a weight is as long as the weight's norm and that of its gradient say.

    Its step reads nothing on the host, so that a CUDA graph can hold it: learning rates may be tensors on the device,
    and where `found_inf` is above 0 nothing moves. Of weights that are cut over processes the norms are those of the
    whole ones.

    Args:
        parameters: The weights, or groups of them.
        settings: What a group has where it says nothing else.

    Raises:
        TrainError: A setting is below 0.
    """

    # What `penstock.train.stepper` asks for.
    capturable: ClassVar[bool] = True

    def __init__(self, parameters: Parameters, settings: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps", "trust"):
            if name in settings and not float(settings[name]) >= 0:
                raise TrainError(f"{type(self).__name__} has {name} {settings[name]}; it must be 0 or more.")
        # By this torch leaves the counts of steps on the device when a state is loaded.
        super().__init__(cast(Any, parameters), settings | {"capturable": True})
        self.found_inf: Tensor | None = None
        self._cut: frozenset[int] = frozenset()
        self._total: Total | None = None

    def over_parts(self, cut: Collection[Tensor], total: Total) -> None:
        """Say which weights are parts of larger ones.

        Args:
            cut: Those of which each process has a part.
            total: Gives the sums of numbers over all processes; it is called once a step, in all of them.
        """
        self._cut = frozenset(map(id, cut))
        self._total = total

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What the closure gives.
        """
        made = None
        if closure is not None:
            with torch.enable_grad():
                made = closure()
        moves = [self._move(part) for group in self.param_groups for part in self._parts(group)]
        ratios = iter(self._ratios([move for move in moves if move.part.adapted]))
        for move in moves:
            rate = move.part.rate()
            _many._foreach_mul_(move.directions, (next(ratios) * rate).unbind() if move.part.adapted else rate)
            self._go(move)
        return made

    def _parts(self, group: dict[str, Any]) -> Iterator[Part]:
        left_out = None if self.found_inf is None else self.found_inf > 0
        learned = [weight for weight in group["params"] if weight.grad is not None]
        for adapted in (True, False):
            weights = [w for w in learned if (w.ndim > 1 or not group["exclude_vectors"]) == adapted]
            grads = [weight.grad for weight in weights]
            if left_out is not None:
                # What is not finite would not go away by a factor of 0.
                grads = [torch.where(left_out, 0, grad) for grad in grads]
            if weights:
                yield Part(group=group, weights=weights, grads=grads, adapted=adapted, left_out=left_out)

    def _ratios(self, moves: Sequence[Move]) -> list[Tensor]:
        """How much longer or shorter each weight's direction becomes, `[W]` for each move."""
        tensors = [tensor for move in moves for tensor in (*move.part.weights, *move.beside)]
        if not tensors:
            return []
        norms = list(_many._foreach_norm(tensors))
        places = [index for index, weight in enumerate(_owners(moves)) if id(weight) in self._cut]
        if places and self._total is not None:
            whole = self._total(torch.stack([norms[index] for index in places]).square()).sqrt()
            for index, norm in zip(places, whole.unbind(), strict=True):
                norms[index] = norm
        ratios: list[Tensor] = []
        for move in moves:
            count = len(move.part.weights)
            weight_W, beside_W = torch.stack(norms[: 2 * count]).split(count)
            norms = norms[2 * count :]
            ratio_W = self._ratio(move.part.group, weight_W, beside_W)
            # A weight that is zero, as some begin, would stay so.
            ratios.append(torch.where((weight_W > 0) & (beside_W > 0), ratio_W, 1.0))
        return ratios

    def _kept(self, weights: Sequence[Tensor], name: str) -> list[Tensor]:
        """What is remembered of each weight, a tensor like it; zeros at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]

    @abstractmethod
    def _move(self, part: Part) -> Move: ...

    @abstractmethod
    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor: ...

    @abstractmethod
    def _go(self, move: Move) -> None: ...


@final
class LARS(Layerwise):
    """Momentum whose rate is each weight's own: the share `trust` of its norm over that of its gradient.

    You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1. As there the momentum
    remembers steps, and not gradients as torch's SGD: what was learned at a rate stays at it.

    Args:
        parameters: The weights, or groups of them with settings of their own.
        lr: The rate; that of biases and norms as it is, that of each weight times its ratio.
        momentum: The share of a step that is taken again in the next one.
        weight_decay: How much of a weight is added to its gradient.
        trust: The paper's eta.
        exclude_vectors: Move weights of fewer than two dimensions, biases and those of norms, by the rate as it is and
            without weight decay, as is done in practice.

    Raises:
        TrainError: A setting is out of range.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float = 1e-3,
        exclude_vectors: bool = True,
    ) -> None:
        if not 0 <= momentum < 1:
            raise TrainError(f"LARS has momentum {momentum}; it must be from 0 to below 1.")
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, settings | {"exclude_vectors": exclude_vectors})

    def _move(self, part: Part) -> Move:
        directions = list(_many._foreach_add(part.grads, part.weights, alpha=part.decay))
        return Move(part=part, directions=directions, beside=part.grads)

    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor:
        return group["trust"] * weight_W / (beside_W + group["weight_decay"] * weight_W)

    def _go(self, move: Move) -> None:
        part = move.part
        velocities = self._kept(part.weights, "momentum_buffer")
        _many._foreach_mul_(velocities, part.unless_left_out(part.group["momentum"], 1.0))
        _many._foreach_add_(velocities, move.directions)
        if part.left_out is not None:
            velocities = _many._foreach_mul(velocities, part.unless_left_out(1.0, 0.0))
        _many._foreach_sub_(part.weights, velocities)


@final
class LAMB(Layerwise):
    """Adam's direction with weight decay, as long as the weight itself, times the rate.

    You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2, with the
    identity for phi. Many clip the whole gradient to the norm 1 as well: the recipe's `clip_norm`.

    Args:
        parameters: The weights, or groups of them with settings of their own.
        lr: The rate: the share of its norm by which a weight moves.
        betas: The shares that the running means of the gradient and of its square keep in a step.
        eps: Added to the root of the mean square.
        weight_decay: How much of a weight is added to its direction.
        exclude_vectors: Move weights of fewer than two dimensions, biases and those of norms, as Adam would, without
            weight decay, as is done in practice.

    Raises:
        TrainError: A setting is out of range.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_vectors: bool = True,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise TrainError(f"LAMB has betas {betas}; they must be from 0 to below 1.")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings | {"exclude_vectors": exclude_vectors})

    def _move(self, part: Part) -> Move:
        means, squares = self._kept(part.weights, "exp_avg"), self._kept(part.weights, "exp_avg_sq")
        first, second = part.group["betas"]
        # Gradients of a step that is left out are zero.
        _many._foreach_mul_(means, part.unless_left_out(first, 1.0))
        _many._foreach_add_(means, part.grads, alpha=1 - first)
        _many._foreach_mul_(squares, part.unless_left_out(second, 1.0))
        _many._foreach_addcmul_(squares, part.grads, part.grads, 1 - second)
        steps_W = self._steps(part)
        directions = list(_many._foreach_div(means, (1 - first**steps_W).unbind()))
        roots = _many._foreach_div(squares, (1 - second**steps_W).unbind())
        _many._foreach_sqrt_(roots)
        _many._foreach_add_(roots, part.group["eps"])
        _many._foreach_div_(directions, roots)
        if part.decay:
            _many._foreach_add_(directions, part.weights, alpha=part.decay)
        return Move(part=part, directions=directions, beside=directions)

    def _steps(self, part: Part) -> Tensor:
        """How often each weight has moved, this time included; 1 at least. `[W]`."""
        for weight in part.weights:
            if "step" not in self.state[weight]:
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
        steps = [self.state[weight]["step"] for weight in part.weights]
        taken = part.unless_left_out(1.0, 0.0)
        _many._foreach_add_(steps, taken if isinstance(taken, float) else [taken] * len(steps))
        # In float32 1 - 0.999 has four digits.
        return torch.stack(steps).double().clamp(min=1)

    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor:
        return weight_W / beside_W

    def _go(self, move: Move) -> None:
        _many._foreach_sub_(move.part.weights, move.directions)


def _owners(moves: Sequence[Move]) -> list[Tensor]:
    """The weight to which each norm belongs: first the weights' own, then those beside them."""
    return [weight for move in moves for weight in (*move.part.weights, *move.part.weights)]
