"""Language models in ARPA files, as SRILM, KenLM and others write them."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import ApplicationError
from penstock.core.speech.ngram import MAX_FILE_BYTES, MAX_NGRAMS, MAX_ORDER, NGram, Unit, ngram_of

# Texts are larger than the arrays made of them.
MAX_ARPA_BYTES = 4 * MAX_FILE_BYTES
# What SRILM writes for a probability of 0.
LOWEST = -99.0


def read_arpa(file: str | Path, unit: Unit = "words") -> NGram:
    """Read a language model from an ARPA file, which may be compressed by gzip.

    Args:
        file: Its path.
        unit: Whether its tokens are words or characters. Of characters, the space is written `<space>` or `|`.

    Raises:
        ApplicationError: It cannot be read, is no ARPA file, or is too large.
    """
    path = Path(file)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as opened:
            data = opened.read(MAX_ARPA_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ApplicationError(f"the ARPA file {path} cannot be read ({error}).") from None
    if len(data) > MAX_ARPA_BYTES:
        raise ApplicationError(f"the ARPA file {path} has more than {MAX_ARPA_BYTES:,} bytes; prune it.")
    try:
        return parse_arpa(data.decode(), unit)
    except UnicodeDecodeError:
        raise ApplicationError(f"the ARPA file {path} is not UTF-8.") from None
    except ApplicationError as error:
        raise ApplicationError(f"the ARPA file {path} is broken: {error}") from None


def parse_arpa(text: str, unit: Unit = "words") -> NGram:
    """Read a language model from the text of an ARPA file.

    Raises:
        ApplicationError: It is none, with the number of the line.
    """
    # Not `splitlines`, which cuts at more than line ends.
    lines = iter(enumerate((line.strip() for line in text.split("\n")), 1))
    counts = _counts(lines)
    ids: dict[str, int] = {}
    orders: list[dict[tuple[int, ...], tuple[float, float]]] = []
    for size, count in enumerate(counts, 1):
        orders.append(_section(lines, size, count, ids, unit, last=size == len(counts)))
    return ngram_of(unit, tuple(ids), orders)


def _counts(lines: Iterator[tuple[int, str]]) -> list[int]:
    counts: list[int] = []
    begun = False
    for number, line in lines:
        if not begun:
            begun = line == "\\data\\"
        elif line.startswith("ngram "):
            size, _, count = line.removeprefix("ngram ").partition("=")
            if size.strip() != str(len(counts) + 1) or not count.strip().isdecimal():
                raise ApplicationError(f"line {number} is {line[:40]!r}; orders are counted from 1, as 'ngram 1=120'.")
            counts.append(int(count))
        elif line == "\\1-grams:":
            break
        elif line:
            raise ApplicationError(f"line {number} is {line[:40]!r}; expected a count or '\\1-grams:'.")
    if not begun:
        raise ApplicationError("it has no line '\\data\\'.")
    if not 1 <= len(counts) <= MAX_ORDER:
        raise ApplicationError(f"it has {len(counts)} orders; 1 to {MAX_ORDER} are read.")
    if sum(counts) > MAX_NGRAMS:
        raise ApplicationError(f"it has {sum(counts):,} n-grams; at most {MAX_NGRAMS:,} are taken, so prune it.")
    return counts


def _section(
    lines: Iterator[tuple[int, str]], size: int, count: int, ids: dict[str, int], unit: Unit, *, last: bool
) -> dict[tuple[int, ...], tuple[float, float]]:
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    for number, line in lines:
        if not line:
            continue
        if line.startswith("\\"):
            if line != ("\\end\\" if last else f"\\{size + 1}-grams:"):
                raise ApplicationError(f"line {number} is {line[:40]!r}, where the {size}-grams end.")
            if len(found) != count:
                raise ApplicationError(f"it has {len(found):,} {size}-grams; its head says {count:,}.")
            return found
        fields = line.split()
        if len(fields) not in (size + 1, size + 2):
            raise ApplicationError(f"line {number} has {len(fields)} fields; a {size}-gram has {size + 1} or one more.")
        tokens = tuple(_token(token, unit) for token in fields[1 : size + 1])
        if size == 1:
            ids.setdefault(tokens[0], len(ids))
        if unknown := [token for token in tokens if token not in ids]:
            raise ApplicationError(f"line {number} has {unknown[0][:40]!r}, which is no 1-gram.")
        key = tuple(ids[token] for token in tokens)
        if key in found:
            raise ApplicationError(f"line {number} has an n-gram that is there twice.")
        found[key] = (_number(fields[0], number), _number(fields[-1], number) if len(fields) == size + 2 else 0.0)
        if found[key][0] > 0:
            raise ApplicationError(f"line {number} has the logarithm {fields[0]}; a probability is at most 1.")
        if len(found) > count:
            raise ApplicationError(f"line {number}: there are more {size}-grams than the {count:,} of its head.")
    raise ApplicationError(f"it ends within its {size}-grams.")


def _token(token: str, unit: Unit) -> str:
    return " " if unit == "characters" and token in ("<space>", "|") else token


def _number(text: str, line: int) -> float:
    """The natural logarithm of a number whose decimal one is written."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # A probability of 0 may be written as minus infinity.
    value = max(value, LOWEST) if value == value else value
    if not math.isfinite(value):
        raise ApplicationError(f"line {line} has {text[:40]!r} where a logarithm belongs.")
    return value * math.log(10)
