"""Bundles into packs: the same answers, whole or not at all, and a sentence where there is none."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from penstock import Bundle, load
from penstock.cli import build
from penstock.core.errors import PackError
from penstock.core.packs.pack import INT8, MODEL, Pack, read_pack
from penstock.core.packs.signature import new_key
from penstock.core.source_files.find_application import find_application
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from penstock.export import pack_writer
from penstock.export.graph_report import GraphReport
from penstock.export.pack_check import check_live, check_oneshot
from penstock.export.pack_session import PackedNetwork, Validation, packed_session
from penstock.export.pack_writer import ExportResult, export_pack
from penstock.nn.streaming import Streaming
from penstock.runtime.executor import StepInput
from penstock.runtime.load import Predictor, as_streaming, streaming_executor
from penstock.runtime.onnx.exporter_process import run_exporter
from penstock.runtime.whole_signals import run_in_chunks
from tests.support.prepared import pictures as any_size

ONE_SHOT = """
import torch
from torch import nn
from penstock import Application, TensorSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64))
        self.head = nn.Linear(64, 3)

    def embed(self, grey_BHW):
        return self.body(grey_BHW[:, None].float() / 255).relu()

    def forward(self, grey_BHW):
        return self.head(self.embed(grey_BHW))

    def predict(self, grey_BHW):
        return self(grey_BHW).softmax(1)

app = Application(
    name="shapes",
    input=TensorSpec(dtype="uint8", shape=(8, 8), meaning="grey", name="grey"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="share", name="shares", labels=("a", "b", "c")),
    model=":Net",
)
"""

LIVE = """
from torch import nn
from penstock import Application, Live, TensorSpec
from penstock.nn import GRU, CausalConv1d, Lookahead, Sequential

def net():
    hear = CausalConv1d(3, 8, 5), nn.ReLU(), GRU(8, 12), Lookahead(12, 2)
    return Sequential(*hear, nn.Linear(12, 4), nn.LogSoftmax(-1))

app = Application(
    name="gestures",
    input=TensorSpec(dtype="float32", shape=(10, 3), meaning="acceleration", name="motion"),
    output=TensorSpec(dtype="float32", shape=(12, 4), meaning="log-probability", name="moves", labels=tuple("-abc")),
    live=Live(rate_hz=50),
    chunks=4,
    model=":net",
)
"""

NOT_EXPORTABLE = """
import torch
from torch import nn
from penstock import Application, TensorSpec

class Net(nn.Module):
    def forward(self, square_B):
        return torch.linalg.eigvalsh(square_B @ square_B.mT)

app = Application(
    name="modes",
    input=TensorSpec(dtype="float32", shape=(4, 4), meaning="a matrix", name="matrix"),
    output=TensorSpec(dtype="float32", shape=(4,), meaning="its modes", name="modes"),
    model=":Net",
)
"""


def bundle_of(source: str, folder: Path, examples: np.ndarray) -> Path:
    (folder / "app.py").write_text(source)
    found = find_application(str(folder / "app.py"))
    torch.manual_seed(0)
    return Bundle.write(found, found.model(), examples, to=folder / "bundle").folder


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, 8, 8), dtype=np.uint8)


def motions(count: int, frames: int = 47) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, frames, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def shapes_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_of(ONE_SHOT, tmp_path_factory.mktemp("shapes"), pictures(12))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key.pem"
    new_key(file)
    return file


@pytest.fixture(scope="module")
def exported(shapes_bundle: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """The one-shot network with everything that can be asked for."""
    known = Validation(inputs=list(pictures(40)), targets=load(shapes_bundle).predict(pictures(40)).argmax(1))
    to = tmp_path_factory.mktemp("packs") / "shapes"
    return export_pack(shapes_bundle, to, licence="CC0-1.0", key=key, int8=True, validation=lambda _: known)


@pytest.fixture(scope="module")
def gestures_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_of(LIVE, tmp_path_factory.mktemp("gestures"), motions(4))


@pytest.fixture(scope="module")
def gestures(gestures_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return export_pack(gestures_bundle, tmp_path_factory.mktemp("packs") / "gestures").pack


def described(pack: Pack) -> GraphReport:
    """What the process that makes a graph said of the pack of `shapes`."""
    return GraphReport(inputs=pack.inputs, outputs=pack.outputs)


def network(pack: Pack, precision: str = "fp32") -> PackedNetwork:
    return PackedNetwork(pack.model(precision), pack.tensors, live=pack.live)


def test_a_pack_answers_as_its_bundle(exported: ExportResult, shapes_bundle: Path) -> None:
    pack, predictor = exported.pack, load(shapes_bundle)
    golden = pack.golden()
    assert exported.difference <= 1e-5
    np.testing.assert_allclose(network(pack).answers(golden.inputs), golden.outputs, atol=1e-5)
    unseen = pictures(30)[20:]
    for picture, expected in zip(unseen, predictor.predict(unseen), strict=True):
        answer, embedding = network(pack).answer(picture)
        np.testing.assert_allclose(answer, expected, atol=1e-5)
        own: Any = predictor.module
        np.testing.assert_allclose(embedding, own.embed(torch.from_numpy(picture[None])).detach()[0], atol=1e-5)
    assert [output.name for output in pack.outputs] == ["shares", "embedding"]
    assert (pack.kind, pack.licence, pack.live) == ("oneshot", "CC0-1.0", None)
    assert pack.made["bundle"] == predictor.files.manifest.content_hash


def test_the_graph_has_the_shapes_that_the_pack_names(exported: ExportResult, gestures: Pack) -> None:
    session = packed_session(exported.pack.model())
    assert [(given.name, given.type, given.shape) for given in session.get_inputs()] == [
        ("grey", "tensor(uint8)", [1, 8, 8])
    ]
    assert [made.shape for made in session.get_outputs()] == [[1, 3], [1, 64]]
    assert gestures.live is not None
    session = packed_session(gestures.model())
    shapes = {value.name: tuple(value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    assert shapes.pop("motion") == (1, 10, 3)
    assert shapes.pop("moves") == (1, 12, 4)
    assert [shapes.pop(name) for name in ("length", "last", "output_length")] == [(1,)] * 3
    for state in gestures.live.states:
        assert shapes.pop(state.input) == shapes.pop(state.output) == state.shape
    assert shapes == {}


@pytest.mark.thorough
def test_pictures_of_any_size_go_into_the_graph_as_they_are(pictures_pack: tuple[Pack, Path]) -> None:
    pack, bundle = pictures_pack
    (given,) = packed_session(pack.model()).get_inputs()
    assert (given.type, given.shape[2:]) == ("tensor(uint8)", [4])
    assert all(isinstance(size, str) for size in given.shape[:2])
    predictor = load(bundle)
    assert 2 <= len(pack.golden().inputs) == pack.golden_count <= len(predictor.files.golden.raws)
    np.testing.assert_allclose(network(pack).answers(pack.golden().inputs), pack.golden().outputs, atol=1e-5)
    for picture in any_size((1, 1), (7, 300), (211, 64), (64, 211), (599, 600)):
        np.testing.assert_allclose(network(pack).answer(picture)[0], predictor.predict(picture), atol=1e-5)
    # What is prepared is not of 8 bits.
    quantized = onnx.load(pack.folder / "model-int8.onnx").graph.node if INT8 in pack.models else ()
    assert not [node.name for node in quantized if node.op_type == "QuantizeLinear" and "prepare" in node.name]


def test_each_pack_is_an_app_of_its_own_name(exported: ExportResult) -> None:
    manifest = json.loads((exported.pack.folder / "web" / "manifest.webmanifest").read_bytes())
    assert (manifest["name"], manifest["short_name"]) == ("shapes", "shapes")
    assert manifest["icons"]
    assert "id" not in manifest
    assert "web/manifest.webmanifest" in exported.pack.files


def test_8_bits_are_measured_beside_fp32(exported: ExportResult) -> None:
    pack = exported.pack
    assert "int8: " in exported.int8
    said = re.search(r"embeddings with a cosine of (0\.9\d\d|1\.000) or more to those of fp32\.", exported.int8)
    assert said, exported.int8
    fp32, int8 = pack.models["fp32"], pack.models[INT8]
    assert pack.model(INT8).stat().st_size < pack.model().stat().st_size
    assert fp32.accuracy == 1
    assert int8.accuracy is not None
    assert int8.accuracy >= 0.99
    assert min(fp32.ms, int8.ms) > 0
    types = {node.op_type for node in onnx.load(pack.model(INT8)).graph.node}
    assert "QuantizeLinear" in types
    assert np.abs(network(pack, INT8).answers(pack.golden().inputs) - pack.golden().outputs).max() < 0.05


def test_a_signed_pack_is_its_makers(exported: ExportResult, key: Path, tmp_path: Path) -> None:
    folder = exported.pack.folder
    assert exported.pack.signed_by is not None
    assert read_pack(folder, exported.pack.signed_by)
    with pytest.raises(PackError, match="not by"):
        read_pack(folder, new_key(tmp_path / "other.pem"))


def test_only_packs_are_replaced(exported: ExportResult, shapes_bundle: Path, tmp_path: Path) -> None:
    def refused(said: str) -> None:
        with pytest.raises(PackError, match=said):
            export_pack(shapes_bundle, tmp_path / "place")

    place = tmp_path / "place"
    place.write_text("a file")
    refused("is a file")
    place.unlink()
    place.mkdir()
    (place / "thesis.txt").write_text("")
    refused("not empty and no pack")
    (place / PACK_DESCRIPTION).write_bytes((exported.pack.folder / PACK_DESCRIPTION).read_bytes())
    refused("a pack that is damaged")
    shutil.copytree(exported.pack.folder, place, dirs_exist_ok=True)
    refused(r"thesis\.txt")
    (place / "thesis.txt").unlink()
    (place / "index").mkdir()
    refused("holds an index")
    with pytest.raises(PackError, match="cannot be read"):
        export_pack(shapes_bundle, tmp_path / "other", key=tmp_path / "none.pem")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["place"]


def test_an_index_that_is_made_meanwhile_is_kept(
    exported: ExportResult, shapes_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    shutil.copytree(exported.pack.folder, place)

    def meanwhile(files: object, to: Path, options: object) -> GraphReport:
        """The graph that was exported before, which takes seconds to make."""
        (place / "index").mkdir()
        shutil.copy(exported.pack.model(), to)
        return described(exported.pack)

    monkeypatch.setattr(pack_writer, "_write_graph", meanwhile)
    with pytest.raises(PackError, match="holds an index"):
        export_pack(shapes_bundle, place)
    assert (place / "index").is_dir()


def test_what_is_ended_leaves_nothing(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    # The network is not made while there is something in the folder, so that the export is not over before the signal.
    wait = f"while any(__import__('pathlib').Path({str(tmp_path)!r}).iterdir()): __import__('time').sleep(0.02)"
    source = ONE_SHOT.replace("super().__init__()", f"super().__init__()\n        {wait}")
    bundle = bundle_of(source, tmp_path_factory.mktemp("waiting"), pictures(12))
    command = [sys.executable, "-m", "penstock", "export", str(bundle)]
    with subprocess.Popen([*command, "--out", str(tmp_path / "pack")]) as exporting:
        while not list(tmp_path.iterdir()):
            assert exporting.poll() is None
            time.sleep(0.01)
        exporting.terminate()
        assert exporting.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_graph_that_cannot_be_written_is_no_fault_of_the_network(shapes_bundle: Path) -> None:
    failure = run_exporter("penstock.export.pack_graph", shapes_bundle, Path("/dev/full"))
    assert failure is not None
    assert "cannot be written (No space left on device); mend that" in failure.reason
    assert not failure.not_exportable


def test_a_disk_that_is_full_is_said_in_words(
    shapes_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        # As copytree raises it, of each file.
        raise shutil.Error([("a.js", "b.js", "[Errno 28] No space left on device: 'a.js' -> 'b.js'")] * 2)

    monkeypatch.setattr(pack_writer, "_write_graph", full)
    with pytest.raises(PackError, match=r"pack cannot be written \(No space left on device\); mend that or choose"):
        export_pack(shapes_bundle, tmp_path / "pack")


def test_a_network_that_onnx_cannot_say(tmp_path: Path) -> None:
    bundle = bundle_of(NOT_EXPORTABLE, tmp_path, np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32))
    said = CliRunner().invoke(build(), ["export", str(bundle), "--out", str(tmp_path / "pack")]).exception
    assert isinstance(said, PackError)
    assert "uses aten._linalg_eigh, which has no equivalent in ONNX; write that part with other" in str(said)
    assert not (tmp_path / "pack").exists()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_a_graph_that_answers_otherwise_is_refused(exported: ExportResult, shapes_bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(exported.pack.model())
    weights = next(
        entry for entry in model.graph.initializer if entry.name == "model.head.weight" or entry.dims == [3, 64]
    )
    values = onnx.numpy_helper.to_array(weights).copy()
    values[0, 0] += 1
    weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
    onnx.save(model, tmp_path / MODEL)
    predictor = load(shapes_bundle)
    said = described(exported.pack)
    assert check_oneshot(predictor, said, exported.pack.model()) <= 1e-5
    with pytest.raises(PackError, match="disagrees with the bundle, so no pack is written: it differs by"):
        check_oneshot(predictor, said, tmp_path / MODEL)


def networks_of(bundle: Path) -> tuple[Predictor, Streaming]:
    predictor = load(bundle)
    return predictor, as_streaming(predictor.application, predictor.module)


def test_a_live_graph_that_answers_otherwise_is_refused(gestures: Pack, gestures_bundle: Path, tmp_path: Path) -> None:
    predictor, streaming = networks_of(gestures_bundle)
    assert check_live(predictor, streaming, gestures.model()) <= 1e-5
    model = onnx.load(gestures.model())
    for entry in model.graph.initializer:
        values = onnx.numpy_helper.to_array(entry)
        if values.dtype == np.float32 and values.ndim == 2:
            entry.CopyFrom(onnx.numpy_helper.from_array((values * 1.01).astype(np.float32), entry.name))
    onnx.save(model, tmp_path / MODEL)
    with pytest.raises(PackError, match="disagrees with the bundle"):
        check_live(predictor, streaming, tmp_path / MODEL)


@pytest.mark.parametrize("moves", [(1, 3), (2, 4)])
def test_a_stream_moves_to_the_pack_and_back(gestures: Pack, gestures_bundle: Path, moves: tuple[int, int]) -> None:
    """Begun on what a server runs, carried on by the pack, ended on the server: as if nothing had happened."""
    assert gestures.live is not None
    predictor = load(gestures_bundle)
    (signal,) = motions(1)
    chunk = gestures.live.chunk

    def server() -> Any:
        return streaming_executor(predictor.application, predictor.module, slots=5, max_rows=2)

    whole = run_in_chunks(server(), signal[None])[0]
    begun, ended = server(), server()
    session = packed_session(gestures.model())
    outputs: list[np.ndarray] = []
    states: dict[str, np.ndarray] = {}
    for number, start in enumerate(range(0, len(signal), chunk)):
        part = signal[start : start + chunk]
        padded = np.zeros((1, chunk, 3), np.float32)
        padded[0, : len(part)] = part
        length, last = np.array([len(part)]), np.array([start + chunk >= len(signal)])
        if number == moves[0]:
            saved = begun.states.save(4)
            names = [state.input for state in gestures.live.states]
            states = {name: leaf.numpy()[None] for name, leaf in zip(names, saved, strict=True)}
        if number == moves[1]:
            ended.states.restore(3, [torch.from_numpy(states[state.input])[0] for state in gestures.live.states])
        if moves[0] <= number < moves[1]:
            output, frames, *after = session.run(None, {"motion": padded, "length": length, "last": last, **states})
            states = {state.input: leaf for state, leaf in zip(gestures.live.states, after, strict=True)}
        else:
            slot, executor = (4, begun) if number < moves[0] else (3, ended)
            fresh = np.array([number == 0])
            batch = StepInput(slots_B=np.array([slot]), chunk_B=padded, length_B=length, fresh_B=fresh, last_B=last)
            result = executor.step(batch)
            output, frames = result.output_B, result.length_B
        outputs.append(output[0, : int(frames[0])].copy())
    np.testing.assert_allclose(np.concatenate(outputs), whole, atol=1e-4)


def test_whole_signals_through_the_pack(gestures: Pack) -> None:
    golden = gestures.golden()
    np.testing.assert_allclose(network(gestures).answers(golden.inputs), golden.outputs, atol=1e-5)


def test_the_command_says_what_it_did(gestures_bundle: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(build(), ["export", "--new-key", str(tmp_path / "key.pem")])
    assert made.exit_code == 0
    assert "Public key in base64: " in made.output
    unnamed = runner.invoke(build(), ["export", str(gestures_bundle)])
    assert isinstance(unnamed.exception, PackError)
    assert "--out" in str(unnamed.exception)
