"""The comparison with other servers on a GPU, without a GPU and without a server."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.acceptance.figures import read_figures
from benchmarks.acceptance.server.gpu_peers import vs_best_peer
from benchmarks.models.write import write_bundle
from benchmarks.peers import gpu
from benchmarks.peers.bundle_network import load_network, peer_arguments
from benchmarks.peers.gpu import PACKAGES, TUNINGS, Best, GpuPeer, ratio_of, search
from benchmarks.peers.gpu_network import SIZES, GpuNetwork
from benchmarks.peers.servers import select_servers
from penstock.bench.load import generator as load_module
from penstock.bench.load.generator import Load, LoadResult
from penstock.bench.load.sender import Target
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError

NOWHERE = Target(host="nowhere", port=1, requests=(b"",), answers=None, tolerance=0)


def test_every_peer_has_tunings_that_its_server_takes() -> None:
    assert TUNINGS.keys() == PACKAGES.keys()
    for name, tunings in TUNINGS.items():
        assert len(tunings) >= 2
        for tuning in tunings:
            command = GpuPeer(name=name, device="cpu", tuning=tuning).command("cnn", Path("bundle"), 8000)
            given = peer_arguments(command[command.index("bundle") :])
            assert (given.device, given.max_batch, given.workers) == ("cpu", tuning.max_batch, tuning.workers)
            assert tuning.max_batch <= max(SIZES)
        assert (select_servers([name])[0].folder / "server.py").is_file()


def test_the_network_of_the_peers_gives_the_golden_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    bundle = write_bundle("cnn", tmp_path / "cnn").folder
    golden = read_bundle(bundle).golden
    network = load_network(peer_arguments([str(bundle), "--device=cpu"]))
    assert isinstance(network, GpuNetwork)
    # A second batch, after a larger one: rows of the first must not come back.
    for rows in (slice(0, 8), slice(8, 11)):
        answers = network.answer([chunk.tobytes() for chunk in golden.inputs[rows]])
        given = np.stack([np.frombuffer(answer, np.float32) for answer in answers])
        assert np.abs(given - golden.outputs[rows]).max() <= golden.tolerance


def answering(highest: float, tried: list[float], monkeypatch: pytest.MonkeyPatch, closed: float = 1000.0) -> None:
    def measure(target: Target, load: Load, *, none_answered: bool = False) -> LoadResult:
        if load.rate is not None:
            tried.append(load.rate)
        latency_s = np.full(int(closed * load.seconds), 0.2 if load.rate is not None and load.rate > highest else 0.01)
        counts = dict.fromkeys(("refused", "failed", "wrong", "lost", "checked"), 0)
        return LoadResult(load=load, seconds=load.seconds, latency_s=latency_s, offered=len(latency_s), **counts)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(load_module, "measure", measure)


def test_a_further_tuning_is_dropped_after_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    answering(900, tried, monkeypatch)
    assert search(NOWHERE, 890.0, lambda _: None) == 0
    assert tried == [pytest.approx(1.04 * 890)]


@pytest.mark.parametrize("highest", [700.0, 5000.0])
def test_the_rate_is_found_though_the_closed_loop_misleads(highest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(highest, [], monkeypatch)
    assert highest * 0.95 < search(NOWHERE, 0.0, lambda _: None) <= highest
    assert highest * 0.95 < search(NOWHERE, 0.5 * highest, lambda _: None) <= highest


def test_the_ratio_is_over_the_best_peer() -> None:
    best = {"penstock": Best(3000.0), "mosec": Best(1000.0, TUNINGS["mosec"][0]), "litserve": Best(1500.0)}
    assert ratio_of(best, lambda _: None) == 2.0
    with pytest.raises(BenchError, match="no peer kept the budget"):
        ratio_of({"penstock": Best(3000.0), "mosec": Best()}, lambda _: None)


def test_the_figure_is_there() -> None:
    measure, _, _ = read_figures("server")["gpu.vs_best_peer"].load()
    assert measure is vs_best_peer
