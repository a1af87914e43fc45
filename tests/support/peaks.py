"""A network whose scores are finished to a list of the largest: an application with a `finish`, for tests."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.finish import Finish
from penstock.core.spec import TensorSpec

# B batch, H height, W width, N peaks

SIDE, PEAKS, THRESHOLD = 6, 5, 0.5
_peaks = Dim("peaks", max=PEAKS, min=0)


class Heat(nn.Module):
    """A score and an offset at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 1, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([1.0, 0.5]).reshape(2, 1, 1, 1))

    def forward(self, picture: Tensor) -> dict[str, Tensor]:
        both_BHW = self.layer(picture[:, None])
        return {"heat": both_BHW[:, 0], "offset": both_BHW[:, 1]}


class Peaks(nn.Module):
    """The places with the largest scores, those above the threshold."""

    def forward(self, heat: Tensor, offset: Tensor) -> dict[str, Tensor]:
        score_BN, at_BN = heat.flatten(1).topk(PEAKS)
        count_B = (score_BN >= THRESHOLD).sum(1)
        y_BN, x_BN = at_BN // SIDE, at_BN % SIDE
        shift_BN = offset.flatten(1).gather(1, at_BN)
        place_BN2 = torch.stack([x_BN + shift_BN, y_BN + shift_BN], -1)
        return {"places": place_BN2, "scores": score_BN, "peaks": count_B}


def _declared(**changes: Any) -> Application:
    given: dict[str, Any] = {
        "name": "peaks",
        "input": TensorSpec(name="picture", dtype="float32", shape=(SIDE, SIDE), meaning="heights"),
        "outputs": {
            "places": TensorSpec(dtype="float32", shape=(_peaks, 2), meaning="x and y of each peak", units="pixels"),
            "scores": TensorSpec(dtype="float32", shape=(_peaks,), meaning="height of each peak"),
        },
        "model": ":Heat",
        "finish": Finish(
            module=":Peaks",
            inputs={
                "heat": TensorSpec(dtype="float32", shape=(SIDE, SIDE), meaning="score of each place"),
                "offset": TensorSpec(dtype="float32", shape=(SIDE, SIDE), meaning="offset of each place"),
            },
            score="scores",
            threshold=THRESHOLD,
        ),
    }
    return Application(**(given | changes))


declared = _declared
app = _declared()
