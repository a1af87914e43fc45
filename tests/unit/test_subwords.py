"""Subword tokens: the shared vectors, the same tokens in JavaScript, learned vocabularies, and declared texts."""

import json
import random
import re
import subprocess
import tracemalloc
from dataclasses import replace
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock import Dim, TensorSpec
from penstock.apps.translate.app import app as translate
from penstock.apps.translate.tokenizer import END, FIRST, VOCABULARY, tokenizer
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.generate import whole_answer
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.subwords import Subwords, pieces
from penstock.core.texts.learn_subwords import learn_subwords
from penstock.core.texts.subword_text import SubwordReply, SubwordText
from tests.support.small import small

ROOT = Path(__file__).parents[2]
DATA: dict[str, Any] = json.loads((ROOT / "tests/data/subwords.json").read_text())
TEXTS = (
    "Please choose a name.",
    "¿Dónde está el fichero «añadido»?",
    "  two\tspaces \n here ",
    "日本 🦜 x̄ ½ e\u0301",
    "tab\x00",
    "100,000.5% of O'Neill",
    "a" * 200,
)
SCRIPT = """
import { readFileSync } from "node:fs";
import { Subwords, toTokens } from "./subwords.mjs";
const { vocabulary, texts, tokens } = JSON.parse(readFileSync(0, "utf8"));
const subwords = new Subwords(vocabulary);
const made = texts.map(({ text, max_tokens }) => {
  try {
    return { tokens: toTokens(text, { max_tokens }, subwords) };
  } catch (error) {
    return { error: error.message };
  }
});
console.log(JSON.stringify({ made, texts: tokens.map((each) => subwords.decode(each)) }));
"""


def of_script(folder: Path, script: str, **given: Any) -> Any:
    """What a script of JavaScript makes of JSON."""
    node = which("node")
    if node is None:
        pytest.skip("there is no node here; tests/integration/test_device_web_generate.py compares a browser's answers")
    for name in ("subwords", "text", "texts"):
        source = (ROOT / f"penstock/device/web/{name}.js").read_text()
        (folder / f"{name}.mjs").write_text(source.replace('.js";', '.mjs";'))
    (folder / "run.mjs").write_text(script)
    command = [node, folder / "run.mjs"]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def in_node(folder: Path, **given: Any) -> dict[str, Any]:
    """What JavaScript makes of texts and of tokens."""
    return of_script(folder, SCRIPT, **given)


def vocabulary_file(folder: Path) -> Path:
    (folder / "vocabulary.json").write_text(json.dumps(DATA["vocabulary"]))
    return folder / "vocabulary.json"


def test_texts_and_tokens_are_those_of_the_vectors(tmp_path: Path) -> None:
    file = vocabulary_file(tmp_path)
    for each in DATA["texts"]:
        made = SubwordText(tensor="tokens", vocabulary=file, max_tokens=each["max_tokens"])
        if "error" in each:
            with pytest.raises(InvalidInput) as caught:
                made.of_text(each["text"])
            assert str(caught.value) == each["error"]
        else:
            assert made.of_text(each["text"]).tolist() == each["tokens"]
    reply = SubwordReply(tensor="token", vocabulary=file)
    for each in DATA["tokens"]:
        assert reply(np.array(each["tokens"], np.int64)) == {"text": each["text"]}
        assert reply({"token": each["tokens"]}) == {"text": each["text"]}


def test_a_browser_makes_those_of_the_vectors(tmp_path: Path) -> None:
    found = in_node(
        tmp_path,
        vocabulary=DATA["vocabulary"],
        texts=DATA["texts"],
        tokens=[each["tokens"] for each in DATA["tokens"]],
    )
    assert found["made"] == [{key: each[key] for key in ("tokens", "error") if key in each} for each in DATA["texts"]]
    assert found["texts"] == [each["text"] for each in DATA["tokens"]]


def random_text(rng: random.Random) -> str:
    """Characters that every Unicode of the last years knows, and words of the vocabulary."""
    alphabets = [
        "abcdeñ áé¿.'-12",
        "\t\n\v\f\r\x1c\x1f \x85\xa0\u1680\u2003\u2028\u205f\u3000\ufeff\u200b",
        "e\u0301\u0300",
    ]
    alphabets += ["日本語ｱｶﾞ", "🦜👩\u200d🚀", "".join(map(chr, range(0x250))), "कि\u093c", "각\u1100\u1161"]
    words = ["the", " of", "ción", "Please", " file"]
    return "".join(rng.choice(words) if rng.random() < 0.2 else rng.choice(rng.choice(alphabets)) for _ in range(30))


def test_a_browser_makes_the_same_of_random_texts_and_tokens(tmp_path: Path) -> None:
    rng, subwords = random.Random(0), tokenizer()
    texts = [random_text(rng) for _ in range(200)]
    tokens = [[rng.randrange(rng.choice((300, 8000))) for _ in range(20)] for _ in range(100)]
    given = [{"text": text, "max_tokens": 1000} for text in texts]
    found = in_node(tmp_path, vocabulary=json.loads(VOCABULARY.read_text()), texts=given, tokens=tokens)
    nothing = {"error": "The text is empty; send at least one word."}
    assert found["made"] == [{"tokens": made} if (made := subwords.encode(text)) else nothing for text in texts]
    assert found["texts"] == [subwords.decode(each) for each in tokens]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokens(text: str) -> None:
    for subwords in (tokenizer(), learn_subwords(TEXTS[:2], 320, min_characters=2), Subwords([], [], special=3)):
        tokens = subwords.encode(text)
        assert all(subwords.special <= token < len(subwords) for token in tokens)
        wanted = " ".join(text.replace("e\u0301", "é").split())
        assert subwords.decode([FIRST, *tokens, END]) == wanted
        parts = list(subwords.parts([FIRST, *tokens, END]))
        assert ("".join(parts), len(parts)) == (wanted, len(tokens) + 3)


def test_pieces_keep_letters_together_and_digits_apart() -> None:
    assert list(pieces("It's 25 años, x̄!")) == [" It", "'", "s", " 2", "5", " años", ",", " x̄", "!"]
    assert list(pieces("  ")) == []
    assert [len(piece) for piece in pieces("a" * 130)] == [64, 64, 3]


def test_merges_are_learned_from_the_most_frequent_and_applied_in_order(tmp_path: Path) -> None:
    texts = ["aaab"] * 60 + ["ab"] * 55
    subwords = learn_subwords(texts, 4 + 256 + 3 + 3)
    assert subwords.merges[0] == ("a", "a")
    assert len(subwords) == 266
    assert len(subwords.encode("ab")) <= 2
    subwords.write(tmp_path / "v.json")
    assert Subwords.read(tmp_path / "v.json").encode("aaab aab") == subwords.encode("aaab aab")
    with pytest.raises(
        ApplicationError, match="a vocabulary of 261 tokens has no room for 260 special tokens and bytes"
    ):
        learn_subwords(texts, 261)


NO_VOCABULARIES = (
    ("", "JSONDecodeError"),
    ("[]", "TypeError"),
    ("{}", "KeyError: 'merges'"),
    ("[" * 100_000, "RecursionError"),
    ('{"characters": "ab"}', "KeyError"),
    ('{"characters": ["ab"], "merges": []}', "has 'ab', which is not one character"),
    ('{"characters": "a", "merges": ["a\\tb"]}', r"merges 'a' and 'b', which are not both tokens before\);"),
    ('{"characters": "a", "merges": [], "special": -5}', "has special=-5"),
    ('{"characters": "a", "merges": [], "special": "4"}', "has special='4'"),
)


@pytest.mark.parametrize(("content", "cause"), NO_VOCABULARIES, ids=[cause for _, cause in NO_VOCABULARIES])
def test_what_is_no_vocabulary_is_named(content: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(content)
    with pytest.raises(ApplicationError, match=rf"v\.json is no vocabulary of subwords \(.*{cause}"):
        Subwords.read(tmp_path / "v.json")


def test_what_is_no_vocabulary_is_found_with_its_application(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text("{}")
    assert isinstance(translate.decode, SubwordText)
    text = replace(translate.decode, vocabulary=file)
    for fields in ({"decode": text}, {"reply": SubwordReply(tensor="token", vocabulary=file)}):
        with pytest.raises(ApplicationError, match=r"v\.json is no vocabulary"):
            FoundApplication(application=replace(translate, **fields), module=ModuleType("notebook"), reference="")


REFUSED = """
import { Subwords } from "./subwords.mjs";
import { textsOf } from "./texts.mjs";
const said = [];
for (const given of [{ characters: "", merges: [] }, { special: -1, characters: "", merges: [] }, { special: 4 }]) {
  try {
    new Subwords(given).encode("ab");
  } catch (error) {
    said.push(error.message);
  }
}
globalThis.fetch = async () => new Response("<html>", { status: 404 });
await textsOf({ reply: { tensor: "t", vocabulary: "v.json" } }).catch((error) => said.push(error.message));
console.log(JSON.stringify(said));
"""


def test_a_browser_refuses_a_vocabulary_that_lacks_a_field_or_is_not_there(tmp_path: Path) -> None:
    lacking = "The vocabulary lacks special, characters or merges; export the bundle again."
    said = of_script(tmp_path, REFUSED)
    assert said == [lacking] * 3 + ["The host has no v.json here: it says 404."]


def test_the_vocabulary_of_the_package_is_the_size_that_the_application_declares() -> None:
    assert translate.inputs["tokens"].limits == (0, len(tokenizer()) - 1)


def test_a_wrong_declaration_is_refused(tmp_path: Path) -> None:
    file = vocabulary_file(tmp_path)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (SubwordText, {"tensor": "", "vocabulary": file, "max_tokens": 4}, "has tensor=''"),
        (SubwordText, {"tensor": "t", "vocabulary": file, "max_tokens": 0}, "has max_tokens=0"),
        (SubwordText, {"tensor": "t", "vocabulary": tmp_path / "none.json", "max_tokens": 4}, "which is no file"),
        (SubwordReply, {"tensor": "t", "vocabulary": tmp_path / "none.json"}, "which is no file"),
    ]
    for kind, fields, said in wrong:
        with pytest.raises(ApplicationError, match=said):
            kind(**fields)


def test_inputs_and_outputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    text = SubwordText(tensor="tokens", vocabulary=vocabulary_file(tmp_path), max_tokens=9)
    for dtype, most in (("int32", 9), ("int64", 8)):
        spec = TensorSpec(dtype=dtype, shape=(Dim("n", max=most),), meaning="tokens", name="tokens")
        with pytest.raises(ApplicationError, match="it needs one input, int64 of a Dim with max=9, named 'tokens'"):
            small(input=spec, decode=text, accepts=("text/plain",))
    tokens = TensorSpec(dtype="int64", shape=(Dim("n", max=9),), meaning="tokens")
    seed = TensorSpec(dtype="int64", shape=(), meaning="seed")
    fields: dict[str, Any] = {"decode": text, "accepts": ("text/plain",)}
    replace(small(), inputs={"tokens": tokens, "seed": replace(seed, default=3)}, **fields)
    with pytest.raises(ApplicationError, match="others need a default"):
        replace(small(), inputs={"tokens": tokens, "seed": seed}, **fields)
    with pytest.raises(ApplicationError, match="it needs a list of whole numbers, a token each, named 'token'"):
        small(reply=SubwordReply(tensor="token", vocabulary=text.vocabulary))
    steps = whole_answer([replace(seed, name="token", shape=(3,)), replace(seed, name="parent", shape=(3,))], 9)
    for parent, fits in (("parent", True), ("other", False), (None, False)):
        assert SubwordReply(tensor="token", vocabulary=text.vocabulary, parent=parent).fits(steps) == fits


def test_json_has_the_text_or_the_tokens_and_other_inputs(tmp_path: Path) -> None:
    text = SubwordText(tensor="tokens", vocabulary=vocabulary_file(tmp_path), max_tokens=9)
    expected = text.of_text("abab").tolist()
    for body in ({"text": "abab"}, {"tokens": expected}):
        found = text(json.dumps(body | {"seed": 3}).encode(), "application/json")
        assert {name: array.tolist() for name, array in found.items()} == {"tokens": expected, "seed": 3}
    for body, said in ((b'{"text": "\\ud800"}', "half of a surrogate pair"), (b"[" * 100_000, "recursion depth")):
        with pytest.raises(InvalidInput, match=said):
            text(body, "application/json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": None}, "tokens is null; send a list of at most 9 whole numbers."),
        ({"tokens": "abab"}, "tokens is a string; send a list of at most 9 whole numbers."),
        ({"tokens": [1, None, "a"]}, "tokens holds a string, null; send a list of at most 9 whole numbers."),
        ({"tokens": [True, False]}, "tokens holds a bool; send a list of at most 9 whole numbers."),
        ({"tokens": [1], "seed": [1, True]}, "seed holds a bool; send numbers."),
        ({"tokens": [[1], 2]}, "tokens holds a list; send a list of at most 9 whole numbers."),
        ({"tokens": [[1], [2, 3]]}, "tokens has lists of different lengths; send a list of at most 9 whole numbers."),
        ({"tokens": [1 << 70]}, "tokens holds a number of more than 64 bits; send a list of at most 9 whole numbers "),
        ({"text": "abab", "seed": None}, "seed is null; send numbers."),
        ({"text": "abab", "seed": {"a": 1}}, "seed is an object; send numbers."),
    ],
)
def test_json_that_is_no_numbers_is_named(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    text = SubwordText(tensor="tokens", vocabulary=vocabulary_file(tmp_path), max_tokens=9)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        text(json.dumps(given).encode(), "application/json")


def test_a_long_string_among_many_short_ones_takes_no_room_of_its_length_for_each(tmp_path: Path) -> None:
    text = SubwordText(tensor="tokens", vocabulary=vocabulary_file(tmp_path), max_tokens=9)
    body = json.dumps({"tokens": ["a" * 20_000, *["a"] * 2_000]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="tokens holds a string"):
            text(body, "application/json")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


BEAMS = """
import { readFileSync } from "node:fs";
import { Subwords } from "./subwords.mjs";
import { textOfSteps } from "./texts.mjs";
const { vocabulary, answers } = JSON.parse(readFileSync(0, "utf8"));
const subwords = new Subwords(vocabulary);
const texts = answers.map(({ token, parent }) => {
  const text = textOfSteps({ tensor: "token", parent: "parent" }, subwords);
  const parts = token.map((values, at) => text.add({ token: { values }, parent: { values: parent[at] } }));
  return [parts.join(""), text.end()];
});
console.log(JSON.stringify(texts));
"""


def test_the_text_of_a_beam_search_is_that_of_its_best_beam(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reply = SubwordReply(tensor="token", vocabulary=vocabulary_file(tmp_path), parent="parent")
    answers = [
        {"token": rng.integers(0, 300, (steps, 3)), "parent": rng.integers(0, 3, (steps, 3))}
        for steps in (1, 2, 9, 9, 9)
    ]
    wanted = list[str]()
    for answer in answers:
        wanted.append(reply(answer)["text"])
        parts = list(
            reply.parts({name: array[at] for name, array in answer.items()} for at in range(len(answer["token"])))
        )
        assert (set(parts[:-1]), parts[-1]) == ({""}, wanted[-1])
    subwords = Subwords.read(reply.vocabulary)
    token, parent = answers[1]["token"], answers[1]["parent"]
    assert wanted[1] == subwords.decode([int(token[0, parent[1, 0]]), int(token[1, 0])])
    lists = [{name: array.tolist() for name, array in answer.items()} for answer in answers]
    found = of_script(tmp_path, BEAMS, vocabulary=DATA["vocabulary"], answers=lists)
    assert found == [["", text] for text in wanted]


def test_the_vocabulary_is_a_source_of_the_application() -> None:
    assert "data/vocabulary.json" in find_application("translate").source_sha256()
