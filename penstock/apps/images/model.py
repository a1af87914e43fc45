"""The network of the default photographs; a declaration of your own names another width, or another network."""

from penstock.apps.images.photographs import LABELS
from penstock.models.calibrated import Calibrated
from penstock.models.mobile import MobileNet

WIDTH = 0.5


def network() -> Calibrated:
    """About half a million parameters."""
    return Calibrated(MobileNet(len(LABELS), width=WIDTH))
