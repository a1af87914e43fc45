"""Shapes compiled in processes of their own while a network is served, on a CPU: order, checks, refusals, the cache."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.gpu import compilation, compile_records
from penstock.runtime.gpu.compilation import CompiledBatch
from penstock.runtime.gpu.compile_records import CompileRecords
from penstock.runtime.gpu.compiled_files import compiled_shape_file, refusal
from penstock.runtime.gpu.gpu_network import gpu_network
from penstock.runtime.gpu.graph_cache import GraphShapes, Shape
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.load import Predictor, load

pytestmark = [
    pytest.mark.slow,
    # Those of torch's compiler are its own.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler for a CPU"),
]

APPLICATION = """
import torch
from torch import nn

from penstock import Application, Dim, TensorSpec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids, mask):
        {before}
        return self.out((self.embed(ids) * mask[..., None]).sum(1))


TOKENS = Dim("tokens", max=8, min=2)
app = Application(
    name="net",
    description="A sum of embeddings.",
    inputs={{
        "ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(1, 19)),
        "mask": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="1 where there is a token", limits=(0, 1)),
    }},
    outputs={{"scores": TensorSpec(dtype="float32", shape=(3,), meaning="scores")}},
    model=Net,
)
"""
FP32 = GpuWay(precision="fp32")


class Taker:
    """Takes every network that it is offered, and keeps it."""

    def __init__(self, predictor: Predictor, uses: dict[Shape, int]) -> None:
        self.max_rows = 4
        self.shapes = GraphShapes(getattr(predictor.application.input, "dims", {}).values(), 4)
        self.graph_shapes = uses
        self.taken: dict[Shape, nn.Module] = {}

    def offer(self, shape: Shape, compiled: nn.Module) -> float | None:
        self.taken[shape] = compiled
        return 1.0


def examples(lengths: list[int]) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [{"ids": rng.integers(1, 20, length), "mask": np.ones(length, np.int64)} for length in lengths]


def bundled(folder: Path, before: str = "pass") -> Predictor:
    file = folder / "app.py"
    file.write_text(APPLICATION.format(before=before))
    found = penstock.core.source_files.find_application.find_application(str(file))
    torch.manual_seed(0)
    penstock.Bundle.write(found, found.model(), examples([3, 7, 8, 5]), to=folder / "bundle")
    return load(folder / "bundle")


def compiling(
    predictor: Predictor, place: Path, shapes: list[Shape], uses: dict[Shape, int] | None = None
) -> tuple[CompileRecords, Taker]:
    application, how = predictor.application, Execution(cache=place, cores=1, device="cpu")
    network = gpu_network(predictor.module, application.input, application.output, FP32, "cpu")
    taker = Taker(predictor, dict.fromkeys(shapes, 0) | (uses or {}))
    given: Any = taker
    return CompileRecords(given, network, predictor, how, FP32, place), taker


def no_process(*_given: Any) -> Any:
    raise AssertionError("a compiler was started")


def test_shapes_are_compiled_the_most_used_first_and_come_from_the_cache_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, place = bundled(tmp_path), tmp_path / "cache"
    shapes: list[Shape] = [(4, 8), (1, 8), (2, 2)]
    # One that is much used while two others are compiled takes the place of one that is not.
    ahead, taker = compiling(predictor, place, shapes, {(3, 4): 9})
    found = list(ahead.batches(shapes))
    assert ahead.reason == ""
    assert found == [CompiledBatch(3, 1.0, None), CompiledBatch(4, 1.0, 0), CompiledBatch(1, 1.0, 0)]
    given = examples([7, 6])
    ids, mask = (
        torch.from_numpy(np.stack([np.pad(each[name], (0, 8 - len(each[name]))) for each in [*given, *given]]))
        for name in ("ids", "mask")
    )
    with torch.inference_mode():
        (scores,) = taker.taken[4, 8](ids, mask)
    np.testing.assert_allclose(scores[:2].numpy(), predictor.predict(given), atol=1e-5)
    monkeypatch.setattr(compile_records, "_ShapeCompiler", no_process)
    again, taker = compiling(predictor, place, [(1, 8), (4, 8)])
    assert [batch.rows for batch in again.batches([(4, 8), (1, 8)])] == [4, 1]
    assert set(taker.taken) == {(4, 8), (1, 8)}


def test_a_network_that_cannot_be_recorded_is_named_and_none_of_its_shapes_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, place = bundled(tmp_path, "ids = ids if int(ids.sum()) > 0 else ids * 1"), tmp_path / "cache"
    shapes: list[Shape] = [(4, 8), (1, 8)]
    ahead, taker = compiling(predictor, place, shapes)
    assert list(ahead.batches(shapes)) == []
    assert taker.taken == {}
    assert ahead.reason != ""
    assert refusal(compiled_shape_file(place, FP32, (1, 8))).rstrip(".") == ahead.reason
    monkeypatch.setattr(compile_records, "_ShapeCompiler", no_process)
    again, _ = compiling(predictor, place, shapes)
    assert list(again.batches(shapes)) == []
    assert again.reason == ahead.reason


def test_a_shape_that_answers_otherwise_is_left_out_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, place = bundled(tmp_path), tmp_path / "cache"
    ahead, _ = compiling(predictor, place, [(2, 2), (2, 8)])
    # No golden example is as short as the first one's room.
    assert [batch.rows for batch in ahead.batches([(2, 2), (2, 8)])] == [2, 2]
    forward = compile_records.CompiledNetwork.forward
    monkeypatch.setattr(
        compile_records.CompiledNetwork, "forward", lambda *given: tuple(each + 1 for each in forward(*given))
    )
    for shape in ((2, 2), (2, 8)):
        file = compiled_shape_file(place, FP32, shape)
        assert file.is_file()
        other, taker = compiling(predictor, place, [shape])
        assert list(other.batches([shape])) == []
        assert taker.taken == {}
        assert "differ from the recorded ones" in other.reason
        assert not file.exists()


def test_a_compiler_that_ends_is_said_and_tried_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, place = bundled(tmp_path), tmp_path / "cache"
    shapes: list[Shape] = [(1, 8), (2, 8)]
    with monkeypatch.context() as patch:
        patch.setattr(compilation.sys, "executable", "/bin/false")
        ahead, _ = compiling(predictor, place, shapes)
        assert list(ahead.batches(shapes)) == []
    assert ahead.reason == "the compiler's process ended with status 1"
    assert not any(refusal(compiled_shape_file(place, FP32, shape)) for shape in shapes)
    closed, _ = compiling(predictor, place, shapes)
    closed.close()
    assert list(closed.batches(shapes)) == []
    assert closed.reason == ""


def test_the_largest_batches_come_first_at_every_length_and_the_number_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = bundled(tmp_path)
    given = predictor.application.input
    assert isinstance(given, RecordSpec)
    every = [shape for column in GraphShapes(given.dims.values(), 4).columns() for shape in column]
    ahead, _ = compiling(predictor, tmp_path, every)
    assert ahead.sizes([4, 2, 1]) == [(1, 8), (2, 4), (4, 2), (2, 8), (1, 4), (2, 2), (4, 4), (1, 2)]
    assert ahead.unit == "shapes"
    monkeypatch.setattr(compile_records, "MAX_SHAPES", 3)
    assert ahead.sizes(4) == [(4, 8), (4, 4), (4, 2)]
    assert ahead.unit == "most used shapes"
