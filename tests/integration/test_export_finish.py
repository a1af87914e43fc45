"""A network with a finish is exported, checked, and run by ONNX Runtime on a server and on a device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.core.errors import GoldenMismatch, PackCorrupt
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import find_application
from penstock.device.pack_engine import PackEngine
from penstock.export.pack_writer import export_pack
from penstock.runtime.bundle_writer import Bundle
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
