"""Translate a test set with a trained bundle: `python -m penstock.apps.translate.evaluate BUNDLE PROMPTS.tsv OUT`.

PROMPTS.tsv has an English and a Spanish text in each line. OUT gets the greedy translations and those of beam search.
Their chrF (Popovic 2015) and BLEU (Papineni et al. 2002) are printed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.apps.translate.corpus.apertium import translated
from penstock.apps.translate.model import translator, with_beams
from penstock.apps.translate.tokenizer import tokenizer
from penstock.apps.translate.translation import translate
from penstock.core.errors import PenstockError, TrainError


def scores(made: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ChrF and BLEU of translations, as sacrebleu computes them by default.

    Raises:
        TrainError: sacrebleu is not installed.
    """
    try:
        import sacrebleu  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise TrainError("sacrebleu, which computes chrF and BLEU, is missing; run 'pip install sacrebleu'.") from None

    return {
        "chrF": sacrebleu.corpus_chrf(list(made), [list(references)]).score,
        "BLEU": sacrebleu.corpus_bleu(list(made), [list(references)]).score,
    }


def read_prompts(file: Path) -> list[tuple[str, str]]:
    """Return the English and the Spanish text of each line.

    Raises:
        TrainError: There is no such file, or a line has not two texts.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise TrainError(
            f"{file} cannot be read ({error}); 'python -m penstock.apps.translate.make_data' writes it."
        ) from None
    pairs = [line.split("\t") for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise TrainError(
                f"{file}:{number} has {len(pair)} texts; give an English and a Spanish one with a tab between."
            )
    if not pairs:
        raise TrainError(f"{file} has no line; 'python -m penstock.apps.translate.make_data' writes it.")
    return [(english, spanish) for english, spanish in pairs]


def evaluate(weights: Path, prompts: Path, out: Path, *, apertium: bool) -> dict[str, dict[str, float]]:
    """Translate the test set in each way and write the translations.

    Args:
        weights: `weights.safetensors` of a bundle.
        prompts: The test set.
        out: The folder of the translations.
        apertium: Translate with Apertium too.

    Returns:
        The scores by the way of translating.

    Raises:
        TrainError: The prompts are not readable, Apertium is missing, or sacrebleu is; all translations are written
            before this is said of sacrebleu.
    """
    pairs = read_prompts(prompts)
    english, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    network = translator()
    network.load_state_dict(load_file(weights))
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    made: dict[str, list[str]] = {}
    for name, each in (("greedy", network), ("beam", with_beams(network))):
        began_s = time.perf_counter()
        made[name] = translate(each, english, tokenizer())
        print(f"{name}: {len(english)} texts in {time.perf_counter() - began_s:.1f} s", flush=True)
    if apertium:
        made["apertium"] = translated(english, "eng-spa")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    for name, texts in made.items():
        (out / f"{name}.txt").write_text("\n".join(texts) + "\n")
    for name, texts in made.items():
        found[name] = scores(texts, references)
        print(f"{name}: " + ", ".join(f"{metric} {value:.1f}" for metric, value in found[name].items()))
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="the bundle of a training")
    parser.add_argument("prompts", type=Path, help="prompts.tsv, which make_data writes")
    parser.add_argument("out", type=Path, help="folder of the translations")
    parser.add_argument("--apertium", action="store_true", help="translate with Apertium too, as a comparison")
    given = parser.parse_args()
    try:
        evaluate(given.bundle / "weights.safetensors", given.prompts, given.out, apertium=given.apertium)
    except PenstockError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
