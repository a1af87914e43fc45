"""The number of examples that Hypothesis generates for a test: fewer in `make test` than in `make test-all`."""

from hypothesis import settings

FEW = 100
# `pytest --hypothesis-profile=full`
FULL = "full"


def examples(full: int) -> int:
    """The number for this run.

    Args:
        full: In `make test-all`; in `make test` at most `FEW`.
    """
    return full if settings.get_current_profile_name() == FULL else min(full, FEW)
