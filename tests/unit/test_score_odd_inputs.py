"""Odd inputs of `penstock score`: links, names, types, folders that grow, outputs that somebody changed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import scorer
from penstock.core.errors import ScoreError
from penstock.score import files
from penstock.score.answers import reply_column
from penstock.score.bodies import BodyReader
from penstock.score.chunks import Chunks
from penstock.score.files import InputFolder
from penstock.score.network import LoadedNetwork
from penstock.score.plan import ScoreOptions
from tests.support.scored import fixed_lists, how_to_run, numbers, run, table_of, write_numbers, write_parquet
from tests.support.serving import write_doubler

HOW = how_to_run(Path())


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> LoadedNetwork:
    return LoadedNetwork(write_doubler(tmp_path_factory.mktemp("doubler")), HOW)


def write_lines(file: Path, *firsts: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f'{{"numbers": [{first}, 1, 2, 3]}}\n' for first in firsts))
    return file


def firsts_of(folder: Path) -> list[float]:
    return [answer[0] for answer in table_of(folder)["doubles"].to_pylist()]


def test_a_folder_of_one_file_may_grow(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", 20)
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    write_lines(tmp_path / "in" / "b.jsonl", 30)
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert (report.rows, report.new_rows) == (2, 1)
    with pytest.raises(ScoreError, match="holds the scores of another input"):
        run(doubler, tmp_path / "in" / "a.jsonl", tmp_path / "out", HOW)


def test_a_link_changes_with_its_file(doubler: LoadedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_lines(tmp_path / "target.jsonl", 20)
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "in" / name).symlink_to(target)
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    write_lines(target, 30)
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert (report.new_rows, firsts_of(tmp_path / "out")) == (2, [60, 60])
    place = InputFolder(tmp_path / "in")
    with monkeypatch.context() as patch:
        # What is as it was listed needs no other look at the whole folder.
        patch.delattr(files, "_listed")
        place.check_unchanged(place.files)
    write_lines(target, 40)
    with pytest.raises(ScoreError, match=r"a\.jsonl changed while"):
        place.check_unchanged(place.files)


def test_links_to_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "other" / "b.jsonl", 20)
    write_lines(tmp_path / "in" / "a.jsonl", 20)
    (tmp_path / "in" / "more").symlink_to(tmp_path / "other")
    with pytest.raises(ScoreError, match="more is a link to a folder, which is not followed"):
        InputFolder(tmp_path / "in")
    (tmp_path / "in" / "more").unlink()
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    with pytest.raises(ScoreError, match=r"pipe\.jsonl is no file, but a pipe"):
        InputFolder(tmp_path / "in")


@pytest.mark.parametrize("name", ["ünï ☃.jsonl", 'two\n"lines".jsonl', "a#b?c*[1]%20::x.jsonl", "~.jsonl"])
def test_any_name_of_unicode_is_a_path(doubler: LoadedNetwork, tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / "in" / name, 20)
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert table_of(tmp_path / "out")["path"].to_pylist() == [name]


def test_a_name_that_is_not_unicode_is_a_sentence(tmp_path: Path) -> None:
    write_lines(tmp_path / os.fsdecode(b"\xff.jsonl"), 20)
    with pytest.raises(ScoreError, match=r"the name '\\udcff\.jsonl' is not UTF-8"):
        InputFolder(tmp_path)


BODIES = ("30", "crash", None, "40")
TEXTS = {
    "text": pa.array(BODIES),
    "large text": pa.array(BODIES, pa.large_string()),
    "text view": pa.array(BODIES, pa.string_view()),
    "dictionary": pa.array(BODIES).dictionary_encode(),
    "binary view": pa.array([body and body.encode() for body in BODIES], pa.binary_view()),
}


@pytest.mark.parametrize("form", TEXTS)
def test_bodies_are_texts_of_every_form(doubler: LoadedNetwork, tmp_path: Path, form: str) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"text": TEXTS[form]})
    options: dict[str, Any] = {"body": "text", "content_type": "text/x-number", "on_error": "null"}
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, **options)
    rows = table_of(tmp_path / "out").to_pylist()
    assert [row["doubles"] and row["doubles"][0] for row in rows] == [60, None, None, 80]
    assert rows[1]["error"] == "the decode raised RuntimeError: decode crashed."
    assert rows[2]["error"] == "the row has no body (null); give a value."


def test_a_text_that_is_not_unicode_is_for_the_application(doubler: LoadedNetwork, tmp_path: Path) -> None:
    texts = pa.array([b"30", b"\xff"]).view(pa.string())
    write_parquet(tmp_path / "in" / "a.parquet", {"text": texts})
    options: dict[str, Any] = {"body": "text", "content_type": "text/x-number", "on_error": "null"}
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, **options)
    rows = table_of(tmp_path / "out").to_pylist()
    assert rows[0]["error"] is None
    assert rows[1]["error"] == "The body is not text in utf-8, from byte 0: invalid start byte."


def test_an_application_that_exits_fails_on_the_row_alone(doubler: LoadedNetwork) -> None:
    def exits(*_: Any) -> Any:
        raise SystemExit(0)

    application = replace(doubler.application, decode=exits, reply=exits)
    chunks = BodyReader(application, None, None).chunks([b"30", None])
    assert chunks.errors[0] == "the decode raised SystemExit: 0."
    answered = Chunks(array=numbers(1))
    reply_column(application, numbers(1), answered)
    assert answered.errors == {0: "the reply raised SystemExit: 0."}


def test_a_value_too_deep_to_be_kept_is_an_error_of_its_line(doubler: LoadedNetwork, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = [f'{{"numbers": [20, 1, 2, 3], "x": {"[" * deep}{"]" * deep}}}' for deep in (1, 400)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, on_error="null", keep=("x",))
    rows = table_of(tmp_path / "out").to_pylist()
    assert [(row["x"], row["doubles"] is None) for row in rows] == [("[]", False), (None, True)]
    assert rows[1]["error"].startswith("'x' cannot be kept (Recursion limit reached")


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(doubler: LoadedNetwork, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", 20, 30)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    for unit in (1, 5, 1000):
        run(doubler, file, tmp_path / f"out{unit}", HOW, line_bytes_a_unit=unit)
        assert table_of(tmp_path / f"out{unit}")["row"].to_pylist() == [3, 30]
        assert firsts_of(tmp_path / f"out{unit}") == [40, 60]


def test_bodies_of_lines_say_that_a_line_is_not_json(doubler: LoadedNetwork, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "30"}\n{"text"\n{"text": 3}\n')
    options: dict[str, Any] = {"body": "text", "content_type": "text/x-number", "on_error": "null"}
    run(doubler, tmp_path / "a.jsonl", tmp_path / "out", HOW, **options)
    said = table_of(tmp_path / "out")["error"].to_pylist()
    assert said[0] is None
    assert said[1].startswith("the line is not JSON")
    assert said[2] == "the line has no text 'text'."


@pytest.mark.parametrize("text", ["[]", "null", '{"options": 3}', "{}"])
def test_a_description_of_another_form_is_a_sentence(doubler: LoadedNetwork, tmp_path: Path, text: str) -> None:
    write_numbers(tmp_path / "in", [10])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_score.json").write_text(text)
    with pytest.raises(ScoreError, match=r"_score\.json is not readable; choose another --out"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)


def test_a_manifest_that_was_cut_short_is_written_again(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [10])
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    manifest = tmp_path / "out" / "_manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:40])
    assert run(doubler, tmp_path / "in", tmp_path / "out", HOW).new_rows == 0
    assert manifest.read_bytes() == whole


def test_changed_sources_are_another_output(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    write_numbers(tmp_path / "in", [10])
    accepting = how_to_run(tmp_path, accept_changed=True)
    run(LoadedNetwork(bundle, accepting), tmp_path / "in", tmp_path / "out", accepting, reply=True)
    app = tmp_path / "app.py"
    app.write_text(app.read_text().replace('"doubled"', '"twice"'))
    changed = LoadedNetwork(bundle, accepting)
    with pytest.raises(ScoreError, match=r"holds scores with changed_sources \{\}, and now it is \{'app\.py': "):
        run(changed, tmp_path / "in", tmp_path / "out", accepting, reply=True)
    run(changed, tmp_path / "in", tmp_path / "other", accepting, reply=True)
    assert "twice" in json.loads(table_of(tmp_path / "other")["reply"][0].as_py())


def test_an_option_is_checked_before_the_network_is_loaded() -> None:
    with pytest.raises(ScoreError, match="--on-error is 'skip'; choose fail or null"):
        ScoreOptions(on_error="skip")


def test_columns_of_a_scorer_have_names_that_are_free(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    app = write_doubler(tmp_path).parent / "app.py"
    named = tmp_path / "named" / "app.py"
    named.write_text(app.read_text().replace('name="doubles"', 'name="error"'))
    made = scorer(write_named(named), on_error="null", keep={"a`b": pa.int64()}, executor="torch")
    assert made.ddl == "`a``b` bigint, `error` array<float>, `error_` string"
    rows = numbers(3)
    rows[1, 0] = 13
    batch = pa.RecordBatch.from_pydict({"numbers": fixed_lists(rows), "a`b": pa.array([1, 2, 3])})
    (found,) = made([batch])
    assert [row["error"] is None for row in found.to_pylist()] == [False, True, False]
    assert [row["error_"] for row in found.to_pylist()] == [None, "the network raised ValueError: thirteen.", None]


def write_named(app: Path) -> Path:
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    found = find_application(str(app))
    Bundle.write(found, found.model(), np.ones((2, 4), np.float32), to=app.parent / "bundle")
    return app.parent / "bundle"
