"""Any network is scored: several tensors, varying lengths, answers in steps, whole signals; and for Spark."""

import pickle
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from penstock import Application, Bundle, Dim, TensorSpec, load, scorer
from penstock.core.errors import ScoreError
from penstock.core.source_files.find_application import find_application
from penstock.score.network import LoadedNetwork
from tests.support.generating import digits, examples
from tests.support.live import live_bundle, offline, sounds
from tests.support.scored import fixed_lists, how_to_run, numbers, run, table_of, write_parquet
from tests.support.serving import write_doubler

HOW = how_to_run(Path())
TOKENS = Dim("tokens", max=50)


class Reader(nn.Module):
    """Sums and the doubles of each token, exact whatever the padding; it notes the room of its batches."""

    rooms: tuple[list[int], list[int]] = ([], [])

    def forward(self, ids: Tensor, vectors: Tensor, scale: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        self.rooms[0].append(ids.shape[1])
        self.rooms[1].append(int(tokens.min()))
        inside = torch.arange(ids.shape[1]) < tokens[:, None]
        total = torch.where(inside, ids, 0).sum(1)
        return {"total": total * scale, "doubled": 2 * ids, "turned": vectors.flip(2), "known": ids > 5}


READER = Application(
    name="reader",
    inputs={
        "ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="ids", limits=(0, 99)),
        "vectors": TensorSpec(dtype="float32", shape=(TOKENS, 2), meaning="vectors"),
        "scale": TensorSpec(dtype="int64", shape=(), meaning="a factor", default=1),
    },
    outputs={
        "total": TensorSpec(dtype="int64", shape=(), meaning="their sum"),
        "doubled": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="twice the ids"),
        "turned": TensorSpec(dtype="float32", shape=(TOKENS, 2), meaning="vectors, turned"),
        "known": TensorSpec(dtype="bool", shape=(TOKENS,), meaning="whether it is known"),
    },
    model=Reader,
)


def sentence(length: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, 99, length), "vectors": rng.integers(0, 9, (length, 2)).astype(np.float32)}


def reader(folder: Path) -> Path:
    found = find_application(f"{__name__}:READER")
    Bundle.write(found, found.model(), [sentence(length, length) for length in (1, 4, 9)], to=folder)
    return folder


def sentences(count: int) -> list[dict[str, Any]]:
    return [sentence(1 + 37 * row % 50, row) for row in range(count)]


def sentence_columns(rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
    if form == "bytes":
        return {name: pa.array([row[name].tobytes() for row in rows]) for name in ("ids", "vectors")}
    nested = pa.list_(pa.list_(pa.float32(), 2) if form == "fixed" else pa.list_(pa.float32()))
    flat = form == "flat"
    vectors = [row["vectors"].reshape(-1).tolist() if flat else row["vectors"].tolist() for row in rows]
    ids = pa.array([row["ids"].tolist() for row in rows], pa.list_(pa.int64()))
    return {"ids": ids, "vectors": pa.array(vectors, pa.list_(pa.float32()) if flat else nested)}


@pytest.mark.parametrize("form", ["nested", "fixed", "flat", "bytes"])
def test_several_tensors_of_varying_length_are_batched_by_length(tmp_path: Path, form: str) -> None:
    network, rows = LoadedNetwork(reader(tmp_path / "bundle"), HOW), sentences(200)
    write_parquet(tmp_path / "in" / "a.parquet", sentence_columns(rows, form), 150)
    Reader.rooms[0].clear()
    Reader.rooms[1].clear()
    run(network, tmp_path / "in", tmp_path / "out", HOW)
    for row, found in zip(rows, table_of(tmp_path / "out").to_pylist(), strict=True):
        assert found["total"] == row["ids"].sum()
        assert found["doubled"] == (2 * row["ids"]).tolist()
        assert found["turned"] == row["vectors"][:, ::-1].tolist()
        assert found["known"] == (row["ids"] > 5).tolist()
    # Batches of 16 in 150 sorted rows of up to 50 tokens: neighbours in length.
    spread = np.array(Reader.rooms[0]) - np.array(Reader.rooms[1])
    assert np.mean(spread) < 8


def test_lengths_that_disagree_or_are_out_of_range_say_why(tmp_path: Path) -> None:
    network, rows = LoadedNetwork(reader(tmp_path / "bundle"), HOW), sentences(8)
    rows[1]["ids"] = rows[1]["ids"][:-1]
    rows[3] = sentence(51, 3)
    rows[4] = sentence(0, 4)
    rows[5]["ids"][0] = 100
    columns = sentence_columns(rows, "flat") | {"scale": pa.array([2] * 7 + [None], pa.int64())}
    write_parquet(tmp_path / "in" / "a.parquet", columns)
    report = run(network, tmp_path / "in", tmp_path / "out", HOW, on_error="null")
    found = table_of(tmp_path / "out").to_pylist()
    assert {row: each["error"] for row, each in enumerate(found) if each["error"]} == {
        1: "vectors has 38 tokens and ids has 37; give both equally long.",
        3: "ids has 51 tokens; it must have from 1 to 50.",
        4: "ids has 0 tokens; it must have from 1 to 50.",
        5: "ids holds 100; it must be from 0 to 99.",
        7: "the row has no 'scale' (null); give a value.",
    }
    assert report.errors == 5
    assert [each["total"] for each in found] == [
        None if each["error"] else 2 * row["ids"].sum() for row, each in zip(rows, found, strict=True)
    ]


def test_answers_that_take_steps(tmp_path: Path) -> None:
    found_app = find_application("tests.support.generating:COUNTER")
    bundle = Bundle.write(found_app, found_app.model(), examples(), to=tmp_path / "bundle")
    rows = [digits(1 + row % 20, row) for row in range(30)]
    write_parquet(tmp_path / "in" / "a.parquet", {"digits": pa.array([row["digits"].tolist() for row in rows])})
    run(LoadedNetwork(bundle.folder, HOW), tmp_path / "in", tmp_path / "out", HOW)
    found, predictor = table_of(tmp_path / "out").to_pylist(), load(bundle.folder)
    for row, each in zip(rows, found, strict=True):
        expected = predictor.predict(row)
        assert each["token"] == expected["token"].tolist()
        assert each["sums"] == expected["sums"].tolist()
    assert len({len(each["token"]) for each in found}) > 2


def test_whole_sounds_of_different_lengths(tmp_path: Path) -> None:
    bundle = live_bundle(tmp_path)
    network = LoadedNetwork(bundle.folder, HOW)
    signals = [sound[: 300 + 333 * at] for at, sound in enumerate(sounds(5, 2000))]
    (tmp_path / "in").mkdir()
    for at, signal in enumerate(signals):
        with wave.open(str(tmp_path / "in" / f"{at}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(signal.tobytes())
    run(network, tmp_path / "in", tmp_path / "out", HOW)
    lists = pa.array([signal.tolist() for signal in signals] + [[]], pa.list_(pa.int16()))
    write_parquet(tmp_path / "lists" / "a.parquet", {"sound": lists})
    report = run(network, tmp_path / "lists", tmp_path / "lists-out", HOW, on_error="null")
    assert report.errors == 1
    for folder in ("out", "lists-out"):
        found = table_of(tmp_path / folder)["scores"].to_pylist()[:5]
        for signal, scores in zip(signals, found, strict=True):
            expected = offline(bundle.folder, signal[None])[0]
            np.testing.assert_allclose(np.array(scores), expected, atol=1e-5)
    with pytest.raises(ScoreError, match="is live, so it has no reply"):
        run(network, tmp_path / "in", tmp_path / "reply", HOW, reply=True)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ScoreError, match="takes whole signals; give sound files, or lists in Parquet"):
        run(network, tmp_path / "a.jsonl", tmp_path / "lines", HOW)


def test_a_signal_whose_answer_is_not_finite_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = LoadedNetwork(live_bundle(tmp_path).folder, HOW)

    def signals(_: LoadedNetwork, given: list[Any]) -> list[Any]:
        return [np.full((2, 2), np.nan if len(each) == 500 else 1, np.float32) for each in given]

    monkeypatch.setattr(LoadedNetwork, "_signals", signals)
    lists = pa.array([[1] * length for length in (400, 500, 600)], pa.list_(pa.int16()))
    write_parquet(tmp_path / "in" / "a.parquet", {"sound": lists})
    report = run(network, tmp_path / "in", tmp_path / "out", HOW, on_error="null")
    found = table_of(tmp_path / "out").to_pylist()
    assert report.errors == 1
    assert [each["error"] for each in found] == [None, "the network's answer holds NaN or infinity.", None]
    assert found[1]["scores"] is None
    with pytest.raises(ScoreError, match="row 1: the network's answer holds NaN or infinity"):
        run(network, tmp_path / "in", tmp_path / "fail", HOW)


def test_whole_signals_are_read_in_small_blocks(tmp_path: Path) -> None:
    assert LoadedNetwork(live_bundle(tmp_path).folder, HOW).block_rows == 256


def test_a_precision_that_a_clock_chooses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match="--precision is 'auto'; choose fp32"):
        LoadedNetwork(tmp_path, replace(HOW, precision="auto"))


# --- for Spark


def test_a_scorer_takes_and_gives_record_batches(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    made = scorer(bundle, keep={"id": pa.int64()}, on_error="null", executor="torch", reply=True)
    assert made.schema.names == ["id", "doubles", "reply", "error"]
    assert made.ddl == "`id` bigint, `doubles` array<float>, `reply` string, `error` string"
    score = pickle.loads(pickle.dumps(made))
    rows = numbers(5000)
    rows[7, 0] = 13
    table = pa.table({"numbers": fixed_lists(rows), "id": pa.array(range(5000)), "other": pa.array(["x"] * 5000)})
    found = list(score(iter(table.to_batches(max_chunksize=4500))))
    assert all(batch.schema == score.schema for batch in found)
    whole = pa.Table.from_batches(found)
    assert whole["id"].to_pylist() == list(range(5000))
    answers = whole["doubles"].to_pylist()
    assert answers[7] is None
    assert whole["error"][7].as_py() == "the network raised ValueError: thirteen."
    good = [row for row in range(5000) if row != 7]
    np.testing.assert_array_equal(np.array([answers[row] for row in good], np.float32), 2 * rows[good])
    assert list(score(iter([]))) == []


def test_a_scorer_says_what_does_not_fit(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    with pytest.raises(ScoreError, match="on_error is 'skip'"):
        scorer(bundle, on_error="skip")
    with pytest.raises(ScoreError, match="the column 'doubles' would be there twice"):
        scorer(bundle, keep={"doubles": pa.int64()})
    batch = pa.RecordBatch.from_pydict({"numbers": fixed_lists(numbers(3)), "id": pa.array([1, 2, 3], pa.int32())})
    with pytest.raises(ScoreError, match="column 'id' is int32, and keep says int64"):
        list(scorer(bundle, keep={"id": pa.int64()}, executor="torch")([batch]))
    with pytest.raises(ScoreError, match="has no column 'x' for the input 'numbers'"):
        list(scorer(bundle, columns={"numbers": "x"}, executor="torch")([batch]))
    made = scorer(bundle, executor="torch", batch=8)
    found = pa.RecordBatch.from_pydict({"numbers": fixed_lists(np.full((1, 4), 17, np.float32))})
    with pytest.raises(ScoreError, match=r"row 0 of a batch: the network's answer holds NaN or infinity\. Mend it"):
        list(made([found]))
    with pytest.raises(ScoreError, match=r"is another bundle \(.*\) than when the scorer was made"):
        list(replace(made, content_hash="0" * 64)([batch]))


def test_the_types_of_spark_hold_every_output() -> None:
    from penstock.score.answers import output_fields

    def kind(dtype: str, *shape: int) -> str:
        spec = TensorSpec(dtype=dtype, shape=shape, meaning="x", name="x")
        return str(output_fields((spec,), live=False, spark=True)[0].type).replace("item", "element")

    assert [kind(dtype) for dtype in ("uint8", "uint16", "uint32", "float16", "bool")] == [
        *("int16", "int32", "int64", "float", "bool")
    ]
    assert kind("float32", 2, 3) == "list<element: list<element: float>>"
    with pytest.raises(ScoreError, match="'x' is uint64, which Spark has no type for"):
        kind("uint64")
