"""An optimizer whose steps run on the device alone, so that a CUDA graph can capture them."""

from collections.abc import Iterable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import TrainError
from penstock.train.parallel.tensor_parallel import ParallelModel, WeightSlice
from penstock.train.parallel.world import World

# Options of torch's optimizers that select fused kernels and keep state on the device.
_DEVICE_FLAGS = ("fused", "foreach", "capturable")
# Optimizers of torch whose step of a number depends on the gradients of that number alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Check that an optimizer's step of a number depends on the gradients of that number alone.

    Args:
        optimizer: One of torch's, or one of your own whose class has `elementwise = True`.
    """
    return _is_torchs(optimizer) or bool(getattr(type(optimizer), "elementwise", False))


def check_optimizer(optimizer: Optimizer, slices: Mapping[str, WeightSlice]) -> None:
    """Check that an optimizer treats weight slices as it treats whole weights.

    Args:
        optimizer: One of torch's or Penstock's, or one of your own; `step/optimizers.py` states the contract.
        slices: By parameter name.

    Raises:
        TrainError: It needs whole weights, or is unknown.
    """
    kind = type(optimizer)
    if not slices or is_elementwise(optimizer) or hasattr(kind, "set_sharded"):
        return
    raise TrainError(
        f"the optimizer {kind.__name__} may need whole weights, and each process has only a slice of "
        f"{next(iter(slices))!r}; make all placements 'data', or choose one of {', '.join(ELEMENTWISE)}, LARS, LAMB. "
        f"If each weight's step depends on its own gradients alone, give the class 'elementwise = True'."
    )


def share_norms(optimizer: Optimizer, model: ParallelModel, world: World) -> None:
    """Pass the weight slices and their all-reduce to an optimizer that has `set_sharded`."""
    if world.size > 1 and hasattr(optimizer, "set_sharded"):
        weights = dict(model.module.named_parameters())
        name = "the norms of the optimizer's weights"
        cast(Any, optimizer).set_sharded(
            [weights[own] for own in model.slices], lambda own: world.all_reduce(own, name)
        )


def _is_torchs(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE


@final
class CapturableOptimizer:
    """Steps of an optimizer that the host neither waits for nor passes numbers to.

    A captured step keeps the numbers that it was captured with. The learning rate changes, so it is a Python number in
    the schedule and in checkpoints, and a tensor on the device in the step.

    Args:
        optimizer: One of torch's, or one whose class has `capturable = True`.
        device: Device of the parameters.
        skips: Support `found_inf`, which skips a step; fp16 needs it.
        sparse: Gradients may be sparse, which no fused optimizer supports.

    Attributes:
        why_eager: The reason why its steps cannot be captured, or None.

    Raises:
        TrainError: It cannot skip steps, or needs several losses a step.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, skips: bool = False, sparse: bool = False
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TrainError("LBFGS computes a step's loss several times; choose an optimizer that does so once.")
        self.optimizer, self._device = optimizer, device
        self.why_eager: str | None = None
        # Optimizers that make their state at construction put it where their unfused step expects it.
        self._fuses = not (sparse or optimizer.state)
        for group in optimizer.param_groups:
            self._prepare(group, device, skips)
        captured = device.type == "cuda" and self.why_eager is None
        self._uploaded = [float(group["lr"]) for group in optimizer.param_groups] if captured else []
        self._rates = [torch.tensor(rate, device=device) for rate in self._uploaded]

    def _prepare(self, group: dict[str, Any], device: torch.device, skips: bool) -> None:
        kind = type(self.optimizer)
        own = bool(getattr(kind, "capturable", False))
        chosen = group.get("foreach") or group.get("differentiable") or group.get("fused") is False
        plain = all(parameter.is_floating_point() for parameter in group["params"])
        if self._fuses and plain and "fused" in group and not chosen and device.type in ("cuda", "cpu"):
            # One pass over weights, gradients and momenta instead of one for each operation.
            group["fused"], group["foreach"] = True, False
        if skips and not (group.get("fused") or own):
            raise TrainError(
                f"precision 'fp16' skips steps whose gradients overflow, which the optimizer {kind.__name__} cannot "
                f"do; choose SGD, Adam, AdamW, LARS, LAMB or Muon, or the precision 'bf16'."
            )
        if skips and group.get("fused") and group.get("momentum") and not group.get("dampening"):
            # torch allocates momenta in the first step, and leaves them uninitialized if that step is skipped.
            for parameter in group["params"]:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if device.type != "cuda":
            return
        if "capturable" in group:
            group["capturable"] = True
        elif not (group.get("fused") or own):
            self.why_eager = f"the optimizer {kind.__name__} reads its learning rate on the host"

    def rate_of(self, group: int) -> Tensor:
        """Return the learning rate of a parameter group, by its index, on the device."""
        if self._rates:
            return self._rates[group]
        return torch.tensor(float(self.optimizer.param_groups[group]["lr"]), device=self._device)

    def upload_rates(self) -> None:
        """Copy learning rates that the schedule changed to the device, outside any captured step."""
        for index, group in enumerate(self.optimizer.param_groups if self._rates else []):
            if group["lr"] != self._uploaded[index]:
                self._uploaded[index] = float(group["lr"])
                self._rates[index].fill_(self._uploaded[index])

    @property
    def steps_apart(self) -> bool:
        """True if parameters can be stepped by separate calls: torch's optimizers count steps per parameter."""
        return _is_torchs(self.optimizer)

    def step(self, found_inf: Tensor | None = None, only: Iterable[nn.Parameter] | None = None) -> None:
        """Step the parameters.

        Args:
            found_inf: A float on the device; the step is skipped where it is above 0.
            only: The parameters to step; the others are stepped by other calls.
        """
        if found_inf is not None:
            # The attribute by which torch.amp.GradScaler informs fused optimizers.
            self.optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
        if not self._rates and only is None:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        held = [{name: group[name] for name in ("lr", "params") if name in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=bool(self._rates)):
            group["lr"] = rate
        if only is not None:
            chosen = {id(parameter) for parameter in only}
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
        try:
            self.optimizer.step()
        finally:
            for group, before in zip(groups, held, strict=True):
                group.update(before)

    @property
    def constants(self) -> list[Any]:
        """The numbers that a captured step keeps."""
        return [
            value
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name not in ("lr", "initial_lr", "params")
        ]

    def with_device_flags(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a checkpoint's parameter groups with the flags of this device, whichever device wrote them."""
        own = self.optimizer.param_groups
        return [
            group | {flag: mine[flag] for flag in _DEVICE_FLAGS if flag in mine}
            for group, mine in zip(groups, own, strict=False)
        ]

    @torch.no_grad()
    def match_strides(self) -> None:
        """Give state of a checkpoint the memory format of its parameters: fused steps read both at the same offsets."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == parameter.shape
                if alike and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
