"""The network's weights in a checkpoint of a run, whole, as a bundle holds them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import checkpoint_places, read_checkpoint
from penstock.train.checkpoint.lazy_tensors import read_tensors


def checkpoint_weights(run: Path, step: int | None = None) -> tuple[dict[str, Tensor], int]:
    """Read the weights of a checkpoint; with an EMA in the recipe these are the averages, as validations use them.

    Args:
        run: The folder of a run.
        step: Step of the checkpoint; the newest by default.

    Returns:
        The network's state dict, and the step.

    Raises:
        TrainError: There is no such checkpoint, or it is damaged.
    """
    places = {int(place.name.removeprefix("step-")): place for place in checkpoint_places(run / "checkpoints")}
    if not places:
        raise TrainError(f"{run} has no checkpoint; a run writes them while it trains.")
    step = max(places) if step is None else step
    if step not in places:
        raise TrainError(f"{run} has no checkpoint of step {step:,}, only of {', '.join(map(str, sorted(places)))}.")
    state: dict[str, Any] = read_checkpoint(places[step]).state
    weights: dict[str, Tensor] = read_tensors(state["model"])
    ema = state.get("ema")
    return weights | ({} if ema is None else read_tensors(ema["mean"])), step
