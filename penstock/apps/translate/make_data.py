"""Make the training data from Debian packages: `python -m penstock.apps.translate.make_data PACKAGES FOLDER`.

PACKAGES is a folder of .deb files, see README.md for the commands that download them. FOLDER gets `pairs.npz`, the
tokens of all pairs; `prompts.tsv`, the test set; and `sources.json`, the number of pairs by source.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from penstock.apps.translate.corpus.apertium import backward_pairs, forward_pairs
from penstock.apps.translate.corpus.catalogues import catalogue_pairs
from penstock.apps.translate.corpus.held_out import forbidden_texts, prompt_pairs
from penstock.apps.translate.corpus.help_pages import help_pairs
from penstock.apps.translate.corpus.pairs import Pair, distinct, is_good, normal, without
from penstock.apps.translate.corpus.phrases import phrase_pairs
from penstock.apps.translate.corpus.sentences import fortunes, manual_pages, wordnet_examples
from penstock.apps.translate.tokenizer import SYNTHETIC, VOCABULARY
from penstock.core.errors import PenstockError, TrainError
from penstock.core.subwords import Subwords
from penstock.core.texts.learn_subwords import learn_subwords

VOCABULARY_SIZE = 8_000
PHRASES = 40_000
# Pairs of two sentences, so that texts of several sentences are known too.
JOINED = 40_000
VALIDATION = 3_000
MAX_TOKENS = 120
SEED = 0
_EXCLUDED = "asterisk"


def made_by_people(packages: Path) -> Iterator[Pair]:
    """Pairs that people translated: help pages, and message catalogues."""
    yield from help_pairs(_package(packages, "libreoffice-help-en-us"), _package(packages, "libreoffice-help-es"))
    files = sorted(file for file in packages.glob("*.deb") if _EXCLUDED not in file.name)
    with ThreadPoolExecutor(2) as pool:
        for pairs in pool.map(lambda file: list(catalogue_pairs(file)), files):
            yield from pairs


def made_by_apertium(packages: Path) -> Iterator[Pair]:
    """Sentences of one language, translated by Apertium into the other."""
    yield from forward_pairs(list(dict.fromkeys(wordnet_examples(_package(packages, "wordnet-base")))))
    spanish = [*fortunes(_package(packages, "fortunes-es")), *manual_pages(_package(packages, "manpages-es"))]
    yield from backward_pairs(list(dict.fromkeys(spanish)))


def make(packages: Path, folder: Path, *, new_vocabulary: bool, phrases: int = PHRASES) -> None:
    """Write the data.

    Args:
        packages: The folder of .deb files.
        folder: Where to write.
        new_vocabulary: Learn the application's vocabulary anew; earlier bundles do not fit it.
        phrases: Number of sentences made by the grammar.
    """
    prompts = [_package(packages, f"asterisk-core-sounds-{language}") for language in ("en", "es")]
    forbidden = forbidden_texts(*prompts)
    people = list(distinct(without(filter(is_good, made_by_people(packages)), forbidden)))
    print(f"{len(people):,} pairs by people", flush=True)
    others = [*filter(is_good, made_by_apertium(packages)), *phrase_pairs(phrases, SEED)]
    print(f"{len(others):,} pairs by Apertium and by the grammar", flush=True)
    others = list(distinct(without(others, forbidden)))
    rng = random.Random(SEED)
    rng.shuffle(people)
    # The same English text is never in both sets.
    chosen = {normal(pair.english) for pair in people[:VALIDATION]}
    validation = people[:VALIDATION]
    train = [pair for pair in (*people[VALIDATION:], *others) if normal(pair.english) not in chosen]
    train += without(_joined(people[VALIDATION:], rng), forbidden)
    rng.shuffle(train)
    trained = {normal(text) for pair in train for text in pair[:2]}
    assert not trained & forbidden, sorted(trained & forbidden)[:3]
    if new_vocabulary:
        VOCABULARY.parent.mkdir(exist_ok=True)
        learn_subwords((text for pair in people for text in pair[:2]), VOCABULARY_SIZE).write(VOCABULARY)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Subwords.read(VOCABULARY)
    print(f"{len(tokenizer):,} tokens in the vocabulary", flush=True)
    arrays = encoded(train, tokenizer, "train") | encoded(validation, tokenizer, "validation")
    np.savez_compressed(folder / "pairs.npz", **arrays)  # type: ignore[arg-type]
    lines = [f"{pair.english}\t{pair.spanish}\n" for pair in prompt_pairs(prompts[0], prompts[1])]
    (folder / "prompts.tsv").write_text("".join(lines))
    # Catalogues by the thousand are one source.
    kinds = Counter("catalogues" if pair.source.endswith(".mo") else pair.source for pair in train)
    (folder / "sources.json").write_text(json.dumps(kinds, indent=2) + "\n")
    print(f"{dict(kinds)}; {len(lines)} prompts; {(folder / 'pairs.npz').stat().st_size:,} bytes")


def encoded(pairs: Iterable[Pair], tokenizer: Subwords, name: str) -> dict[str, np.ndarray]:
    """Tokens of pairs, one behind the other, as uint16, and their numbers."""
    sides: list[list[int]] = [[], []]
    lengths: list[list[int]] = [[], []]
    for pair in pairs:
        source, target = tokenizer.encode(pair.english), tokenizer.encode(pair.spanish)
        if pair.source == "apertium":
            # A token in front, so that these translations are learned as another style: Caswell et al. 2019, "Tagged
            # Back-Translation".
            source = [SYNTHETIC, *source]
        if 0 < len(source) <= MAX_TOKENS and 0 < len(target) <= MAX_TOKENS:
            for side, tokens, into in zip(sides, (source, target), lengths, strict=True):
                side += tokens
                into.append(len(tokens))
    made: dict[str, np.ndarray] = {}
    for kind, side, count in zip(("source", "target"), sides, lengths, strict=True):
        made |= {f"{name}_{kind}": np.array(side, np.uint16), f"{name}_{kind}_lengths": np.array(count, np.uint16)}
    return made


def _joined(pairs: list[Pair], rng: random.Random) -> Iterator[Pair]:
    whole = [
        pair for pair in pairs if pair.english.endswith(".") and pair.spanish.endswith(".") and len(pair.english) < 120
    ]
    for _ in range(min(JOINED, len(whole))):
        one, other = rng.choice(whole), rng.choice(whole)
        yield Pair(f"{one.english} {other.english}", f"{one.spanish} {other.spanish}", "two of people")


def _package(folder: Path, name: str) -> Path:
    files = sorted(folder.glob(f"{name}_*.deb"))
    if not files:
        raise TrainError(f"{folder} has no package {name}; run 'apt-get download {name}' there.")
    return files[-1]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="folder of .deb files")
    parser.add_argument("folder", type=Path, help="where to write the data")
    parser.add_argument("--new-vocabulary", action="store_true", help="learn the vocabulary anew")
    parser.add_argument("--phrases", type=int, default=PHRASES, help="sentences made by the grammar")
    given = parser.parse_args()
    try:
        make(given.packages, given.folder, new_vocabulary=given.new_vocabulary, phrases=given.phrases)
    except PenstockError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
