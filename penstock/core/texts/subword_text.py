"""Text by subword tokens: the declared form of a `decode` of text, and of a `reply` that gives text.

`device/web/subwords.js` makes the same tokens and texts; `tests/data/subwords.json` tests both.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast, final

import numpy as np

from penstock.core.beams import best_beam
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.core.subwords import Subwords, read_subwords
from penstock.core.texts.text import ByteText
from penstock.core.wording.json_fault import json_kind

_JSON = "application/json"
# The end has no text, so that it need not be known.
_NO_END = -1
_NUMBERS = {int, float}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SubwordText:
    """A `decode` of text: its subword tokens as one tensor, int64 `[tokens]`. Other inputs need defaults.

    It takes a text, and JSON with the text as `text`, or with the tokens, and maybe with other inputs, by name. An
    exported pack carries it with its vocabulary, so that its text box and `PackEngine` take text too.

    Args:
        tensor: The name of the input.
        vocabulary: The file that `penstock.core.subwords.Subwords.write` wrote.
        max_tokens: The largest number of tokens, that of the input's `Dim`.

    Raises:
        ApplicationError: No room for a token, no name, or no such file.
    """

    tensor: str
    vocabulary: Path
    max_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", _checked_file(type(self).__name__, self.tensor, self.vocabulary))
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ApplicationError(f"SubwordText has max_tokens={self.max_tokens!r}; give a whole number, at least 1.")

    def __call__(self, body: bytes, content_type: str) -> dict[str, Array]:
        """Decode a request's body.

        Raises:
            InvalidInput: No UTF-8, no text, no such JSON, JSON that is too deep, or more tokens than there is room for.
        """
        try:
            text = body.decode()
            if content_type == _JSON:
                return self._of_json(json.loads(text))
        except (RecursionError, ValueError) as error:
            raise InvalidInput(f"The body is not text in UTF-8, or not JSON ({error}).") from None
        return {self.tensor: self.of_text(text)}

    def of_text(self, text: str) -> Array:
        """The tokens of a text, int64 `[tokens]`.

        Raises:
            InvalidInput: No text, half of a surrogate pair, or more tokens than there is room for.
        """
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidInput("The text holds half of a surrogate pair; send whole characters.")
        tokens = self.subwords.encode(text)
        if not tokens:
            raise InvalidInput("The text is empty; send at least one word.")
        if len(tokens) > self.max_tokens:
            raise InvalidInput(f"The text has {len(tokens):,} tokens; send at most {self.max_tokens:,}. Split it.")
        return np.array(tokens, np.int64)

    @property
    def subwords(self) -> Subwords:
        """The vocabulary, read at its first use."""
        return read_subwords(self.vocabulary)

    @property
    def needs(self) -> str:
        """The inputs that it fills, for messages."""
        return f"one input, int64 of a Dim with max={self.max_tokens}, named {self.tensor!r}; others need a default"

    def fits(self, input: ChunkSpec | RawSpec) -> bool:
        """Check that an input is one tensor of so many tokens, and others that have defaults."""
        if not isinstance(input, RecordSpec) or self.tensor not in input.by_name:
            return False
        spec = input.by_name[self.tensor]
        others = (each for each in input.tensors if each is not spec)
        (size, *more) = spec.shape or (0,)
        is_own = isinstance(size, Dim) and int(size) == self.max_tokens and not more and spec.dtype == "int64"
        return is_own and all(each.default is not None for each in others)

    def _of_json(self, given: Any) -> dict[str, Array]:
        named = dict(cast(dict[str, Any], given)) if isinstance(given, dict) else {}
        text = named.pop("text", None) if self.tensor not in named else None
        if text is None and self.tensor in named:
            return {name: self._numbers(name, each) for name, each in named.items()}
        if not isinstance(text, str):
            raise InvalidInput('The JSON is not {"text": "..."}; send the text so, or as text/plain.')
        return {self.tensor: self.of_text(text), **{name: self._numbers(name, each) for name, each in named.items()}}

    def _numbers(self, name: str, given: Any) -> Array:
        """Make an array of numbers in JSON; the application's spec checks its dtype and shape."""
        level: list[Any] = [given]
        while (kinds := set(map(type, level))) == {list}:
            level = list(chain.from_iterable(level))
        wanted = f"a list of at most {self.max_tokens:,} whole numbers" if name == self.tensor else "numbers"
        # Not left to NumPy, which gives each entry the room of the longest string.
        taken = {bool} if kinds == {bool} and name != self.tensor else _NUMBERS
        if not kinds <= taken:
            found = ", ".join(sorted(map(json_kind, kinds - taken)))
            raise InvalidInput(f"{name} {'holds' if isinstance(given, list) else 'is'} {found}; send {wanted}.")
        try:
            array = np.asarray(given)
        except ValueError:
            raise InvalidInput(f"{name} has lists of different lengths; send {wanted}.") from None
        if array.dtype == np.object_:
            raise InvalidInput(f"{name} holds a number of more than 64 bits; send {wanted} in its range.")
        return array


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SubwordReply:
    """A `reply` with the text of tokens: `{"text": ...}`.

    Tokens without a text, such as the end, are left out. An exported pack carries it with its vocabulary.

    Args:
        tensor: The name of the output, a token of each step or a list of tokens; of a beam search, of each beam.
        vocabulary: The file that `penstock.core.subwords.Subwords.write` wrote.
        parent: Of a beam search, the name of the output with the beam before that each beam continues, see
            `penstock.nn.decoding.Beam`; the text is that of the best beam.

    Raises:
        ApplicationError: No name, or no such file.
    """

    tensor: str
    vocabulary: Path
    parent: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", _checked_file(type(self).__name__, self.tensor, self.vocabulary))

    def __call__(self, output: Any) -> dict[str, str]:
        """Make the reply of a whole answer, an array or arrays by name."""
        tokens = output[self.tensor] if isinstance(output, dict) else output
        if self.parent is not None:
            tokens = best_beam(tokens, output[self.parent], _NO_END)
        return {"text": self.subwords.decode(int(token) for token in tokens)}

    def parts(self, steps: Iterable[Any]) -> Iterator[str]:
        """Yield the text that each step adds, and the rest at the end; together they are the whole text.

        Of a beam search all of it comes at the end.

        Args:
            steps: The outputs of each step, an array or arrays by name.
        """
        if self.parent is None:
            tokens = (step[self.tensor] if isinstance(step, dict) else step for step in steps)
            yield from self.subwords.parts(int(token) for token in tokens)
            return
        taken: list[dict[str, Array]] = []
        for step in steps:
            taken.append(step)
            yield ""
        yield self({name: np.stack([step[name] for step in taken]) for name in (self.tensor, self.parent)})["text"]

    @property
    def subwords(self) -> Subwords:
        """The vocabulary, read at its first use."""
        return read_subwords(self.vocabulary)

    def fits(self, answer: ChunkSpec) -> bool:
        """Check that a whole answer has lists of whole numbers of these names."""
        specs = {spec.name: spec for spec in answer.tensors if spec.numpy_dtype.kind in "iu"}
        names = [self.tensor] if self.parent is None else [self.tensor, self.parent]
        shapes = {specs[name].shape if name in specs else () for name in names}
        return len(shapes) == 1 and len(shapes.pop()) == len(names)


def _checked_file(kind: str, tensor: str, vocabulary: Path | str) -> Path:
    if not isinstance(tensor, str) or not tensor:
        raise ApplicationError(f"{kind} has tensor={tensor!r}; give the name of the tensor.")
    file = Path(vocabulary)
    if not file.is_file():
        raise ApplicationError(
            f"{kind} has vocabulary={str(file)!r}, which is no file; name it by Path(__file__).with_name(...). "
            f"penstock.core.texts.learn_subwords.learn_subwords(texts, size).write(FILE) writes one."
        )
    return file


# Forms of a `decode` of text that packs carry.
DeclaredText = ByteText | SubwordText
DECLARED_TEXT = (ByteText, SubwordText)
