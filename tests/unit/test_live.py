"""Live applications: how one is declared, bundled, verified and run a chunk at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.application import Application, describe
from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.golden import Golden
from penstock.core.errors import ApplicationError, BundleError, GoldenMismatch, InvalidInput, ServeError, TrainError
from penstock.core.machine.version import __version__
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import TensorSpec
from penstock.core.streams.live import Live, events_of, is_sound
from penstock.nn import GRU, CausalConv1d, Sequential
from penstock.nn.streaming import State, Step, map_state
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import first_chunk, make_runnable
from penstock.runtime.load import load, make_network, streaming_executor
from penstock.runtime.onnx.onnx_executor import steady_graph
from penstock.runtime.onnx.streaming_onnx import check_equivalent
from penstock.runtime.streaming_executor import RunStep, StatefulNetwork, StreamingExecutor
from penstock.runtime.whole_signals import run_in_chunks
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.run import train
from tests.support.live import LIVE_PY, live_bundle, sounds, write_live_app

SOUND = TensorSpec(dtype="int16", shape=(320,), meaning="sound")
NUMBER = TensorSpec(dtype="int16", shape=(), meaning="one number")
SCORES = TensorSpec(dtype="float32", shape=(4, 2), meaning="scores", name="scores")


def declared(**changes: Any) -> Application:
    fields: dict[str, Any] = {
        "name": "hark",
        "input": SOUND,
        "output": SCORES,
        "model": ":net",
        "live": Live(rate_hz=8000),
        "chunks": 4,
    }
    return Application(**(fields | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    live_bundle(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chunks": 1}, "chunks=1; give it 2 at least"),
        ({"reply": lambda output: output}, "has a reply; give `Live` its `events`"),
        ({"live": 16_000}, "has live=16000; it must be a Live"),
        (
            {"input": TensorSpec(dtype="int16", shape=(), meaning="one")},
            r"input int16\[\]; a chunk's frames come first",
        ),
        ({"output": TensorSpec(dtype="float32", shape=(), meaning="one")}, "output float32"),
    ],
)
def test_what_is_no_live_application_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        declared(**changes)


@pytest.mark.parametrize("rate_hz", [0, -1, float("inf"), float("nan"), "fast"])
def test_a_rate_is_a_number_of_frames_a_second(rate_hz: Any) -> None:
    with pytest.raises(ApplicationError, match="rate_hz"):
        Live(rate_hz=rate_hz)


@pytest.mark.parametrize("frame_s", [0, -0.02, float("inf"), float("nan"), "20ms"])
def test_the_time_of_an_output_frame_is_a_number_of_seconds(frame_s: Any) -> None:
    with pytest.raises(ApplicationError, match="frame_s"):
        Live(rate_hz=8000, frame_s=frame_s)


def test_what_a_client_may_know_of_it() -> None:
    assert describe(declared())["live"] == {"rate_hz": 8000, "sound": True, "speech": False}
    assert Live(rate_hz=8000).chunk_s(SOUND) == 0.04
    assert not is_sound(SCORES)


def test_by_default_an_event_is_the_output_and_nothing_where_there_is_none() -> None:
    events = events_of(Live(rate_hz=8000))
    assert events(np.ones((1, 2), np.float32), "kept", False) == ([[1.0, 1.0]], "kept")
    assert events(np.ones((0, 2), np.float32), None, True) == (None, None)


def test_a_bundle_keeps_whole_signals_and_the_rate(folder: Path) -> None:
    files = read_bundle(folder / "bundle")
    assert files.manifest.rate_hz == 8000.0
    assert files.golden.inputs.shape == (3, 1000)
    assert files.golden.outputs.shape[0] == 3
    assert files.golden.outputs.shape[2:] == (2,)


def test_a_signal_of_any_length_is_predicted(folder: Path) -> None:
    predictor = load(folder / "bundle")
    assert predictor.predict(sounds(1, 777)[0]).shape == (4, 2)
    assert predictor.predict(sounds(2, 160)).shape[0] == 2
    with pytest.raises(InvalidInput):
        predictor.predict(np.zeros((2, 2, 2), np.int16))


@pytest.mark.parametrize("frames", [1, 79, 320])
def test_chunks_give_what_the_whole_gives(folder: Path, frames: int) -> None:
    predictor = load(folder / "bundle")
    whole = sounds(2, 641)
    executor = streaming_executor(predictor.application, predictor.module, slots=3, max_rows=2)
    np.testing.assert_allclose(run_in_chunks(executor, whole, frames), predictor.predict(whole), atol=1e-5)
    # More signals than rows, in parts.
    many = sounds(5, 400)
    np.testing.assert_allclose(run_in_chunks(executor, many), predictor.predict(many), atol=1e-5)


def test_a_bundle_for_another_rate_is_refused(folder: Path) -> None:
    application = find_application(str(folder / "hark_app.py")).application
    with pytest.raises(BundleError, match=r"a live signal of 8000 frames a second.*now declares.*16000"):
        load(folder / "bundle", app=replace(application, live=Live(rate_hz=16_000)))
    with pytest.raises(BundleError, match="now declares one-shot requests"):
        load(folder / "bundle", app=replace(application, live=None))


def test_a_network_that_cannot_be_run_by_chunks_is_no_live_bundle(tmp_path: Path) -> None:
    text = LIVE_PY.replace("return Sequential(", "return torch.nn.Sequential(")
    found = find_application(str(write_live_app(tmp_path, text)))
    with pytest.raises(ApplicationError, match=r"must make a penstock\.nn\.Streaming"):
        Bundle.write(found, make_network(found), sounds(), to=tmp_path / "bundle")


def test_it_is_served_by_torch_with_as_many_states_as_slots(folder: Path, tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        how = Execution(cache=tmp_path, cores=1, **options)
        return make_runnable(folder / "bundle", how, lambda application: 7)

    runnable = made(choice="torch")
    assert runnable.executor.max_rows == 7
    assert runnable.executor.runs_ahead
    assert first_chunk(runnable.application, runnable.files.golden.inputs).shape == (320,)
    with pytest.raises(ServeError, match=r"ONNX Runtime cannot run .* exact"):
        made(choice="onnx", exact=True)
    with pytest.raises(ServeError, match="a CPU serves fp32 alone"):
        made(precision="bf16")
    if not torch.cuda.is_available():
        with pytest.raises(ServeError, match="this torch sees no GPU"):
            made(device="cuda")


@pytest.mark.thorough
def test_its_exported_step_answers_as_torch_does_and_is_taken_where_it_is_faster(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(choice: str) -> Any:
        how = Execution(cache=tmp_path, cores=1, choice=choice)
        return make_runnable(folder / "bundle", how, lambda application: 7)

    by_onnx = made("onnx")
    (graph,) = tmp_path.glob("*.onnx")
    assert steady_graph(graph).is_file()
    for frames in (320, 200, 7):
        expected = run_in_chunks(made("torch").executor, sounds(), frames)
        np.testing.assert_allclose(run_in_chunks(by_onnx.executor, sounds(), frames), expected, atol=1e-5)
    with caplog.at_level("INFO"):
        made("auto")
    assert "executor of the streams:" in caplog.text
    # A network that was refused is run by torch, and the log says why.
    graph.unlink()
    graph.with_name(f"{graph.stem}-{__version__}.refused").write_text("as it was")
    assert made("auto").executor.max_rows == 7
    assert "torch runs hark, often slower, because ONNX Runtime cannot: as it was" in caplog.text


def stepping(seed: int, run: RunStep | None = None) -> StreamingExecutor:
    torch.manual_seed(seed)
    network = Sequential(CausalConv1d(3, 4, 2), GRU(4, 4))
    chunk = TensorSpec(dtype="float32", shape=(4, 3), meaning="frames")
    given = StatefulNetwork(network, chunk, replace(chunk, shape=(4, 4)), slots=5, run=run)
    return StreamingExecutor(given, max_rows=5)


GOLDEN = Golden(inputs=np.ones((2, 9, 3), np.float32), outputs=np.ones((2, 9, 4), np.float32), tolerance=1e-4)


def test_a_step_that_does_what_the_network_does_is_found_alike() -> None:
    check_equivalent(stepping(0), stepping(0), GOLDEN, slots=5)


def test_a_step_of_another_network_is_found_out() -> None:
    with pytest.raises(GoldenMismatch, match="outputs of the exported step differ"):
        check_equivalent(stepping(0), stepping(1), GOLDEN, slots=5)


def test_a_step_that_changes_who_has_no_frame_is_found_out() -> None:
    torch.manual_seed(0)
    network = Sequential(CausalConv1d(3, 4, 2), GRU(4, 4)).eval()

    def run(chunk_BT: torch.Tensor, length_B: torch.Tensor, state: State, last_B: torch.Tensor) -> Step:
        step = network.step(chunk_BT, length_B, state, last_B)
        return step._replace(
            state=map_state(lambda leaf: leaf + 1e-7 if leaf.is_floating_point() else leaf, step.state)
        )

    with pytest.raises(GoldenMismatch, match="changes the state of a stream that has no new frame"):
        check_equivalent(stepping(0, run), stepping(0), GOLDEN, slots=5)


def test_a_step_that_gives_other_lengths_is_found_out() -> None:
    torch.manual_seed(0)
    network = Sequential(CausalConv1d(3, 4, 2), GRU(4, 4)).eval()

    def run(chunk_BT: torch.Tensor, length_B: torch.Tensor, state: State, last_B: torch.Tensor) -> Step:
        step = network.step(chunk_BT, length_B, state, last_B)
        return step._replace(length_B=step.length_B.clamp(max=3))

    with pytest.raises(GoldenMismatch, match="another number of frames"):
        check_equivalent(stepping(0, run), stepping(0), GOLDEN, slots=5)


def test_whole_signals_of_one_length_are_learned_from(tmp_path: Path) -> None:
    found = find_application(str(write_live_app(tmp_path)))

    def data(frames: int = 800, dtype: type = np.int16) -> Data:
        part = ArraySet(inputs=sounds(8, frames).astype(dtype), targets=np.zeros(8, np.int64))
        return Data(train=part, validation=part)

    def recipe(**options: Any) -> Recipe:
        return Recipe(
            data=lambda: data(**options),
            loss=lambda scores, targets: -scores[:, :, 0].mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            batch_size=4,
            steps=4,
        )

    result = train(found, tmp_path / "run", recipe(), overrides={}, quiet=True)
    assert result.metrics["loss"] < 0.6
    assert load(tmp_path / "run" / "bundle").application.live is not None
    with pytest.raises(TrainError, match="declares int16"):
        train(found, tmp_path / "other", recipe(dtype=np.int32), overrides={}, quiet=True)


class MeanOfAll(Sequential):
    """Subtracts the mean of the whole signal, which a stream does not know yet."""

    def forward(self, whole_BT: torch.Tensor, length_B: torch.Tensor | None = None) -> torch.Tensor:
        outputs = super().forward(whole_BT, length_B)
        return outputs - outputs.mean(1, keepdim=True)


def test_a_live_network_that_cannot_stream_is_refused_before_its_training(tmp_path: Path) -> None:
    declared_net = write_live_app(tmp_path, LIVE_PY.replace("    return Sequential(", "    return MeanOfAll("))
    declared_net.write_text(
        declared_net.read_text().replace(
            "import torch\n", "import torch\nfrom tests.unit.test_live import MeanOfAll\n", 1
        )
    )
    found = find_application(str(declared_net))
    part = ArraySet(inputs=sounds(8), targets=np.zeros(8, np.int64))
    recipe = Recipe(
        data=lambda: Data(train=part, validation=part),
        loss=lambda scores, targets: -scores[:, :, 0].mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        batch_size=4,
        steps=4,
    )
    with pytest.raises(
        TrainError, match="'hark' is live, and its network, before any training, does not give"
    ) as refused:
        train(found, tmp_path / "run", recipe, overrides={}, quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    # Nothing was recorded before, so nothing has changed since.
    assert "join layers that have a `step`" in str(refused.value)
    assert "changed" not in str(refused.value)
    with pytest.raises(ApplicationError, match="does not give the answers of whole signals in chunks") as unwritten:
        Bundle.write(found, found.model(), sounds(8), to=tmp_path / "bundle")
    assert "join layers that have a `step`" in str(unwritten.value)


def test_examples_of_several_lengths_are_refused_with_what_a_live_application_takes(tmp_path: Path) -> None:
    found = find_application(str(write_live_app(tmp_path)))
    with pytest.raises(ApplicationError, match="with any number of frames, as many in each"):
        Bundle.write(found, found.model(), [sounds(1)[0], sounds(1)[0][:-1]], to=tmp_path / "bundle")
