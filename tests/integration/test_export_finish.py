"""A network with a finish is exported, checked, and run by ONNX Runtime on a server and on a device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.errors import GoldenMismatch, PackCorrupt, PackError
from penstock.core.finish import Finish
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import TensorSpec
from penstock.device.pack_engine import PackEngine
from penstock.export import pack_check
from penstock.export.pack_graph import write_graph
from penstock.export.pack_writer import export_pack
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import as_found, load
from penstock.runtime.onnx.onnx_cache import cached_graph, onnx_executor
from tests.support.peaks import PEAKS, Heat
from tests.unit.test_finish import pictures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    found = find_application("tests.support.peaks:app")
    return Bundle.write(found, Heat(), pictures(), to=tmp_path_factory.mktemp("peaks") / "bundle")


def test_a_pack_gives_finished_outputs_alone(bundle: Bundle, tmp_path: Path) -> None:
    pack = export_pack(bundle.folder, tmp_path / "pack").pack
    assert pack.sets == bundle.manifest.sets
    graph = onnx.load(pack.model()).graph
    assert [value.name for value in graph.output] == ["places", "scores", "peaks"]
    engine = PackEngine(pack)
    none, equal = (engine.predict({"picture": picture}) for picture in pictures()[:2])
    assert none["places"].shape == (0, 2)
    assert len(equal["scores"]) == PEAKS
    read = read_pack(tmp_path / "pack")
    golden = read.golden()
    moved = golden.outputs.copy()
    moved["places"][2, 0] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(read), "golden", lambda _: replace(golden, outputs=moved))
        with pytest.raises(PackCorrupt, match=r"example 2 from the recorded answer by 1 .* most in 'places'"):
            PackEngine(read)


def test_the_served_graph_is_checked_before_its_finish_too(bundle: Bundle, tmp_path: Path) -> None:
    files = bundle.files
    graph = cached_graph(files, tmp_path, [])
    answers = onnx_executor(files, graph, threads=1).predict(files.golden.inputs)
    assert answers["peaks"].tolist() == files.golden.outputs["peaks"].tolist()
    assert files.golden.network is not None
    other = files.golden.network.copy()
    other["heat"][0] += np.float32(0.1)
    with pytest.raises(GoldenMismatch, match=r"before its finish differ .* in 'heat' of example 0"):
        onnx_executor(replace(files, golden=replace(files.golden, network=other)), graph, threads=1)


class Rounded(nn.Module):
    """Shares of each row, which executors round differently; those of zeros are exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 64, bias=False)

    def forward(self, picture: Tensor) -> Tensor:
        return self.layer(picture).softmax(-1).amax(-1)


class LastBits(nn.Module):
    """Rows that are there or not by the last bits of their scores, as one of two equal neighbours is a peak."""

    def forward(self, share: Tensor) -> dict[str, Tensor]:
        kept_B6 = (share * 2**26) % 4 >= 2
        places_B6 = torch.where(kept_B6, torch.arange(6), 6).sort(-1).values
        score_B6 = torch.where(places_B6 < 6, share.gather(1, places_B6.clamp(max=5)), 0)
        return {"places": places_B6, "scores": score_B6, "count": kept_B6.sum(1)}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of the exporter, in a process of its own elsewhere
def test_rows_are_right_where_torch_makes_them_of_the_numbers_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Dim("count", max=6, min=0)
    application = Application(
        name="last-bits",
        input=TensorSpec(name="picture", dtype="float32", shape=(6, 6), meaning="heights"),
        outputs={
            "places": TensorSpec(dtype="int64", shape=(count,), meaning="rows of the picture"),
            "scores": TensorSpec(dtype="float32", shape=(count,), meaning="their shares"),
        },
        model=Rounded,
        finish=Finish(
            module=LastBits,
            inputs={"share": TensorSpec(dtype="float32", shape=(6,), meaning="largest share of each row")},
            score="scores",
        ),
    )
    folder = tmp_path / "bundle"
    Bundle.write(as_found(application), Rounded(), np.zeros((2, 6, 6), np.float32), to=folder)
    predictor = load(folder, app=application)
    others = list(np.random.default_rng(0).normal(size=(16, 6, 6)).astype(np.float32))
    monkeypatch.setattr(pack_check, "_others", lambda _: others)
    report = write_graph(predictor, tmp_path / "model.onnx")
    with pytest.raises(PackError, match="disagrees with the bundle"):
        pack_check.check_oneshot(predictor, report, tmp_path / "model.onnx")
    # The golden examples must have the recorded rows.
    monkeypatch.setattr(pack_check, "_others", lambda _: [])
    golden = predictor.files.golden
    moved = golden.outputs.copy()
    moved["count"] = 6 - moved["count"]
    other = replace(predictor, files=replace(predictor.files, golden=replace(golden, outputs=moved)))
    with pytest.raises(PackError, match="disagrees with the bundle"):
        pack_check.check_oneshot(other, report, tmp_path / "model.onnx", golden.outputs)
