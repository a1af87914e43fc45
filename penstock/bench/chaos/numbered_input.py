"""The input of a request, made of its number, so that an answer shows which request it belongs to."""

# Below this a number is exact in float32.
_DIGITS = 1 << 12


def input_of(number: int) -> tuple[float, float, float, float]:
    """Return the four numbers of a request; no two requests of a run have the same."""
    return float(number % _DIGITS), float(number // _DIGITS % _DIGITS), float(number // _DIGITS**2), 1.0


def doubles_of(number: int) -> tuple[float, ...]:
    """Return what a right answer begins with."""
    return tuple(2 * value for value in input_of(number))
