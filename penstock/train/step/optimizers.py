"""Optimizers that a CUDA graph can capture, and layer-wise ones of them for large batches.

The contract of an optimizer that is not torch's, all of it optional:

- `capturable = True` on the class: the step reads no tensor on the host, so that a CUDA graph can capture it, and
  accepts tensors on the device as the groups' `lr`. The trainer then may set `found_inf`, a float on the device: where
  it is above 0, the step must change nothing.
- `elementwise = True` on the class: the step of each number depends on the gradients of that number alone, so it can
  step a slice of a weight as it steps a whole one.
- A method `set_sharded(sharded, all_reduce)`: for an optimizer that is not elementwise. It gets the fully
  sharded weights, and a function that sums a tensor over all processes.

`step/capturable_optimizer.py` reads these.
"""

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
AllReduce = Callable[[Tensor], Tensor]
# The `_foreach_*` operations work on lists of tensors, on a GPU in one launch or a few.
_many: Any = cast(Any, torch)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Weights of a parameter group with the same treatment.

    Args:
        group: Settings of the group.
        weights: The weights.
        grads: Their gradients.
        adapted: True if the optimizer steps these weights in its own way: by a rate that their norms scale, or as
            matrices. False for the plain step, as of biases.
        left_out: True if the step is skipped, a bool on the device; None if steps are never skipped.
    """

    group: dict[str, Any]
    weights: list[Tensor]
    grads: list[Tensor]
    adapted: bool
    left_out: Tensor | None

    @property
    def decay(self) -> float:
        """Weight decay, 0 for weights that are not adapted."""
        return self.group["weight_decay"] if self.adapted else 0.0

    def rate(self) -> Tensor:
        """The learning rate, on the device; 0 if the step is skipped."""
        rate, like = self.group["lr"], self.weights[0]
        if not isinstance(rate, Tensor):
            # Filled on the device, because a copy from the host cannot be captured.
            rate = torch.full((), rate, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        return rate if self.left_out is None else torch.where(self.left_out, 0.0, rate)

    def unless_left_out(self, value: float, otherwise: float) -> Tensor | float:
        """`value`, or `otherwise` if the step is skipped."""
        return value if self.left_out is None else torch.where(self.left_out, otherwise, value)


class OnDevice(Optimizer, ABC):
    """Base class of optimizers whose step reads nothing on the host, so that a CUDA graph can capture it.

    Learning rates may be tensors on the device, and if `found_inf` is above 0 no weight changes.

    Args:
        parameters: The weights, or groups of them.
        settings: Defaults of the groups.

    Raises:
        TrainError: A setting is out of range.
    """

    capturable: ClassVar[bool] = True
    # Of the class, because copies of an optimizer have only its state and groups.
    found_inf: Tensor | None = None

    def __init__(self, parameters: Parameters, settings: dict[str, Any]) -> None:
        own = type(self).__name__
        for name in ("lr", "weight_decay", "eps", "trust"):
            if name in settings and not float(settings[name]) >= 0:
                raise TrainError(f"{own} has {name} {settings[name]}; it must be 0 or more.")
        if not 0 <= settings.get("momentum", 0.0) < 1:
            raise TrainError(f"{own} has momentum {settings['momentum']}; it must be from 0 to below 1.")
        betas = settings.get("betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise TrainError(f"{own} has betas {betas}; they must be two numbers from 0 to below 1.")
        # With this setting torch keeps step counts on the device when it loads a state.
        super().__init__(cast(Any, parameters), settings | {"capturable": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            The result of the closure.

        Raises:
            TrainError: A gradient is sparse, or a weight that Adam steps is complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step([part for group in self.param_groups for part in self._parts(group)])
        return loss

    def _parts(self, group: dict[str, Any]) -> Iterator[Part]:
        left_out = None if self.found_inf is None else self.found_inf > 0
        learned = [weight for weight in group["params"] if weight.grad is not None]
        if any(weight.grad.is_sparse for weight in learned):
            raise TrainError(
                f"{type(self).__name__} cannot step by sparse gradients; make embeddings with sparse=False, or choose "
                f"SGD or Adagrad."
            )
        for adapted in (True, False):
            weights = [weight for weight in learned if self._is_adapted(weight, group) == adapted]
            grads = [weight.grad for weight in weights]
            if left_out is not None:
                # Multiplying by 0 would keep inf and NaN.
                grads = [torch.where(left_out, 0, grad) for grad in grads]
            if weights:
                yield Part(group=group, weights=weights, grads=grads, adapted=adapted, left_out=left_out)

    def _state_of(self, weights: Sequence[Tensor], name: str) -> list[Tensor]:
        """State tensors of the weights under a name; zeros at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]

    def _adam(self, part: Part) -> list[Tensor]:
        """Update the running means of Adam, and return its directions without weight decay."""
        if any(weight.is_complex() for weight in part.weights):
            raise TrainError(f"{type(self).__name__} cannot step complex weights; choose AdamW or SGD.")
        means, squares = self._state_of(part.weights, "exp_avg"), self._state_of(part.weights, "exp_avg_sq")
        first, second = part.group["betas"]
        # The gradients of a skipped step are zero.
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
        return directions

    def _steps(self, part: Part) -> Tensor:
        """Number of updates of each weight, `[W]`, this one included; at least 1."""
        for weight in part.weights:
            if "step" not in self.state[weight]:
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
        steps = [self.state[weight]["step"] for weight in part.weights]
        taken = part.unless_left_out(1.0, 0.0)
        _many._foreach_add_(steps, taken if isinstance(taken, float) else [taken] * len(steps))
        # In float32, 1 - 0.999 has only four digits.
        return torch.stack(steps).double().clamp(min=1)

    @abstractmethod
    def _is_adapted(self, weight: Tensor, group: dict[str, Any]) -> bool: ...

    @abstractmethod
    def _step(self, parts: Sequence[Part]) -> None: ...


class Layerwise(OnDevice):
    """Base class of optimizers that scale each weight's step by a ratio of norms.

    The norm of a weight that is sliced over processes is that of the whole weight.
    """

    def __init__(self, parameters: Parameters, settings: dict[str, Any]) -> None:
        super().__init__(parameters, settings)
        self._sharded: frozenset[int] = frozenset()
        self._all_reduce: AllReduce | None = None

    def set_sharded(self, sharded: Collection[Tensor], all_reduce: AllReduce) -> None:
        """Set the weights that are slices of larger ones.

        Args:
            sharded: The fully sharded weights.
            all_reduce: Sums a tensor over all processes; called once a step in each of them.
        """
        self._sharded = frozenset(map(id, sharded))
        self._all_reduce = all_reduce

    def _is_adapted(self, weight: Tensor, group: dict[str, Any]) -> bool:
        return weight.ndim > 1 or not group["exclude_vectors"]

    def _step(self, parts: Sequence[Part]) -> None:
        moves = [(part, *self._directions(part)) for part in parts]
        ratios = iter(self._ratios([(part, beside) for part, _, beside in moves if part.adapted]))
        for part, directions, _ in moves:
            rate = part.rate()
            _many._foreach_mul_(directions, (next(ratios) * rate).unbind() if part.adapted else rate)
            self._move(part, directions)

    def _ratios(self, parts: Sequence[tuple[Part, list[Tensor]]]) -> list[Tensor]:
        """Factor of each weight's direction, `[W]` for each part, from the norms of its weights and of `beside`."""
        tensors = [tensor for part, beside in parts for tensor in (*part.weights, *beside)]
        if not tensors:
            return []
        norms = list(_many._foreach_norm(tensors))
        owners = [weight for part, _ in parts for weight in (*part.weights, *part.weights)]
        places = [index for index, weight in enumerate(owners) if id(weight) in self._sharded]
        if places and self._all_reduce is not None:
            whole = self._all_reduce(torch.stack([norms[index] for index in places]).square()).sqrt()
            for index, norm in zip(places, whole.unbind(), strict=True):
                norms[index] = norm
        ratios: list[Tensor] = []
        for part, _ in parts:
            count = len(part.weights)
            weight_W, beside_W = torch.stack(norms[: 2 * count]).split(count)
            norms = norms[2 * count :]
            ratio_W = self._ratio(part.group, weight_W, beside_W)
            # A weight initialised to zero would otherwise stay zero.
            ratios.append(torch.where((weight_W > 0) & (beside_W > 0), ratio_W, 1.0))
        return ratios

    @abstractmethod
    def _directions(self, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        """Compute each weight's direction, in its own memory, and the tensors whose norms divide the weights' norms."""

    @abstractmethod
    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor: ...

    @abstractmethod
    def _move(self, part: Part, directions: list[Tensor]) -> None:
        """Update the weights by their scaled directions."""


@final
class LARS(Layerwise):
    """SGD with momentum in which each weight's rate is scaled by `trust` times its norm over its gradient's norm.

    You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1. As there, and unlike
    torch's SGD, the momentum accumulates steps and not gradients: a change of the rate does not affect past steps.

    Args:
        parameters: The weights, or groups of them with their own settings.
        lr: Learning rate, multiplied by the ratio of each weight.
        momentum: Share of a step that is repeated in the next one.
        weight_decay: Share of a weight that is added to its gradient.
        trust: The paper's eta.
        exclude_vectors: Do not scale the rate of weights of fewer than two dimensions (biases and norms), nor apply
            weight decay to them, as is done in practice.

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
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, settings | {"exclude_vectors": exclude_vectors})

    def _directions(self, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        return list(_many._foreach_add(part.grads, part.weights, alpha=part.decay)), part.grads

    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor:
        return group["trust"] * weight_W / (beside_W + group["weight_decay"] * weight_W)

    def _move(self, part: Part, directions: list[Tensor]) -> None:
        velocities = self._state_of(part.weights, "momentum_buffer")
        _many._foreach_mul_(velocities, part.unless_left_out(part.group["momentum"], 1.0))
        _many._foreach_add_(velocities, directions)
        if part.left_out is not None:
            velocities = _many._foreach_mul(velocities, part.unless_left_out(1.0, 0.0))
        _many._foreach_sub_(part.weights, velocities)


@final
class LAMB(Layerwise):
    """Adam with weight decay, its direction scaled to the weight's norm.

    You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2, with the
    identity for phi. Often combined with clipping the whole gradient to norm 1: the recipe's `clip_norm`.

    Args:
        parameters: The weights, or groups of them with their own settings.
        lr: Learning rate: the length of a step as a share of the weight's norm.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Added to the root of the mean square.
        weight_decay: Share of a weight that is added to its direction.
        exclude_vectors: Update weights of fewer than two dimensions (biases and norms) as Adam does, without weight
            decay, as is done in practice.

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings | {"exclude_vectors": exclude_vectors})

    def _directions(self, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        directions = self._adam(part)
        if part.decay:
            _many._foreach_add_(directions, part.weights, alpha=part.decay)
        return directions, directions

    def _ratio(self, group: dict[str, Any], weight_W: Tensor, beside_W: Tensor) -> Tensor:
        return weight_W / beside_W

    def _move(self, part: Part, directions: list[Tensor]) -> None:
        _many._foreach_sub_(part.weights, directions)
