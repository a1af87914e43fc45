"""The network of the default photographs; other declarations choose another width or network."""

from penstock.apps.images.app import LABELS
from penstock.models.calibrated import Calibrated
from penstock.models.mobile import MobileNet

WIDTH = 0.5


def network() -> Calibrated:
    """Make a network of about half a million parameters."""
    return Calibrated(MobileNet(len(LABELS), width=WIDTH))
