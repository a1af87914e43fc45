"""Parameters with which a test takes long compared with what they add."""

from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Values of one case of `pytest.mark.parametrize` that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.thorough)
