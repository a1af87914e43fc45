"""`penstock score`: each row once, in parts that are named by their content, whatever is killed or repeated."""

import fcntl
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import PenstockError, ScoreError
from penstock.score import score_run
from penstock.score.files import OutputFolder
from penstock.score.network import LoadedNetwork
from penstock.score.score_run import ScoreReport
from tests.support.scored import (
    fixed_lists,
    hashes,
    how_to_run,
    numbers,
    run,
    table_of,
    write_numbers,
    write_parquet,
)
from tests.support.serving import write_doubler
from tests.support.thorough import thorough

HOW = how_to_run(Path())


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> LoadedNetwork:
    return LoadedNetwork(write_doubler(tmp_path_factory.mktemp("doubler")), HOW)


def doubled(table: Any) -> np.ndarray[Any, Any]:
    return np.array(table["doubles"].to_pylist(), np.float32)


def test_each_row_has_its_answer_its_key_and_what_is_kept(doubler: LoadedNetwork, tmp_path: Path) -> None:
    given = write_numbers(tmp_path / "in", [250, 1, 99])
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW, keep=("id",))
    table = table_of(tmp_path / "out")
    assert table.schema.names == ["path", "row", "id", "doubles"]
    assert table.schema.field("doubles").type == pa.list_(pa.float32(), 4)
    np.testing.assert_array_equal(doubled(table), 2 * given)
    assert table["id"].to_pylist() == list(range(350))
    assert table["row"].to_pylist() == [*range(250), 0, *range(99)]
    assert (report.rows, report.new_rows, report.errors) == (350, 350, 0)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_bytes())
    assert (manifest["rows"], manifest["errors"], manifest["bundle"]) == (350, 0, doubler.files.manifest.content_hash)
    assert [part["rows"] for part in manifest["parts"]] == [100, 100, 50, 1, 99]
    parts = {part["file"] for part in manifest["parts"]}
    assert parts == {file.name for file in (tmp_path / "out").glob("*.parquet")}
    assert [file["path"] for file in manifest["inputs"]] == ["000.parquet", "001.parquet", "002.parquet"]
    # What starts with a line below is left out by readers of whole folders.
    assert pq.read_table(tmp_path / "out").num_rows == 350


def as_column(form: str, array: np.ndarray[Any, Any]) -> Any:
    flat, bounds = pa.array(array.reshape(-1)), range(0, 4 * len(array) + 1, 4)
    raw = [row.tobytes() for row in array]
    return {
        "fixed lists": fixed_lists(array),
        "lists": pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), flat),
        "large lists": pa.LargeListArray.from_arrays(pa.array(bounds, pa.int64()), flat),
        "bytes": pa.array(raw, pa.binary()),
        "large bytes": pa.array(raw, pa.large_binary()),
        "fixed bytes": pa.array(raw, pa.binary(16)),
    }[form]


@pytest.mark.parametrize("form", ["lists", "large lists", "bytes", "large bytes", "fixed bytes"])
def test_every_form_of_a_column_gives_the_same(doubler: LoadedNetwork, tmp_path: Path, form: str) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"x": as_column(form, numbers(70))}, 40)
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, columns={"numbers": "x"})
    np.testing.assert_array_equal(doubled(table_of(tmp_path / "out")), 2 * numbers(70))


def test_a_second_run_goes_on_and_gives_the_same_bytes(
    doubler: LoadedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbers(tmp_path / "in", [300, 200], rows=50)
    run(doubler, tmp_path / "in", tmp_path / "whole", HOW, keep=("id",))
    real, blocks = score_run.read_blocks, 0

    def breaking(*arguments: Any) -> Generator[Any]:
        nonlocal blocks
        for block in real(*arguments):
            blocks += 1
            if blocks == 4:
                raise KeyboardInterrupt
            yield block

    # A thread that reads cannot be interrupted; an error of any kind ends the run in the same way.
    monkeypatch.setattr(score_run, "read_blocks", lambda *given: failing(breaking(*given)))
    with pytest.raises(ScoreError, match="interrupted"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW, keep=("id",))
    monkeypatch.undo()
    done = set(os.listdir(tmp_path / "out"))
    assert "_manifest.json" not in done
    assert not [name for name in done if name.startswith(".")]
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW, keep=("id",))
    assert report.rows == 500
    assert report.new_rows == 500 - 50 * len([name for name in done if name.endswith(".parquet")])
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def failing(blocks: Generator[Any]) -> Generator[Any]:
    try:
        yield from blocks
    except KeyboardInterrupt:
        raise ScoreError("interrupted") from None


def test_a_damaged_part_is_written_again_and_leftovers_are_removed(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [120], rows=50)
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    before = hashes(tmp_path / "out")
    part = next((tmp_path / "out").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-9])
    (tmp_path / "out" / ".left.parquet.0a0b0c0d.writing").write_bytes(b"half")
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert report.unreadable == 1
    assert hashes(tmp_path / "out") == before


def test_a_file_that_another_run_removes_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, removed = OutputFolder(tmp_path), list[str]()
    real = fcntl.flock

    def late(lock: int, how: int) -> None:
        if not removed:
            removed.extend(file.name for file in tmp_path.iterdir())
            out.remove_leftovers()
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with out.written("a.parquet") as file:
        file.write_bytes(b"whole")
    assert len(removed) == 1
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a.parquet", b"whole")]


def test_a_changed_input_is_scored_again_and_its_old_part_removed(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [60, 60])
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    file = tmp_path / "in" / "001.parquet"
    was = file.stat()
    write_parquet(file, {"id": pa.array(range(60, 120)), "numbers": fixed_lists(numbers(60, seed=9))})
    # With the old time of modification, as some programs copy.
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert (report.rows, report.new_rows, report.removed) == (120, 60, 1)
    expected = np.concatenate([numbers(60, 0), numbers(60, 9)])
    np.testing.assert_array_equal(doubled(table_of(tmp_path / "out")), 2 * expected)


def test_an_input_that_changes_while_it_is_read_is_refused(
    doubler: LoadedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbers(tmp_path / "in", [60])
    real = score_run.read_blocks

    def changing(*arguments: Any) -> Generator[Any]:
        yield from real(*arguments)
        write_parquet(tmp_path / "in" / "000.parquet", {"numbers": fixed_lists(numbers(61))})

    monkeypatch.setattr(score_run, "read_blocks", changing)
    with pytest.raises(ScoreError, match=r"000\.parquet changed while .* was scored; run the same command again"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert os.listdir(tmp_path / "out") == ["_score.json"]


def test_two_runs_at_once_give_each_row_once(doubler: LoadedNetwork, tmp_path: Path) -> None:
    from threading import Thread

    write_numbers(tmp_path / "in", [300], rows=30)
    run(doubler, tmp_path / "in", tmp_path / "whole", HOW)
    runs = [Thread(target=run, args=(doubler, tmp_path / "in", tmp_path / "out", HOW)) for _ in range(2)]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def bad_rows() -> Any:
    rows: list[Any] = [row.tolist() for row in numbers(40)]
    rows[3][2], rows[5][0], rows[7], rows[9], rows[11][1] = 13.0, 17.0, None, [1.0, 2.0], float("nan")
    rows[12] = [1.0, None, 3.0, 4.0]
    return pa.array(rows, pa.list_(pa.float32()))


REASONS = {
    3: "the network raised ValueError: thirteen.",
    5: "the network's answer holds NaN or infinity.",
    7: "the row has no 'numbers' (null); give a value.",
    9: "numbers has 2 numbers; it must be float32[4].",
    11: "numbers holds NaN or infinity; every number must be finite.",
    12: "numbers holds null; give numbers.",
}


def test_rows_without_an_answer_are_null_and_say_why(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": bad_rows()})
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW, on_error="null", reply=True)
    table = table_of(tmp_path / "out")
    assert report.errors == len(REASONS)
    found = {row: said for row, said in enumerate(table["error"].to_pylist()) if said is not None}
    assert {row: said.lower() for row, said in found.items()} == {row: said.lower() for row, said in REASONS.items()}
    for row, (answer, reply) in enumerate(zip(table["doubles"].to_pylist(), table["reply"].to_pylist(), strict=True)):
        expected = None if row in REASONS else (2 * numbers(40)[row]).tolist()
        assert answer == expected
        assert (None if reply is None else json.loads(reply)) == (expected and {"doubled": expected})


def test_a_reply_that_raises_leaves_the_row_without_an_answer(doubler: LoadedNetwork, tmp_path: Path) -> None:
    rows = numbers(5)
    rows[2, 0] = 999
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": fixed_lists(rows)})
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, on_error="null", reply=True)
    row = table_of(tmp_path / "out").slice(2, 1).to_pylist()[0]
    assert (row["doubles"], row["reply"]) == (None, None)
    assert row["error"] == "the reply raised RuntimeError: reply crashed."


def test_the_first_row_without_an_answer_ends_a_run(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": bad_rows()})
    with pytest.raises(
        ScoreError, match=r"^a\.parquet, row 3: the network raised ValueError: thirteen\. Mend it, or"
    ) as ended:
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    # OUT holds the scores of the other option.
    assert str(ended.value).endswith("keep such rows with --on-error null, in another --out.")


@pytest.mark.parametrize("unit", [thorough(1), 7, 40, 90, 4096])
def test_every_line_is_in_one_unit(doubler: LoadedNetwork, tmp_path: Path, unit: int) -> None:
    lines = [json.dumps({"numbers": row.tolist(), "name": f"n{at}"}) for at, row in enumerate(numbers(23))]
    lines[4] += "   "
    lines.insert(8, "")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines) + "\n" * (unit % 2))
    run(doubler, tmp_path / "in", tmp_path / "out", HOW, keep=("name",), line_bytes_a_unit=unit)
    table = table_of(tmp_path / "out")
    np.testing.assert_array_equal(doubled(table), 2 * numbers(23))
    assert [json.loads(name) for name in table["name"].to_pylist()] == [f"n{at}" for at in range(23)]
    text = (tmp_path / "in" / "a.jsonl").read_bytes()
    assert all(text[row : row + 1] == b"{" for row in table["row"].to_pylist())


def test_lines_that_are_not_json_or_not_of_the_input_say_why(doubler: LoadedNetwork, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"numbers": [1, 2, 3, 4]}\nnot json\n[1]\n{"other": 1}\n{"numbers": [1, "a"]}\n')
    report = run(doubler, tmp_path / "a.jsonl", tmp_path / "out", HOW, on_error="null")
    said = table_of(tmp_path / "out")["error"].to_pylist()
    assert report.errors == 4
    assert said[0] is None
    assert said[1].startswith("the line is not JSON")
    assert said[2].startswith("the line holds no object")
    assert said[3] == "the line has no 'numbers'."
    assert "it must be" in said[4]


def test_pictures_in_a_folder_and_in_a_column_are_decoded(doubler: LoadedNetwork, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "in" / "sub").mkdir(parents=True)
    for at in range(5):
        name = ("a.png", "b.jpg", "sub/c.png", "d.PNG", "e.png")[at]
        Image.new("L", (4, 4), 20 + 10 * at).save(tmp_path / "in" / name)
    (tmp_path / "in" / "note.txt").write_text("left out")
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW, files_a_unit=2)
    table = table_of(tmp_path / "out")
    assert (report.rows, report.left_out) == (5, 1)
    found = {row["path"]: row["doubles"][0] for row in table.to_pylist()}
    assert found == {"a.png": 40, "b.jpg": 60, "sub/c.png": 80, "d.PNG": 100, "e.png": 120}
    bodies = [(tmp_path / "in" / name).read_bytes() for name in ("a.png", "b.jpg")] + [b"no picture", None]
    for form, column in {
        "plain": pa.array(bodies, pa.binary()),
        "struct": pa.array([None if body is None else {"bytes": body, "path": "x"} for body in bodies]),
    }.items():
        write_parquet(tmp_path / form / "a.parquet", {"picture": column, "label": pa.array([1, 2, 3, 4])})
        options = {"body": "picture"} if form == "struct" else {}
        run(doubler, tmp_path / form, tmp_path / f"{form}-out", HOW, on_error="null", keep=("label",), **options)
        rows = table_of(tmp_path / f"{form}-out").to_pylist()
        assert [row["doubles"] and row["doubles"][0] for row in rows] == [40, 60, None, None]
        assert rows[3]["error"] == "the row has no body (null); give a value."


def test_both_sides_may_be_at_urls(doubler: LoadedNetwork, tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.store.clear()
    given = write_numbers(tmp_path / "in", [130, 20], rows=50)
    for file in (tmp_path / "in").iterdir():
        system.pipe_file(f"/bucket/in/{file.name}", file.read_bytes())
    report = run(doubler, "memory://bucket/in", "memory://bucket/out", HOW)
    assert run(doubler, "memory://bucket/in", "memory://bucket/out", HOW).new_rows == 0
    assert report.new_rows == 150
    (tmp_path / "copy").mkdir()
    for path in system.find("/bucket/out"):
        (tmp_path / "copy" / path.rpartition("/")[2]).write_bytes(system.cat_file(path))
    np.testing.assert_array_equal(doubled(table_of(tmp_path / "copy")), 2 * given)
    system.store.clear()


# --- bad input


def test_an_output_folder_of_something_else_is_refused(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [10])
    run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    with pytest.raises(ScoreError, match=r"with keep \[\], and now it is \['id'\]; give the same options"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW, keep=("id",))
    write_numbers(tmp_path / "in2", [10])
    with pytest.raises(ScoreError, match="holds the scores of another input"):
        run(doubler, tmp_path / "in2", tmp_path / "out", HOW)
    description = json.loads((tmp_path / "out" / "_score.json").read_bytes())
    (tmp_path / "out" / "_score.json").write_text(json.dumps(description | {"bundle": "0" * 64}))
    with pytest.raises(ScoreError, match=r"holds the scores of another bundle \(0000.*choose another --out"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    (tmp_path / "out" / "_score.json").write_text("{")
    with pytest.raises(ScoreError, match=r"_score\.json is not readable"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ScoreError, match=r"holds 'notes\.txt' and no _score\.json"):
        run(doubler, tmp_path / "in", tmp_path / "mine", HOW)


def test_the_output_may_not_be_in_the_input(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [10])
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for to in (tmp_path / "in", tmp_path / "in" / "out", tmp_path / "link" / "out"):
        with pytest.raises(ScoreError, match="is inside the input"):
            run(doubler, tmp_path / "in", to, HOW)
    run(doubler, tmp_path / "in" / "000.parquet", tmp_path / "in" / "out", HOW)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"other": pa.array([1])}, r"a\.parquet has no column 'numbers' for the input 'numbers'; it has other\. Name"),
        (
            {"numbers": pa.array([[1.0] * 4])},
            r"column 'numbers' is list<\w+: double>, and the input 'numbers' is float",
        ),
        ({"numbers": fixed_lists(np.zeros((1, 5), np.float32))}, r"column 'numbers' is fixed_size_list<.*>\[5\]"),
        ({"numbers": pa.array([1.0], pa.float32())}, "column 'numbers' is float"),
        ({"numbers": pa.array([b"x"], pa.binary(1))}, r"column 'numbers' is fixed_size_binary\[1\]"),
    ],
)
def test_a_column_that_is_missing_or_another_is_a_sentence(
    doubler: LoadedNetwork, tmp_path: Path, columns: dict[str, Any], sentence: str
) -> None:
    write_parquet(tmp_path / "in" / "a.parquet", columns)
    with pytest.raises(ScoreError, match=sentence):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert not (tmp_path / "out").exists()


def test_a_half_written_file_is_a_sentence(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [200, 200])
    file = tmp_path / "in" / "001.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(ScoreError, match=r"^001\.parquet is no whole Parquet file \(.*\); write or copy it again\.$"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    file.write_bytes(whole[:100] + bytes(1500) + whole[1600:])
    with pytest.raises(ScoreError, match=r"^001\.parquet is no whole Parquet file"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    file.write_bytes(b"")
    with pytest.raises(ScoreError, match=r"^001\.parquet is no whole Parquet file"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)


def test_no_rows_are_no_error(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [30])
    empty = pa.table({"id": pa.array([], pa.int64()), "numbers": fixed_lists(np.zeros((0, 4), np.float32))})
    with pq.ParquetWriter(tmp_path / "in" / "b.parquet", empty.schema) as writer:
        writer.write_table(empty)
    report = run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    assert report.rows == 30
    assert len(json.loads((tmp_path / "out" / "_manifest.json").read_bytes())["parts"]) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": ("nothing",)}, r"000\.parquet has no column 'nothing'"),
        ({"keep": ("row",)}, "--keep names 'row', which is also a column of the output"),
        ({"columns": {"nothing": "id"}}, "--input names 'nothing', and there is no such input; there is numbers"),
        ({"on_error": "skip"}, "--on-error is 'skip'; choose fail or null"),
        ({"content_type": "video/mp4"}, "--content-type is 'video/mp4', and application 'doubler' reads image/png"),
        ({"body": "id"}, r"column 'id' is int64; bodies are binary, or text"),
    ],
)
def test_options_that_do_not_fit_are_sentences(
    doubler: LoadedNetwork, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    ids = {"id": pa.array(range(10)), "row": pa.array(range(10))}
    write_parquet(tmp_path / "in" / "000.parquet", ids | {"numbers": fixed_lists(numbers(10))})
    with pytest.raises(ScoreError, match=sentence):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW, **options)


def test_the_bound_of_a_run_is_a_stage_that_works_for_most_of_it() -> None:
    assert ScoreReport(busy={"reading": 0.1, "the network": 0.97}).bound_by == "the network"
    # The time went into the start.
    assert ScoreReport(busy={"reading": 0.04, "the network": 0.01}).bound_by == ""
    assert ScoreReport().bound_by == ""


def test_inputs_that_are_not_there_or_mixed_are_sentences(doubler: LoadedNetwork, tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match=rf"^there is no {tmp_path}/nothing; check the path\.$"):
        run(doubler, tmp_path / "nothing", tmp_path / "out", HOW)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScoreError, match="/empty holds no files to score; check the path"):
        run(doubler, tmp_path / "empty", tmp_path / "out", HOW)
    write_numbers(tmp_path / "in", [10])
    (tmp_path / "in" / "a.jsonl").write_text("{}")
    with pytest.raises(ScoreError, match=r"files of several kinds: 000\.parquet \(Parquet\), a\.jsonl \(JSONL\)"):
        run(doubler, tmp_path / "in", tmp_path / "out", HOW)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.xls").write_text("")
    with pytest.raises(ScoreError, match=r"holds a\.xls and nothing that can be scored; give files of \.parquet or"):
        run(doubler, tmp_path / "other", tmp_path / "out", HOW)


def test_an_output_that_cannot_be_written_is_a_sentence(doubler: LoadedNetwork, tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", [10])
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match=r"cannot be (read|written) \("):
        run(doubler, tmp_path / "in", tmp_path / "file" / "out", HOW)


def test_what_is_being_written_by_others_is_not_removed(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    with out.written("a.parquet") as file:
        file.write_bytes(b"whole")
        OutputFolder(tmp_path).remove_leftovers()
        assert file.exists()
        assert out.names() == set()
    assert out.names() == {"a.parquet"}
    with pytest.raises(ScoreError), out.written("b.parquet") as file:
        raise ScoreError("ended")
    assert os.listdir(tmp_path) == ["a.parquet"]
