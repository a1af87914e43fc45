"""How fast a training is, and what share of its devices' arithmetic that is (MFU, as of the PaLM report, 2022)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from penstock.core.spec import Array
from penstock.models.flops import flops, peak_flops
from penstock.train.recipe import Recipe
from penstock.train.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How fast it was for a while.

    Args:
        samples_per_s: Examples a second, over all processes.
        mfu: The products of forward and backward pass over the peak of all devices, from 0 to 1; None where either is
            not known.
    """

    samples_per_s: float
    mfu: float | None

    def describe(self) -> str:
        """For people."""
        return f"{self.samples_per_s:,.0f} samples/s" + ("" if self.mfu is None else f"  MFU {self.mfu:.1%}")

    def fields(self) -> dict[str, float]:
        """By name, what is known."""
        known = {"samples_per_s": round(self.samples_per_s, 1)}
        return known if self.mfu is None else known | {"mfu": round(self.mfu, 4)}


@final
class Pace:
    """Counts examples and the time that they took: between validations, and over all.

    Args:
        mfu_of_one: The MFU of one example a second; None where it is not known.
    """

    def __init__(self, mfu_of_one: float | None = None) -> None:
        self._mfu_of_one = mfu_of_one
        self._samples, self._before_samples = 0, 0
        self._began_s = self._before_s = 0.0

    def begin(self, now_s: float) -> None:
        """The first step begins."""
        self._began_s = now_s

    def taken(self, samples: int) -> None:
        """So many examples were learned from."""
        self._samples += samples

    def leave_out(self, seconds: float) -> None:
        """So much time was spent on something else."""
        self._began_s += seconds

    def rate(self, now_s: float) -> Rate:
        """Since the last validation."""
        return self._rate(self._samples, now_s - self._began_s)

    def turn(self, now_s: float) -> Rate:
        """The rate up to a validation; from here on the next one is counted."""
        rate = self.rate(now_s)
        self._before_samples += self._samples
        self._before_s += now_s - self._began_s
        self._samples, self._began_s = 0, now_s
        return rate

    @property
    def whole(self) -> Rate | None:
        """Up to the last validation, from the beginning; None where no step was taken."""
        return self._rate(self._before_samples, self._before_s) if self._before_samples else None

    def _rate(self, samples: int, seconds: float) -> Rate:
        samples_per_s = samples / max(seconds, 1e-9)
        return Rate(
            samples_per_s=samples_per_s, mfu=None if self._mfu_of_one is None else self._mfu_of_one * samples_per_s
        )


def mfu_of_one(network: nn.Module, inputs_B: Array, recipe: Recipe, world: World) -> tuple[float | None, str | None]:
    """The MFU of one example a second.

    Args:
        network: Whole, as it is trained.
        inputs_B: Some raw inputs.
        recipe: Says the precision.
        world: The processes, of whose devices the peak is.

    Returns:
        It, or None where it is not known, and on a GPU why.
    """
    if world.device.type != "cuda":
        return None, None
    name = torch.cuda.get_device_name(world.device)
    peak = peak_flops(name, recipe.precision)
    if peak is None:
        return None, f"No MFU: the peak of {name!r} in {recipe.precision} is not known."
    try:
        counted = flops(network, torch.from_numpy(inputs_B), backward=True)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return None, f"No MFU: the network's arithmetic cannot be counted ({' '.join(str(error).split())[:200]})."
    return counted / len(inputs_B) / (peak * world.size), None


def pace_of(network: nn.Module, inputs_B: Array, recipe: Recipe, world: World) -> tuple[Pace, list[str]]:
    """The pace of a training to come, and what is to be said of it; see `mfu_of_one`."""
    of_one, why = mfu_of_one(network, inputs_B, recipe, world)
    return Pace(of_one), [] if why is None else [why]
