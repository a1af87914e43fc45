"""Learn a vocabulary of byte-pair encoding from texts."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from penstock.core.errors import ApplicationError
from penstock.core.subwords import BYTES, SPECIAL, Subwords, pieces


def learn_subwords(
    texts: Iterable[str], size: int, *, special: int = SPECIAL, min_characters: int = 50, min_pieces: int = 3
) -> Subwords:
    """Join the most frequent pair of neighbours again and again.

    Args:
        texts: The texts, in all languages.
        size: Number of tokens in the end, or fewer where the texts have no more pairs.
        special: Number of tokens without a text, for padding, the beginning and the end of an answer.
        min_characters: Characters that occur less often are written as bytes.
        min_pieces: Pieces, about words, that occur less often do not count.

    Raises:
        ApplicationError: The size leaves no room for the characters.
    """
    counts = Counter(piece for text in texts for piece in pieces(text))
    letters: Counter[str] = Counter()
    for piece, count in counts.items():
        for character in piece:
            letters[character] += count
    characters = sorted(character for character, count in letters.items() if count >= min_characters)
    wanted = size - special - BYTES - len(characters)
    if wanted < 0:
        raise ApplicationError(
            f"a vocabulary of {size:,} tokens has no room for {special + BYTES:,} special tokens and bytes and "
            f"{len(characters):,} characters; give a larger size."
        )
    known = set(characters)
    words = [(list(piece), count) for piece, count in counts.items() if count >= min_pieces and known.issuperset(piece)]
    return Subwords(characters, _merges(words, wanted), special)


def _merges(words: list[tuple[list[str], int]], wanted: int) -> list[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for place, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            counts[pair] += count
            places[pair].add(place)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    while heap and len(merges) < wanted:
        count, pair = heapq.heappop(heap)
        if counts[pair] != -count:
            # An entry of before the pair's count changed; a newer one is in the heap.
            continue
        merges.append(pair)
        changed: set[tuple[str, str]] = set()
        for place in places.pop(pair):
            parts, times = words[place]
            for old in pairwise(parts):
                counts[old] -= times
                changed.add(old)
            _join(parts, pair)
            for new in pairwise(parts):
                counts[new] += times
                places[new].add(place)
                changed.add(new)
        for each in changed:
            if counts[each] > 0:
                heapq.heappush(heap, (-counts[each], each))
    return merges


def _join(parts: list[str], pair: tuple[str, str]) -> None:
    place = 0
    while place < len(parts) - 1:
        if (parts[place], parts[place + 1]) == pair:
            parts[place : place + 2] = ["".join(pair)]
        place += 1
