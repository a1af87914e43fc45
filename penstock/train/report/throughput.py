"""Training throughput, and model FLOPs utilisation (MFU, as defined in the PaLM report, 2022)."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import nn

from penstock.models.flops import flops, peak_flops
from penstock.train.data.trees import Tree, leaves
from penstock.train.parallel.dataflow import Call, plain_call
from penstock.train.parallel.world import World
from penstock.train.recipe import Recipe

# The first steps compile the network and capture the step.
WARM_UP_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Training throughput over a period.

    Args:
        samples_per_s: Examples a second, over all processes.
        mfu: FLOPs of forward and backward pass over the peak of all devices, from 0 to 1; None if either is unknown.
    """

    samples_per_s: float
    mfu: float | None

    def describe(self) -> str:
        """Format the rate as text."""
        return f"{self.samples_per_s:,.0f} samples/s" + ("" if self.mfu is None else f"  MFU {self.mfu:.1%}")

    def fields(self) -> dict[str, float]:
        """Return the known values by name."""
        known = {"samples_per_s": round(self.samples_per_s, 1)}
        return known if self.mfu is None else known | {"mfu": round(self.mfu, 4)}


@final
class WarmSteps:
    """Measure the time of steps alone: without the first ones, which compile and capture, without waits for examples,
    validations and checkpoints.

    Attributes:
        steps: Steps that were measured.
        seconds: Their time.
    """

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        # Steps, time and waits at the last synchronization.
        self._before: tuple[int, float, float] | None = None

    def synchronized(self, step: int, now_s: float, waited_s: float) -> None:
        """Note that the device has taken steps.

        Args:
            step: Steps of this command so far.
            now_s: The time.
            waited_s: Seconds that they waited for examples.
        """
        if step < WARM_UP_STEPS:
            return
        if self._before is not None:
            before, then_s, had_waited_s = self._before
            self.steps += step - before
            self.seconds += max(0.0, now_s - then_s - (waited_s - had_waited_s))
        self._before = step, now_s, waited_s

    def leave_out(self, seconds: float) -> None:
        """Exclude time that was not spent on training."""
        if self._before is not None:
            step, then_s, waited_s = self._before
            self._before = step, then_s + seconds, waited_s

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second; None if no step was measured."""
        return self.steps / self.seconds if self.steps and self.seconds else None


@final
class Pace:
    """Measure throughput since the last validation and over the whole run.

    Args:
        mfu_of_one: MFU at one example a second; None if unknown.
        notice: The reason why it is unknown, for the user.
    """

    def __init__(self, mfu_of_one: float | None = None, notice: str | None = None) -> None:
        self._mfu_of_one, self.notice = mfu_of_one, notice
        self._samples, self._before_samples = 0, 0
        self._began_s = self._before_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start the clock before the first step."""
        self._began_s = now_s

    def taken(self, samples: int) -> None:
        """Count trained examples."""
        self._samples += samples

    def leave_out(self, seconds: float) -> None:
        """Exclude time that was not spent on training."""
        self._began_s += seconds

    def rate(self, now_s: float) -> Rate:
        """Return the rate since the last validation."""
        return self._rate(self._samples, now_s - self._began_s)

    def reset(self, now_s: float) -> Rate:
        """Return the rate since the last validation and start a new period."""
        rate = self.rate(now_s)
        self._before_samples += self._samples
        self._before_s += now_s - self._began_s
        self._samples, self._began_s = 0, now_s
        return rate

    @property
    def whole(self) -> Rate | None:
        """Rate from the beginning to the last validation; None if no step was taken."""
        return self._rate(self._before_samples, self._before_s) if self._before_samples else None

    def _rate(self, samples: int, seconds: float) -> Rate:
        samples_per_s = samples / max(seconds, 1e-9)
        return Rate(
            samples_per_s=samples_per_s, mfu=None if self._mfu_of_one is None else self._mfu_of_one * samples_per_s
        )


def mfu_of_one(
    network: nn.Module,
    inputs_B: Tree,
    recipe: Recipe,
    world: World,
    *,
    call: Call = plain_call,
    varies: bool = False,
) -> tuple[float | None, str | None]:
    """Compute the MFU at one example a second.

    Args:
        network: The whole network, as it is trained.
        inputs_B: Some raw inputs: an array, or a tree of tensors.
        recipe: Its precision selects the peak.
        world: The processes; the peak is that of all their devices.
        call: Calls the network with the inputs.
        varies: The examples have different lengths.

    Returns:
        The MFU, or None if it is unknown, and on a GPU the reason.
    """
    if world.device.type != "cuda":
        return None, None
    name = torch.cuda.get_device_name(world.device)
    peak = peak_flops(name, recipe.precision)
    if peak is None:
        return None, f"No MFU: the peak of {name!r} in {recipe.precision} is not known."
    if varies:
        return None, "No MFU: the examples have different lengths, and so different numbers of operations."
    raw_B = torch.from_numpy(inputs_B) if isinstance(inputs_B, np.ndarray) else inputs_B
    try:
        counted = flops(network, raw_B, backward=True, call=call)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return None, f"No MFU: the network's arithmetic cannot be counted ({' '.join(str(error).split())[:200]})."
    return counted / len(leaves(raw_B)[0]) / (peak * world.size), None
