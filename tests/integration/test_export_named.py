"""Several named tensors and varying lengths in a pack: the graph, the Python engine, and verify in all places."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from penstock import load
from penstock.cli import build
from penstock.core.errors import PackError
from penstock.core.packs.pack import Pack, read_pack
from penstock.device.pack_engine import PackEngine
from penstock.export.graph_report import GraphReport
from penstock.export.int8 import quantize
from penstock.export.pack_check import check_oneshot
from penstock.export.pack_session import packed_session
from penstock.export.pack_writer import export_pack
from tests.support.named import BOXES, LENGTHS, LONGEST, PREPARED, SIGNAL, TABLE, bundle_of, shared_mood, text
from tests.support.page import url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return shared_mood(tmp_path_factory)[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_mood(tmp_path_factory)[1]


@pytest.fixture(scope="module")
def engine(pack: Pack) -> PackEngine:
    return PackEngine(pack)


def test_the_description_and_the_graph_name_every_tensor(pack: Pack) -> None:
    fields = json.loads((pack.folder / "pack.json").read_bytes())
    tokens = {"name": "tokens", "max": LONGEST, "min": 1}
    assert [(given["name"], given["shape"], given["limits"]) for given in fields["inputs"]] == [
        ("input_ids", [tokens], [0, 49]),
        ("attention_mask", [tokens], [0, 1]),
    ]
    assert [(made["name"], made["shape"]) for made in fields["outputs"]] == [("mood", [3]), ("tags", [tokens, 4])]
    assert (fields["answers"], fields["schema_version"], fields["golden"]["count"]) == (2, 2, len(LENGTHS))
    session = packed_session(pack.model())
    assert {given.name: given.shape for given in session.get_inputs()} == {
        "input_ids": [1, "tokens"],
        "attention_mask": [1, "tokens"],
        "tokens": [1],
    }
    assert {made.name: made.shape for made in session.get_outputs()} == {"mood": [1, 3], "tags": [1, "tokens", 4]}
    assert pack.models["fp32"].agreement == 1


def test_the_golden_examples_have_several_lengths(pack: Pack) -> None:
    golden = pack.golden()
    assert [int(given["tokens"]) for given in golden.inputs] == list(LENGTHS)
    assert golden.outputs["tokens"].tolist() == list(LENGTHS)


def test_the_python_engine_answers_as_the_bundle_at_every_length(engine: PackEngine, bundle: Path) -> None:
    predictor = load(bundle)
    for tokens in range(1, LONGEST + 1):
        given = text(tokens, seed=9)
        expected = predictor.predict(given)
        for inputs in (given, {name: array.tolist() for name, array in given.items()}):
            found = engine.predict(inputs)
            assert {name: array.shape for name, array in found.items()} == {"mood": (3,), "tags": (tokens, 4)}
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, atol=1e-5)


def test_every_place_gives_the_same_by_tensor(bundle: Path, pack: Pack) -> None:
    with RunningServer(bundle) as server:
        command = ["verify", str(bundle), "--pack", str(pack.folder), "--server", url_of(server)]
        said = CliRunner().invoke(build(), command, env={"COLUMNS": "160"})
    assert said.exit_code == 0, (said.output, said.exception)
    for place in ("server", "Python engine", "web app"):
        rows = [line for line in said.output.splitlines() if f" {place} " in line]
        assert len(rows) == 2
        assert [tensor for tensor in ("mood", "tags") if any(f" {tensor} " in row for row in rows)] == ["mood", "tags"]
        assert all(f" {len(LENGTHS)} " in row for row in rows)
    command = ["verify", str(bundle), "--pack", str(pack.folder), "--no-browser", "--tolerance", "0"]
    assert CliRunner().invoke(build(), command).exit_code == 1


def test_a_graph_that_answers_otherwise_at_some_length_is_refused(pack: Pack, bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(pack.model())
    # Of the texts of one length alone another answer.
    names = {made.name for made in model.graph.output}
    for node in model.graph.node:
        for at, name in enumerate(node.output):
            if name == "mood":
                node.output[at] = "true_mood"
    constants = {"limit": np.array([20]), "one": np.array([1.0], np.float32), "nothing": np.array([0.0], np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    model.graph.node.extend(
        [
            onnx.helper.make_node("Greater", ["tokens", "limit"], ["is_long"]),
            onnx.helper.make_node("Where", ["is_long", "one", "nothing"], ["more"]),
            onnx.helper.make_node("Add", ["true_mood", "more"], ["mood"]),
        ]
    )
    assert names == {"mood", "tags"}
    onnx.save(model, tmp_path / "model.onnx")
    predictor = load(bundle)
    report = GraphReport(inputs=pack.inputs, outputs=pack.outputs, answers=pack.answers)
    assert check_oneshot(predictor, report, pack.model()) < 1e-3
    with pytest.raises(PackError, match="disagrees with the bundle, so no pack is written: it differs by"):
        check_oneshot(predictor, report, tmp_path / "model.onnx")


def test_8_bits_are_refused_in_a_sentence(pack: Pack) -> None:
    report = GraphReport(inputs=pack.inputs, outputs=pack.outputs, answers=pack.answers)
    models, said = quantize(report, pack.model(), pack.models["fp32"], pack.golden(), None)
    assert list(models) == ["fp32"]
    assert said.startswith("int8 was not tried: ")


def test_watch_refuses_text_before_it_opens_a_camera(pack: Pack) -> None:
    said = CliRunner().invoke(build(), ["watch", str(pack.folder), "--source", "/no/camera"]).exception
    assert isinstance(said, PackError)
    assert "takes input_ids: int64[tokens<=24], attention_mask: " in str(said)
    assert "not pictures of any size; name a .csv, .npy or .npz file, or - for lines" in str(said)


def test_recurrent_layers_and_attention_at_every_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    examples = [{"sensors": rng.normal(size=(hours, 3)).astype(np.float32)} for hours in (2, 7, 40)]
    bundle = bundle_of(SIGNAL, tmp_path, examples)
    pack = export_pack(bundle, tmp_path / "pack").pack
    engine, predictor = PackEngine(pack), load(bundle)
    for hours in range(2, 41):
        given = {"sensors": rng.normal(size=(hours, 3)).astype(np.float32)}
        found = engine.predict(given)
        for name, expected in predictor.predict(given).items():
            np.testing.assert_allclose(found[name], expected, atol=1e-5)
    # Not the sizes of the example that was traced.
    shapes = {made.name: made.shape for made in packed_session(pack.model()).get_outputs()}
    assert not any(isinstance(size, int) for shape in shapes.values() for size in shape[1:2]), shapes


def test_a_length_that_no_input_has(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (8, 4, 4), dtype=np.uint8)
    pictures[:, 0, 0] = np.arange(8)
    bundle = bundle_of(BOXES, tmp_path, pictures)
    pack = export_pack(bundle, tmp_path / "pack").pack
    engine, predictor = PackEngine(pack), load(bundle)
    for picture in pictures:
        expected, found = predictor.predict(picture), engine.predict({"grey": picture})
        assert found["corners"].shape == (picture[0, 0] % 7, 4)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=1e-5)
        assert [array.shape for array in engine.run(picture)] == [array.shape for array in found.values()]
    command = ["verify", str(bundle), "--pack", str(pack.folder)]
    said = CliRunner().invoke(build(), command, env={"COLUMNS": "160"})
    assert said.exit_code == 0, (said.output, said.exception)
    assert said.output.count("web app") == 2


def test_pictures_of_any_size_with_several_outputs(tmp_path: Path) -> None:
    pictures = [np.random.default_rng(rows).integers(0, 255, (rows, 9, 4), dtype=np.uint8) for rows in (1, 8, 20)]
    bundle = bundle_of(PREPARED, tmp_path, pictures)
    pack = export_pack(bundle, tmp_path / "pack").pack
    engine, predictor = PackEngine(pack), load(bundle)
    for picture in pictures:
        expected, found = predictor.predict(picture), engine.predict({"raw": picture})
        assert list(found) == ["kind", "place"]
        for name, array in zip(found, engine.run(picture), strict=True):
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
            np.testing.assert_array_equal(found[name], array)
    said = CliRunner().invoke(build(), ["verify", str(bundle), "--pack", str(pack.folder)], env={"COLUMNS": "160"})
    assert said.exit_code == 0, (said.output, said.exception)
    assert said.output.count("web app") == 2


def table(rows: int, cols: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(10 * rows + cols)
    places = rng.normal(size=(cols, 2)).astype(np.float32)
    return {"counts": rng.integers(-9, 9, rows).astype(np.int32), "places": places, "scale": np.array(cols, np.float32)}


def test_two_lengths_one_of_them_0_and_single_numbers(tmp_path: Path) -> None:
    bundle = bundle_of(TABLE, tmp_path, [table(3, 3), table(0, 1), table(1, 3), table(2, 2)])
    pack = export_pack(bundle, tmp_path / "pack").pack
    shapes = {given.name: given.shape for given in packed_session(pack.model()).get_inputs()}
    assert shapes == {"counts": [1, "rows"], "places": [1, "cols", 2], "scale": [1], "rows": [1], "cols": [1]}
    engine, predictor = PackEngine(pack), load(bundle)
    for rows in range(4):
        for cols in range(1, 4):
            given = table(rows, cols)
            expected, found = predictor.predict(given), engine.predict(given)
            for name, array in expected.items():
                assert found[name].shape == {"outer": (rows, cols), "number": (), "sums": (rows,)}[name]
                np.testing.assert_allclose(found[name], array, atol=1e-5)
    said = CliRunner().invoke(build(), ["verify", str(bundle), "--pack", str(pack.folder)], env={"COLUMNS": "160"})
    assert said.exit_code == 0, (said.output, said.exception)
    assert said.output.count("web app") == 3


def test_the_pack_is_read_again_as_it_was_written(pack: Pack) -> None:
    assert read_pack(pack.folder).to_json() == pack.to_json()
