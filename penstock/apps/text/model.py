"""The network of the text application."""

from penstock.apps.text.app import LABELS
from penstock.models.byte_classifier import TextClassifier


def network() -> TextClassifier:
    """The bytes of a text to scores of its language."""
    return TextClassifier(len(LABELS))
