"""Counts in sentences."""


def counted(number: int, one: str, many: str = "") -> str:
    """Write a count with its noun, and with the verb that agrees with it: `1 file`, `2,000 files`, `0 files`.

    Args:
        number: The count.
        one: What stands behind a 1, such as `file` or `file is`.
        many: What stands behind other counts; by default `one` with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
