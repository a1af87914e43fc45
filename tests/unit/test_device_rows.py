"""Rows of tables, NumPy files and sensors as inputs of packs: in order, and bad lines named by their number."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput, SourceError
from penstock.core.packs.pack import Pack
from penstock.core.spec import TensorSpec
from penstock.device.captions import chunk_json, chunk_line
from penstock.device.listen import ListenRun
from penstock.device.number_lines import NumberLines
from penstock.device.pack_engine import LivePackEngine, PackEngine
from penstock.device.row_captions import row_json, row_line
from penstock.device.row_run import RowResult, RowRun
from penstock.device.table_source import SignalSource, TableSource, names_rows
from penstock.device.tensor_captions import tensor_line
from tests.support.packs import colour_pack, flowers_pack, loud_pack, motion_pack, words_pack

FLOWERS = "5,3,1,0.5\n6,3,4,1.5\n"


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return flowers_pack(tmp_path_factory.mktemp("flowers"))


def answered(pack: Pack, source: Path | str) -> tuple[list[RowResult], list[str]]:
    rows = TableSource(str(source), pack)
    with RowRun(PackEngine(pack), rows) as run:
        return list(run), rows.failures.sentences


def written(tmp_path: Path, text: str, name: str = "rows.csv") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        FLOWERS,
        "sepal_length,sepal_width,petal_length,petal_width\n" + FLOWERS,
        "petal_width,petal_length,sepal_width,sepal_length\n0.5,1,3,5\n1.5,4,3,6\n",
        "a;b;c;d\n" + FLOWERS.replace(",", ";"),
        FLOWERS.replace(",", "\t").replace("\n", "\r\n"),
        "\ufeff\n" + FLOWERS.replace(",", "  "),
        '"5","3","1","0.5"\n\n6e0, 3, 4 ,1.5',
    ],
)
def test_lines_in_the_forms_that_tables_have(flowers: Pack, tmp_path: Path, text: str) -> None:
    found, failures = answered(flowers, written(tmp_path, text))
    assert failures == []
    assert [result.outputs["kinds"].tolist() for result in found] == [[5, 1.5, 3], [6, 5.5, 3]]
    assert [row_line(flowers, result).split(": ")[1] for result in found] == ["setosa (5)", "setosa (6)"]
    fields = json.loads(row_json(flowers, found[1]))
    assert (fields["row"], fields["label"], fields["outputs"]) == (1, "setosa", {"kinds": [6.0, 5.5, 3.0]})


def test_bad_lines_are_named_and_the_others_answered(flowers: Pack, tmp_path: Path) -> None:
    text = "5,3,1\n5,3,1,0.5\n1,2,3,nan\n1,2,three,4\n1,2,3,4,5\n1,2,3,1_0\n1,2,3,1e99\n6,3,4,1.5\n"
    found, failures = answered(flowers, file := written(tmp_path, text))
    assert [result.row.line for result in found] == [2, 8]
    assert [said.removeprefix(f"{file}, ").split(":")[0] for said in failures] == [
        f"line {n}" for n in (1, 3, 4, 5, 6, 7)
    ]
    assert "3 numbers where 4 belong: sepal_length, sepal_width" in failures[0]
    assert "NaN or infinity" in failures[1]
    assert "'three' is not a number" in failures[2]
    assert "'1_0' is not a number" in failures[4]


def test_numpy_files(flowers: Pack, tmp_path: Path) -> None:
    rows = np.array([[5, 3, 1, 0.5], [6, 3, 4, 1.5], [1, 1, 1, np.nan]])
    np.save(tmp_path / "rows.npy", rows)
    np.savez(tmp_path / "rows.npz", sizes=rows[:2].astype(np.float32))
    np.save(tmp_path / "one.npy", rows[0])
    found, failures = answered(flowers, tmp_path / "rows.npy")
    assert [result.outputs["kinds"][0] for result in found] == [5, 6]
    assert len(failures) == 1
    assert "input 2: sizes holds NaN" in failures[0]
    assert len(answered(flowers, tmp_path / "rows.npz")[0]) == 2
    assert len(answered(flowers, tmp_path / "one.npy")[0]) == 1


def test_several_tensors_come_by_name(tmp_path: Path) -> None:
    pack = words_pack(tmp_path / "words")
    np.savez(tmp_path / "rows.npz", words=[[3, 0, 4], [1, 2, 3]], weights=[[0, 0.5, 1], [1, 1, 1]])
    found, failures = answered(pack, tmp_path / "rows.npz")
    assert failures == []
    assert found[0].outputs["sums"].tolist() == [1.5, 1.0]
    assert row_line(pack, found[0]) == "line 0: sums: all (1.5); raised: 1, 1.5, 2; known: 3, 4"
    np.savez(tmp_path / "other.npz", words=[3], wieghts=[1.0])
    with pytest.raises(SourceError, match=r"other\.npz has words, wieghts; the pack takes words, weights"):
        answered(pack, tmp_path / "other.npz")
    np.savez(tmp_path / "uneven.npz", words=[[3], [4]], weights=[[1.0]])
    with pytest.raises(SourceError, match=r"words \[2, 1\], weights \[1, 1\]; give every tensor"):
        answered(pack, tmp_path / "uneven.npz")
    with pytest.raises(SourceError, match=r"which lines of numbers cannot tell apart; write an \.npz file"):
        answered(pack, written(tmp_path, "1,2\n"))


@pytest.mark.parametrize("content", [b"", b"no numpy", b"PK\x03\x04 half a zip", b"\x93NUMPY\x01\x00\x02\x00{}"])
def test_a_file_that_numpy_did_not_write(flowers: Pack, tmp_path: Path, content: bytes) -> None:
    for name in ("rows.npy", "rows.npz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match="is no NumPy file of numbers"):
            answered(flowers, tmp_path / name)


def test_a_file_whose_head_names_more_numbers_than_there_is_memory(flowers: Pack, tmp_path: Path) -> None:
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 4), }".ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(SourceError, match="is no NumPy file of numbers"):
        answered(flowers, tmp_path / "a.npy")


def test_a_file_without_an_array_says_so(flowers: Pack, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz")
    with pytest.raises(SourceError, match="has no array; the pack takes sizes"):
        answered(flowers, tmp_path / "a.npz")


def test_objects_are_never_unpickled(flowers: Pack, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError, match="no NumPy file of numbers"):
        answered(flowers, tmp_path / "rows.npy")


def test_files_that_are_not_there_and_lines_without_an_end(flowers: Pack, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        answered(flowers, tmp_path / "none.csv")
    with pytest.raises(SourceError, match="line 1 has more than 4,096 characters"):
        answered(flowers, written(tmp_path, "1" * 5000))


def test_which_sources_are_rows(flowers: Pack, tmp_path: Path) -> None:
    loud = loud_pack(tmp_path / "loud")
    assert [names_rows(source, flowers) for source in ("a.CSV", "a.npy", "-", "mic", "0")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    # Of a sound pack the standard input is a WAV.
    assert not names_rows("-", loud)
    with pytest.raises(SourceError, match="name a camera, a video or a folder of pictures"):
        TableSource(str(written(tmp_path, FLOWERS)), colour_pack(tmp_path / "colours"))


@pytest.mark.parametrize("kind", ["csv", "npy"])
def test_a_signal_of_a_sensor_is_heard_in_chunks(tmp_path: Path, kind: str) -> None:
    pack = motion_pack(tmp_path / "pack", labels=True)
    signal = np.array([[2, 1], [2, 1], [1, -2], [1, -2], [3, 0], [1, -1]], np.float32)
    file = tmp_path / f"signal.{kind}"
    np.save(file, signal) if kind == "npy" else np.savetxt(file, signal, delimiter=",", header="x,y", comments="")
    engine = LivePackEngine(pack)
    with ListenRun(engine, SignalSource(str(file), pack), real_time=False) as run:
        heard = list(run)
    assert [len(result.chunk.samples_T) for result in heard] == [4, 2]
    np.testing.assert_array_equal(np.concatenate([result.output_U for result in heard]), engine.whole(signal))
    lines = [chunk_line(pack.outputs[0], result) for result in heard]
    assert lines == ["    0.40 s  up down", "    0.60 s  up down"]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_chunk_with_nan_is_refused_before_it_is_in_the_state(tmp_path: Path, number: float) -> None:
    engine = LivePackEngine(motion_pack(tmp_path / "pack", labels=True))
    with pytest.raises(InvalidInput, match="holds NaN or infinity; every number must be finite"):
        engine.step(np.array([[0, 1], [number, 0]], np.float32), engine.begin())


def test_a_signal_without_labels_is_answered_with_numbers(tmp_path: Path) -> None:
    pack = motion_pack(tmp_path / "pack", labels=False)
    file = written(tmp_path, "2 1\n2 x\n2 1 1\n1 -2\n")
    source = SignalSource(str(file), pack)
    with ListenRun(LivePackEngine(pack), source, real_time=False) as run:
        (heard,) = list(run)
    assert chunk_line(pack.outputs[0], heard) == "    0.20 s  -1, 3 g"
    assert json.loads(chunk_json(heard))["output"] == [[3.0, 1.0], [-1.0, 3.0]]
    said = [sentence.removeprefix(f"{file}, ") for sentence in source.failures.sentences]
    assert said[0] == "line 2: 'x' is not a number."
    assert said[1].startswith("line 3: it has 3 numbers where 2 belong")


def test_lines_of_the_standard_input_are_answered_as_they_come(flowers: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sensor(io.StringIO):
        read_lines = 0

        def readline(self, size: int | None = -1, /) -> str:
            self.read_lines += 1
            return super().readline(-1 if size is None else size)

    sensor = Sensor(FLOWERS * 3)
    monkeypatch.setattr("sys.stdin", sensor)
    with RowRun(PackEngine(flowers), TableSource("-", flowers)) as run:
        next(iter(run))
        assert sensor.read_lines == 1


WINDOW = TensorSpec(name="window", dtype="int16", shape=(3, 2), meaning="three frames")


def windows(
    lines: list[str], spec: TensorSpec = WINDOW
) -> tuple[list[tuple[int, list[object]]], list[tuple[int, str]]]:
    failed: list[tuple[int, str]] = []
    found = NumberLines((spec,), "any").inputs(iter(enumerate(lines, 1)), lambda line, why: failed.append((line, why)))
    return [(line, given[spec.name].tolist()) for line, given in found], failed


def test_bytes_of_the_standard_input_that_are_no_text_are_one_bad_line(
    flowers: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a serial port gives them where it is opened in the middle of a line.
    given = io.BytesIO(b"\xff\xfe,1\n" + FLOWERS.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given, encoding="utf-8"))
    found, failures = answered(flowers, "-")
    assert [result.row.line for result in found] == [2, 3]
    assert len(failures) == 1
    assert failures[0].startswith("the standard input, line 1: ")


def test_frames_make_inputs_and_a_bad_frame_leaves_its_input_out_alone() -> None:
    lines = [f"{n},{-n}" for n in range(9)] + ["9,9"]
    found, failed = windows(lines)
    assert [line for line, _ in found] == [1, 4, 7]
    assert found[1][1] == [[3, -3], [4, -4], [5, -5]]
    assert failed == [(10, "2 numbers follow, fewer than the 6 of one input.")]
    lines[4] = "4,oops"
    found, failed = windows(lines[:9])
    assert [line for line, _ in found] == [1, 7]
    assert [line for line, _ in failed] == [5]
    # Fractions are no whole numbers, wherever they are.
    assert [line for line, _ in windows(["1,1.5", "1,2", "3,4"])[1]] == [1]


def test_whole_windows_in_a_line_and_lengths_that_vary() -> None:
    assert windows(["0,1,2,3,4,5"])[0] == [(1, [[0, 1], [2, 3], [4, 5]])]
    spec = TensorSpec(name="ids", dtype="int64", shape=(Dim("tokens", max=3),), meaning="ids")
    found, failed = windows(["1,2", "9007199254740993", "1,2,3,4"], spec)
    assert found == [(1, [1, 2]), (2, [9007199254740993])]
    assert failed == [(3, "it has 4 numbers; ids has from 1 to 3.")]


def test_scores_are_shown_as_what_they_are() -> None:
    scores = np.array([0.25, 0.75], np.float32)
    of: dict[str, Any] = {
        "dtype": "float32",
        "shape": (2,),
        "meaning": "any",
        "labels": ("width", "height"),
        "name": "any",
    }
    assert tensor_line(TensorSpec(**of, units="probability"), scores) == "height (75%)"
    assert tensor_line(TensorSpec(**of, units="logit"), scores) == "height (0.75 logit)"
    assert tensor_line(TensorSpec(**of, units="m"), scores) == "width 0.25 m, height 0.75 m"
