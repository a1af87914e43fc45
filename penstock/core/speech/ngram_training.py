"""Train an n-gram language model on texts: interpolated Kneser-Ney, written in backoff form.

Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 4.1.6, with one
discount for each order.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.core.errors import ApplicationError
from penstock.core.speech.ngram import END, MAX_NGRAMS, MAX_ORDER, START, UNKNOWN, NGram, Unit, ngram_of

Ids = tuple[int, ...]
# Where an order has too few counts to estimate its discount.
USUAL_DISCOUNT = 0.5
# Log-probability of `<s>`, which nothing predicts: as ARPA files write it.
NEVER = -99 * math.log(10)


def train_ngram(texts: Iterable[str], order: int = 3, unit: Unit = "words", alphabet: Sequence[str] = ()) -> NGram:
    """Train a language model.

    Args:
        texts: One utterance each, of words separated by spaces, as the recogniser writes them.
        order: Length of the longest n-grams.
        unit: Whether it predicts words or characters.
        alphabet: Tokens that have a probability though no text has them.

    Raises:
        ApplicationError: There is no text, or too much of it for a model within bounds.
    """
    if not 1 <= order <= MAX_ORDER:
        raise ApplicationError(f"order is {order}; it must be from 1 to {MAX_ORDER}.")
    ids: dict[str, int] = {token: index for index, token in enumerate((START, END, UNKNOWN))}
    for token in alphabet:
        ids.setdefault(token, len(ids))
    raw = [Counter[Ids]() for _ in range(order)]
    for text in texts:
        tokens = text.split() if unit == "words" else list(" ".join(text.split()))
        if tokens:
            _count(raw, [ids.setdefault(token, len(ids)) for token in tokens])
            if sum(map(len, raw)) > MAX_NGRAMS:
                raise ApplicationError(
                    f"the texts have more than {MAX_NGRAMS:,} n-grams up to order {order}; lower the order, or give "
                    f"fewer texts."
                )
    if not raw[0]:
        raise ApplicationError("there is no text to train a language model on.")
    return ngram_of(unit, tuple(ids), _kneser_ney(raw, len(ids)))


def _count(raw: list[Counter[Ids]], tokens: list[int]) -> None:
    padded = [0, *tokens, 1]
    for size, counts in enumerate(raw, 1):
        for begin in range(len(padded) - size + 1):
            ids = tuple(padded[begin : begin + size])
            # `<s>` is predicted by nothing.
            if ids != (0,):
                counts[ids] += 1


def _kneser_ney(raw: list[Counter[Ids]], vocabulary: int) -> list[dict[Ids, tuple[float, float]]]:
    orders: list[dict[Ids, tuple[float, float]]] = []
    # Of each n-gram, its probability; of each context, the weight of shorter ones.
    shorter: dict[Ids, float] = {}
    weights: dict[Ids, float] = {}
    for size in range(1, len(raw) + 1):
        counts = raw[-1] if size == len(raw) else _continuations(raw[size - 1], raw[size])
        discount = _discount(counts)
        totals, kinds = Counter[Ids](), Counter[Ids]()
        for ids, count in counts.items():
            totals[ids[:-1]] += count
            kinds[ids[:-1]] += 1
        weights |= {context: discount * kinds[context] / total for context, total in totals.items()}
        found: dict[Ids, float] = {}
        for ids, count in counts.items():
            context = ids[:-1]
            # Shorter than one token: all are as likely, but `<s>`.
            below = shorter[ids[1:]] if size > 1 else 1 / (vocabulary - 1)
            found[ids] = max(count - discount, 0) / totals[context] + weights[context] * below
        if size == 1:
            for token in range(1, vocabulary):
                found.setdefault((token,), weights[()] / (vocabulary - 1))
        orders.append({ids: (math.log(value), 0.0) for ids, value in found.items()})
        shorter = found
    orders[0][(0,)] = (NEVER, 0.0)
    # The backoff of an n-gram is the weight of shorter contexts after it.
    for each in orders[:-1]:
        for ids, (log_probability, _) in each.items():
            each[ids] = (log_probability, math.log(weights[ids]) if ids in weights else 0.0)
    return orders


def _continuations(counts: Counter[Ids], longer: Counter[Ids]) -> Counter[Ids]:
    """Number of tokens that n-grams were seen after; of those at the beginning of a text, their own counts."""
    found: Counter[Ids] = Counter(ids[1:] for ids in longer)
    return Counter({ids: counts[ids] if ids[0] == 0 else found[ids] for ids in counts})


def _discount(counts: Counter[Ids]) -> float:
    once = sum(count == 1 for count in counts.values())
    twice = sum(count == 2 for count in counts.values())
    return once / (once + 2 * twice) if once and twice else USUAL_DISCOUNT
