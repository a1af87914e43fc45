"""An n-gram language model of words or characters, in the backoff form of ARPA files, and its safetensors file.

The file holds arrays alone: the tokens, and for each order `n` the n-grams `ids.n`, `log_probability.n` and
`backoff.n`. It is read in a process of its own, and nothing in it is code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from penstock.core.errors import ApplicationError
from penstock.core.spec import Array

# G n-grams of one order, N its order

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
# Most n-grams of all orders together, and the longest file of one model.
MAX_NGRAMS = 1_000_000
MAX_FILE_BYTES = 64 << 20
MAX_ORDER = 10
# Longest token, in characters.
MAX_TOKEN = 100

Unit: TypeAlias = Literal["words", "characters"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class NGramOrder:
    """The n-grams of one order.

    Args:
        ids_GN: int32 `[G, N]`, indices of their tokens.
        log_probability_G: float32 `[G]`, natural logarithm of the probability of the last token after the others.
        backoff_G: float32 `[G]`, natural logarithm of the weight of shorter n-grams after this one.
    """

    ids_GN: Array
    log_probability_G: Array
    backoff_G: Array


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NGram:
    """An n-gram language model.

    Args:
        unit: Whether a token is a word or a character; of characters, the space is one.
        tokens: All tokens, with `<s>`, `</s>` and `<unk>` where the model has them.
        orders: Its n-grams, from order 1.

    Raises:
        ApplicationError: The n-grams do not fit together, or there are too many.
    """

    unit: Unit
    tokens: tuple[str, ...]
    orders: tuple[NGramOrder, ...]

    def __post_init__(self) -> None:
        count = sum(len(order.ids_GN) for order in self.orders)
        if count > MAX_NGRAMS:
            raise ApplicationError(
                f"the language model has {count:,} n-grams; at most {MAX_NGRAMS:,} are taken. Prune it, or lower its "
                f"order."
            )
        if wrong := self._wrong():
            raise ApplicationError(f"the language model cannot be used: {wrong}.")

    def _wrong(self) -> str:
        if self.unit not in ("words", "characters"):
            return f"its unit is {self.unit!r}, not 'words' or 'characters'"
        if not 1 <= len(self.orders) <= MAX_ORDER:
            return f"it has {len(self.orders)} orders, not 1 to {MAX_ORDER}"
        if len(set(self.tokens)) != len(self.tokens) or not all(0 < len(each) <= MAX_TOKEN for each in self.tokens):
            return f"a token is empty, longer than {MAX_TOKEN} characters, or there twice"
        longer = [each for each in self.tokens if len(each) > 1 and each not in (START, END, UNKNOWN)]
        if self.unit == "characters" and longer:
            return f"the token {longer[0]!r} is no character"
        for size, order in enumerate(self.orders, 1):
            if wrong := self._wrong_order(size, order):
                return wrong
        return ""

    def _wrong_order(self, size: int, order: NGramOrder) -> str:
        ids_GN, count = order.ids_GN, len(order.ids_GN)
        of_order = (order.log_probability_G, order.backoff_G)
        if ids_GN.shape != (count, size) or any(each.shape != (count,) for each in of_order):
            return f"its {size}-grams have arrays of other shapes"
        if count and not (int(ids_GN.min()) >= 0 and int(ids_GN.max()) < len(self.tokens)):
            return f"a {size}-gram has a token that is not in the vocabulary"
        if not all(np.isfinite(each).all() for each in of_order) or (order.log_probability_G > 1e-3).any():
            return f"a {size}-gram has a probability above 1, or a number that is none"
        if len(np.unique(ids_GN, axis=0)) != count:
            return f"a {size}-gram is there twice"
        if size == 1 and count != len(self.tokens):
            return f"{count:,} of {len(self.tokens):,} tokens are 1-grams; each must be"
        return ""

    def to_bytes(self) -> bytes:
        """Write the model as a safetensors file.

        Raises:
            ApplicationError: It is too large.
        """
        # Imported here: a declaration needs NumPy alone.
        from safetensors.numpy import save as save_tensors

        text = np.frombuffer("\n".join((self.unit, *self.tokens)).encode(), np.uint8)
        arrays: dict[str, Array] = {"tokens": text}
        for size, order in enumerate(self.orders, 1):
            arrays[f"ids.{size}"] = np.ascontiguousarray(order.ids_GN, np.int32)
            arrays[f"log_probability.{size}"] = np.ascontiguousarray(order.log_probability_G, np.float32)
            arrays[f"backoff.{size}"] = np.ascontiguousarray(order.backoff_G, np.float32)
        data = save_tensors(arrays)
        if len(data) > MAX_FILE_BYTES:
            raise ApplicationError(
                f"the language model takes {len(data):,} bytes; at most {MAX_FILE_BYTES:,} are stored. Prune it."
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "NGram":
        """Read what `to_bytes` wrote.

        Raises:
            ApplicationError: It is no language model.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load as load_tensors

        try:
            arrays: dict[str, Array] = load_tensors(data)
            unit, *tokens = arrays.pop("tokens").tobytes().decode().split("\n")
            orders = [
                NGramOrder(*(arrays[f"{name}.{size}"] for name in ("ids", "log_probability", "backoff")))
                for size in range(1, len(arrays) // 3 + 1)
            ]
            return cls(unit=unit, tokens=tuple(tokens), orders=tuple(orders))  # pyright: ignore[reportArgumentType]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ApplicationError(f"the file of the language model cannot be read ({error}).") from None


def ngram_of(
    unit: Unit,
    tokens: Sequence[str],
    orders: Iterable[Mapping[tuple[int, ...], tuple[float, float]]],
) -> NGram:
    """Make a model of the log-probability and the backoff of each n-gram, by order.

    Raises:
        ApplicationError: They do not fit together, or there are too many.
    """
    made: list[NGramOrder] = []
    for size, given in enumerate(orders, 1):
        values = np.array(list(given.values()), np.float32).reshape(-1, 2)
        ids_GN = np.array(list(given), np.int32).reshape(-1, size)
        made.append(NGramOrder(ids_GN, values[:, 0].copy(), values[:, 1].copy()))
    return NGram(unit=unit, tokens=tuple(tokens), orders=tuple(made))


@final
class NGramScorer:
    """Scores token after token: each state is what the model remembers of those before.

    Args:
        model: The model.

    Attributes:
        start: The state at the beginning of a text.
        ids: Index of each token.

    Raises:
        ApplicationError: An n-gram is there without its beginning.
    """

    def __init__(self, model: NGram) -> None:
        self.ids = {token: index for index, token in enumerate(model.tokens)}
        self._size = len(model.tokens)
        # Nodes of a trie; the empty n-gram is node 0. A child's key is its parent's number and its token in one.
        self._children: dict[int, int] = {}
        self._log_probability, self._backoff, self._suffix = [0.0], [0.0], [0]
        for size, order in enumerate(model.orders, 1):
            self._add(size, order, longest=size == len(model.orders))
        # Of tokens outside the vocabulary, where the model does not say it: as of its rarest token.
        known = order_1(model)
        rarest = min((value for token, value in known.items() if token not in (START, END)), default=-20.0)
        self._unknown = self.ids.get(UNKNOWN)
        self._unknown_log_probability = rarest
        start = self.ids.get(START)
        self.start = 0 if start is None else self._children.get(start, 0)

    def score(self, state: int, token: int | None) -> tuple[float, int]:
        """Return the log-probability of a token, and the state after it.

        Args:
            state: The state before it.
            token: Its index; None for one that is not in the vocabulary.
        """
        if token is None:
            if self._unknown is None:
                return self._unknown_log_probability, 0
            token = self._unknown
        backoff = 0.0
        while True:
            child = self._children.get(state * self._size + token)
            if child is not None:
                after = child if child < self._longest_from else self._suffix[child]
                return backoff + self._log_probability[child], after
            backoff += self._backoff[state]
            state = self._suffix[state]

    def _add(self, size: int, order: NGramOrder, *, longest: bool) -> None:
        # Nodes of the longest n-grams have no children, and their states are those of their suffixes.
        self._longest_from = len(self._suffix) if longest and size > 1 else 1 << 62
        children, width = self._children, self._size
        columns = order.ids_GN.tolist(), order.log_probability_G.tolist(), order.backoff_G.tolist()
        for ids, log_probability, backoff in zip(*columns, strict=True):
            parent = self._node(ids[:-1])
            if parent is None:
                raise ApplicationError(
                    f"the language model has a {size}-gram without the {size - 1}-gram that it begins with."
                )
            children[parent * width + ids[-1]] = len(self._suffix)
            suffix = None
            for begin in range(1, size + 1):
                suffix = self._node(ids[begin:])
                if suffix is not None:
                    break
            self._suffix.append(suffix or 0)
            self._log_probability.append(log_probability)
            self._backoff.append(backoff)

    def _node(self, ids: Sequence[int]) -> int | None:
        node = 0
        for token in ids:
            found = self._children.get(node * self._size + token)
            if found is None:
                return None
            node = found
        return node


def order_1(model: NGram) -> dict[str, float]:
    """Return the log-probability of each token alone."""
    order = model.orders[0]
    return {
        model.tokens[ids[0]]: value
        for ids, value in zip(order.ids_GN.tolist(), order.log_probability_G.tolist(), strict=True)
    }
