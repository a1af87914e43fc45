"""The translator: text in and out, its training on a few pairs, and its bundle."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.apps.translate.app import ENTRY, LAYERS, MAX_TOKENS, WIDTH, app
from penstock.apps.translate.corpus.pairs import Pair
from penstock.apps.translate.evaluate import evaluate, read_prompts
from penstock.apps.translate.make_data import encoded
from penstock.apps.translate.model import translator, with_beams
from penstock.apps.translate.recipe import bits_per_token, packed_data, recipe, smoothed_loss
from penstock.apps.translate.tokenizer import END, tokenizer
from penstock.apps.translate.translation import translate
from penstock.core.errors import InvalidInput, TrainError
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.spec import TensorSpec
from penstock.models.encoder_decoder import Scored
from penstock.nn.decoding import Greedy
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.train.overrides import with_overrides
from penstock.train.run import train

SENTENCES = {
    "Open the file.": "Abra el archivo.",
    "Close the window.": "Cierre la ventana.",
    "Where is the folder?": "¿Dónde está la carpeta?",
    "Yes": "Sí",
    "Please wait a moment, the text is being saved.": "Espere un momento, el texto se está guardando.",
    "Two files were deleted.": "Se borraron dos archivos.",
}
SMALL_WIDTH, SMALL_LAYERS = 64, 2
assert app.decode is not None
assert app.reply is not None
decode, reply = app.decode, app.reply


def small() -> Greedy:
    return translator(width=SMALL_WIDTH, heads=4, layers=SMALL_LAYERS, dropout=0.0)


def pairs_file(folder: Path) -> Path:
    pairs = [Pair(english, spanish, "") for english, spanish in SENTENCES.items()]
    arrays = encoded(pairs, tokenizer(), "train") | encoded(pairs, tokenizer(), "validation")
    np.savez(folder / "pairs.npz", **arrays)  # type: ignore[arg-type]
    return folder / "pairs.npz"


def test_text_and_json_become_the_same_tokens() -> None:
    tokens = decode("¿Qué?".encode(), "text/plain")["tokens"]
    assert tokens.tolist() == tokenizer().encode("¿Qué?")
    assert decode(b'{"text": "\\u00bfQu\\u00e9?"}', "application/json")["tokens"].tolist() == tokens.tolist()
    assert decode(b'{"tokens": [5, 6]}', "application/json")["tokens"].tolist() == [5, 6]
    assert reply(np.array([*tokens, END])) == {"text": "¿Qué?"}
    assert reply(np.array([END])) == {"text": ""}


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (b" \n ", "text/plain", "The text is empty"),
        (b"\xff\xfe", "text/plain", "not text in UTF-8"),
        (b"no " * 300, "text/plain", f"tokens; send at most {MAX_TOKENS}"),
        (b'{"texts": "x"}', "application/json", 'not {"text": "..."}'),
        (b'{"text": 5}', "application/json", 'not {"text": "..."}'),
        (b"[1, 2]", "application/json", 'not {"text": "..."}'),
        (b"{", "application/json", "not JSON"),
    ],
)
def test_what_is_no_text_is_refused(body: bytes, content_type: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(body, content_type)
    assert said in str(caught.value)


def test_the_declared_state_is_that_of_the_network() -> None:
    with torch.device("meta"):
        network = translator()
    assert sum(parameter.numel() for parameter in network.parameters()) < 21e6
    assert ENTRY == 2 * LAYERS * WIDTH
    assert find_application("translate").application is app


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    scored = Scored(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-4.0, -4.0, -9.0]]), torch.tensor([[1.0, 0, 1]]))
    counts = torch.tensor([[1.0, 1.0, 0.0]])
    assert smoothed_loss(scored, counts, 0.1).item() == pytest.approx(0.9 * 1.5 + 0.1 * 4)
    assert bits_per_token(scored, counts) == pytest.approx(1.5 / np.log(2))


def test_the_smoothed_loss_is_that_of_torch() -> None:
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(0, 11, (2, 5))
    log = logits.log_softmax(-1)
    scored = Scored(log.gather(-1, labels[..., None]).squeeze(-1), log.mean(-1), torch.zeros(2, 5))
    counts = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    ignoring = torch.where(counts > 0, labels, -100).flatten()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignoring, label_smoothing=0.1)
    assert smoothed_loss(scored, counts).item() == pytest.approx(wanted.item(), rel=1e-5)


def small_found() -> FoundApplication:
    assert app.generate is not None
    entry = 2 * SMALL_LAYERS * SMALL_WIDTH
    state = {
        name: TensorSpec(dtype=spec.dtype, shape=(*spec.shape[:-1], entry), meaning="") if len(spec.shape) > 1 else spec
        for name, spec in app.generate.state.items()
    }
    application = replace(app, model=small, generate=replace(app.generate, state=state, max_steps=24))
    return FoundApplication(application=application, module=sys.modules[__name__], reference="")


@pytest.mark.slow
def test_a_few_sentences_are_learned_and_translated(tmp_path: Path) -> None:
    file = pairs_file(tmp_path)
    overrides = {"steps": 120, "precision": "fp32", "batch_size": 1, "ema": None, "selection.every_epochs": 60.0}
    made = replace(with_overrides(recipe(), overrides), data=lambda: packed_data(file))
    found = small_found()
    result = train(found, tmp_path / "run", made, overrides=overrides, quiet=True)
    assert result.metrics["accuracy"] > 0.99
    network = small()
    network.load_state_dict(load_file(tmp_path / "run/bundle/weights.safetensors"))
    assert translate(network, list(SENTENCES), tokenizer(), batch=4) == list(SENTENCES.values())
    assert translate(with_beams(network), list(SENTENCES), tokenizer()) == list(SENTENCES.values())
    executor = GenerationExecutor(network.eval(), found.application, padding=float("nan"))
    inputs = [decode(text.encode(), "text/plain") for text in SENTENCES]
    answers = executor.predict(found.application.input.of_many(inputs))  # type: ignore[union-attr]
    texts = [reply(tokens[:count])["text"] for tokens, count in zip(answers["token"], answers["steps"], strict=True)]
    assert texts == list(SENTENCES.values())


def test_a_training_without_data_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"make it with 'python -m penstock.apps.translate.make_data'"):
        packed_data(tmp_path / "none.npz")


def test_translations_of_a_test_set_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    network = small()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    monkeypatch.setattr("penstock.apps.translate.evaluate.translator", small)
    monkeypatch.setattr("penstock.apps.translate.translation.MAX_STEPS", 3)
    (tmp_path / "prompts.tsv").write_text("One.\tUno.\nTwo.\tDos.\n")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(TrainError, match=r"sacrebleu, which computes chrF and BLEU, is missing"):
        evaluate(tmp_path / "weights.safetensors", tmp_path / "prompts.tsv", tmp_path / "out", apertium=False)
    for name in ("greedy", "beam"):
        assert len((tmp_path / f"out/{name}.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize(("text", "said"), [("", "has no line"), ("One.\tUno.\nTwo.\n", ":2 has 1 texts")])
def test_a_test_set_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prompts.tsv").write_text(text)
    with pytest.raises(TrainError, match=said):
        read_prompts(tmp_path / "prompts.tsv")
    with pytest.raises(TrainError, match="cannot be read"):
        read_prompts(tmp_path / "none.tsv")
