"""Text files with two columns, which the templates of applications take."""

from pathlib import Path

from penstock.core.errors import ApplicationError


def read_tab_lines(data: Path, row: str, columns: tuple[str, str], expected: str) -> list[tuple[str, str]]:
    """Read lines of two columns with a tab between them; empty lines are left out.

    Args:
        data: The file, in UTF-8.
        row: The name of a line in errors.
        columns: The names of the columns.
        expected: What a line must be.

    Raises:
        ApplicationError: The file cannot be read, or a line lacks a column.
    """
    try:
        lines = [line for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ApplicationError(
            f"{data} is no text that can be read ({reason}); give lines of {columns[0]}, tab, {columns[1]}."
        ) from None
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        first, tab, second = line.partition("\t")
        if not tab or not first.strip() or not second.strip():
            raise ApplicationError(f"{data} has {line[:60]!r} as {row} {number:,}; write {expected}.")
        rows.append((first, second))
    return rows
