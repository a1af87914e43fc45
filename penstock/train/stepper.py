"""An optimizer whose steps are taken by the device alone: the host neither waits for them nor tells them numbers."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import TrainError

# How torch's optimizers are asked to leave their state on the device, and to do all in few kernels.
_FLAGS = ("fused", "foreach", "capturable")


# Of torch's optimizers, those whose step of a number depends on the gradients of that number alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step of a number depends on the gradients of that number alone.

    Args:
        optimizer: Of torch, or one of your own whose class has `elementwise = True`.
    """
    return _is_torchs(optimizer) or bool(getattr(type(optimizer), "elementwise", False))


def _is_torchs(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE


@final
class Stepper:
    """Takes an optimizer's steps, on a GPU such that they can be captured in a CUDA graph.

    A captured step has the numbers that it was captured with. The one that changes is the learning rate: it is a number
    to the schedule and in a checkpoint, and a tensor to the step.

    Args:
        optimizer: One of torch's, or one whose class has `capturable = True`: its step reads no tensor on the host and
            takes its groups' `lr` as tensors.
        device: Where the parameters are.
        skips: Whether a step must be left out where `found_inf` says so, as fp16 needs it.
        sparse: Whether gradients may be sparse, which no fused optimizer takes.

    Attributes:
        why_eager: Why its steps cannot be captured, or None.

    Raises:
        TrainError: It has to leave steps out and cannot.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, skips: bool = False, sparse: bool = False
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TrainError("LBFGS computes a step's loss several times; choose an optimizer that does so once.")
        self.optimizer, self._device = optimizer, device
        self.why_eager: str | None = None
        # What has state from the beginning has it where an optimizer that is not fused wants it.
        self._fuses = not (sparse or optimizer.state)
        for group in optimizer.param_groups:
            self._prepare(group, device, skips)
        captured = device.type == "cuda" and self.why_eager is None
        self._carried = [float(group["lr"]) for group in optimizer.param_groups] if captured else []
        self._rates = [torch.tensor(rate, device=device) for rate in self._carried]

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
                f"precision 'fp16' leaves steps out whose gradients overflow, which the optimizer {kind.__name__} "
                f"cannot do on its own; choose SGD, Adam, AdamW, LARS or LAMB, or the precision 'bf16'."
            )
        if skips and group.get("momentum") and not group.get("dampening"):
            # Torch makes them when it is first stepped, and leaves them as they were found if that step is left out.
            for parameter in group["params"]:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if device.type != "cuda":
            return
        if "capturable" in group:
            group["capturable"] = True
        elif not (group.get("fused") or own):
            self.why_eager = f"the optimizer {kind.__name__} reads its learning rate on the host"

    def rate_of(self, group: int) -> Tensor:
        """The learning rate of one of the optimizer's groups, by the group's place, on the device."""
        if self._rates:
            return self._rates[group]
        return torch.tensor(float(self.optimizer.param_groups[group]["lr"]), device=self._device)

    def carry(self) -> None:
        """Bring learning rates that the schedule changed to the device. It is no part of a captured step."""
        for index, group in enumerate(self.optimizer.param_groups if self._rates else []):
            if group["lr"] != self._carried[index]:
                self._carried[index] = float(group["lr"])
                self._rates[index].fill_(self._carried[index])

    @property
    def steps_apart(self) -> bool:
        """Whether it may be stepped for some of the parameters and then for others: torch's own count for each."""
        return _is_torchs(self.optimizer)

    def step(self, found_inf: Tensor | None = None, only: Iterable[nn.Parameter] | None = None) -> None:
        """Take a step.

        Args:
            found_inf: A float on the device: above 0 where the step is to be left out.
            only: Step these parameters; the others are stepped by other calls.
        """
        if found_inf is not None:
            # As torch.amp.GradScaler tells it to fused optimizers.
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
        """Every number that a captured step has for good."""
        return [
            value
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name not in ("lr", "initial_lr", "params")
        ]

    @torch.no_grad()
    def settle(self) -> None:
        """Lay state from a checkpoint in memory as the parameters are: fused steps go through both at once."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == parameter.shape
                if alike and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def flagged(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A checkpoint's groups with this device's way to step, whatever device they were written on."""
        own = self.optimizer.param_groups
        return [
            group | {flag: mine[flag] for flag in _FLAGS if flag in mine}
            for group, mine in zip(groups, own, strict=False)
        ]
