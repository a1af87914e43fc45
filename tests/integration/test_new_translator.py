"""The file that `penstock new translator` writes: trained, served, exported; and data that are none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import find_application
from penstock.device.pack_engine import PackEngine
from tests.support.serving import RunningServer


def new(file: Path, *words: str | Path) -> str:
    done = CliRunner().invoke(build(), ["new", "translator", str(file), *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def penstock(*words: str | Path) -> None:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_file_runs_as_it_is_written(tmp_path: Path) -> None:
    file, bundle = tmp_path / "numbers.py", tmp_path / "run" / "bundle"
    new(file)
    penstock("train", file, "--out", tmp_path / "run")
    asked = {"four hundred and twenty seven": "427", "ninety": "90", "eight hundred and six": "806"}
    answers: list[str] = []
    with RunningServer(bundle) as server:
        for text in asked:
            status, _, reply = server.ask("POST", "/v1/apps/numbers", text.encode(), {"Content-Type": "text/plain"})
            assert status == 200, reply
            answers.append(reply["text"])
    assert sum(answer == number for answer, number in zip(answers, asked.values(), strict=True)) >= 2, answers
    penstock("export", bundle, "--out", tmp_path / "pack")
    engine = PackEngine(read_pack(tmp_path / "pack"))
    carried = ["".join(engine.generate_text(text)) for text in asked]
    assert carried == answers


def test_the_file_declares_an_application_of_its_data(tmp_path: Path) -> None:
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{number} apples\t{number} manzanas rojas\n" for number in range(40)), encoding="utf-8")
    said = new(tmp_path / "fruit.py", "--data", data)
    assert "fruit-vocabulary.json has the vocabulary" in said
    found = find_application(str(tmp_path / "fruit.py"))
    assert found.module.pairs()[7] == ("7 apples", "7 manzanas rojas")
    assert found.application.decode is not None
    # Fewer than characters: the vocabulary has joined some.
    assert 0 < found.application.decode.of_text("12 apples").size < 9  # pyright: ignore
    network = found.model()
    assert network.decoder.embed.num_embeddings == found.module.TOKENS


def test_texts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "pairs.tsv"
    long = "".join(f"{'word ' * 300}{number}\t{number}\n" for number in range(40))
    data.write_text(long + "".join(f"{number} apples\t{number} manzanas\n" for number in range(40)))
    new(tmp_path / "fruit.py", "--data", data)
    recipe = find_application(str(tmp_path / "fruit.py")).module.recipe()
    examples = recipe.raw_examples()
    assert len(examples) == 4
    assert all(0 < each["tokens"].size <= 128 for each in examples)
    assert len(recipe.data().train) > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no tab\n" * 30, "write a text, a tab, and its translation"),
        ("one\t1\n" * 5, "has 5 pairs; give at least 20"),
        ("one\t \n" * 30, "as pair 1"),
        (None, "is no text that can be read"),
    ],
)
def test_data_that_are_none(tmp_path: Path, text: str | None, said: str) -> None:
    data = tmp_path / "pairs.tsv"
    if text is not None:
        data.write_text(text)
    done = CliRunner().invoke(build(), ["new", "translator", str(tmp_path / "some.py"), "--data", str(data)])
    assert done.exit_code != 0
    assert said in " ".join((done.output + str(done.exception)).split())
    assert not (tmp_path / "some.py").exists()


def test_a_vocabulary_that_is_there_is_kept(tmp_path: Path) -> None:
    beside = tmp_path / "numbers-vocabulary.json"
    beside.write_text("mine")
    done = CliRunner().invoke(build(), ["new", "translator", str(tmp_path / "numbers.py")])
    assert done.exit_code != 0
    assert beside.read_text() == "mine"
    assert not (tmp_path / "numbers.py").exists()
