"""The breakdown of a step's time: from intervals that are made up, and from real steps on the CPU."""

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.errors import TrainError
from penstock.kernels.peer_memory import KERNELS
from penstock.train.callbacks.callback import Started
from penstock.train.callbacks.dispatch import Callbacks
from penstock.train.history import History
from penstock.train.loop import Loop
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.parallel.world import World
from penstock.train.profile.intervals import Span
from penstock.train.profile.kernel_trace import ASIDE, BATCH, STEP, read_trace
from penstock.train.profile.profiler import WARM_UP_STEPS, Profile
from penstock.train.profile.step_time import Shares, StepTimeBreakdown, Trace, Work, breakdown_of
from penstock.train.profile.timeline import draw_timeline
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.report.progress import Progress
from penstock.train.trainer import Trainer
from tests.support.profiled import profiled


def work(name: str, start: int, end: int, lane: str = "stream 7") -> Work:
    kind = "collective" if "nccl" in name else "copy" if "HtoD" in name else "compute"
    return Work(name=name, lane=lane, kind=kind, span=Span(start, end))


def trace(*does: Work, rank: int = 0, steps: tuple[Span, ...] = (Span(0, 100),), waits: tuple[Span, ...] = ()) -> Trace:
    return Trace(rank=rank, steps=steps, work=does, waits=waits)


def shares_of(*traces: Trace) -> list[list[int]]:
    breakdown = breakdown_of(traces, device="a GPU", batch_size=64)
    return [[*shares[0].parts.values(), shares[0].overlapped_ns] for shares in breakdown.shares]


#            compute communication imbalance input launch overlapped
@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (trace(), [0, 0, 0, 0, 100, 0]),
        (trace(work("gemm", 0, 100)), [100, 0, 0, 0, 0, 0]),
        (trace(work("gemm", -20, 30), work("gemm", 90, 120)), [40, 0, 0, 0, 60, 0]),
        # Nested, overlapping, in two streams: time counts once.
        (trace(work("a", 10, 60), work("b", 20, 30), work("c", 50, 80, "stream 9")), [70, 0, 0, 0, 30, 0]),
        # A collective half hidden: what is left is exposed, and one process alone waits for nobody.
        (trace(work("gemm", 0, 50), work("nccl_sum", 30, 80)), [50, 30, 0, 0, 20, 20]),
        # Waiting for a batch counts where nothing runs, and so does its copy.
        (trace(work("gemm", 0, 50), waits=(Span(40, 70),)), [50, 0, 0, 20, 30, 0]),
        (trace(work("gemm", 0, 50), work("Memcpy HtoD", 45, 60)), [50, 0, 0, 10, 40, 0]),
        (trace(work("gemm", 0, 50), work("nccl_sum", 50, 70), waits=(Span(60, 80),)), [50, 20, 0, 10, 20, 0]),
    ],
)
def test_a_step_is_split(one: Trace, expected: list[int]) -> None:
    assert shares_of(one) == [expected]


def test_who_came_last_waited_for_nobody_and_clocks_do_not_matter() -> None:
    slow = trace(work("gemm", 0, 60), work("nccl_sum", 60, 80))
    # Its clock is 1,000 ahead; its collective began 30 before the other's.
    fast = trace(work("gemm", 1000, 1030), work("nccl_sum", 1030, 1080), rank=1, steps=(Span(1000, 1100),))
    assert shares_of(slow, fast) == [[60, 20, 0, 0, 20, 0], [30, 20, 30, 0, 20, 0]]


def test_the_kth_collective_of_a_name_is_the_same_in_all() -> None:
    # Two streams of collectives, which each process may begin in another order.
    one = trace(work("nccl_a", 0, 40), work("nccl_b", 50, 60, "stream 9"), work("nccl_a", 60, 70))
    other = trace(work("nccl_b", 0, 20, "stream 9"), work("nccl_a", 20, 30), work("nccl_a", 60, 100), rank=1)
    assert shares_of(one, other) == [[0, 30, 30, 0, 40, 0], [0, 30, 40, 0, 30, 0]]


def test_what_waits_while_another_collective_moves_bytes_is_moving() -> None:
    one = trace(work("nccl_a", 0, 50), work("nccl_b", 0, 50, "stream 9"))
    other = trace(work("nccl_a", 40, 50), work("nccl_b", 0, 50, "stream 9"), rank=1)
    assert shares_of(one, other) == [[0, 50, 0, 0, 50, 0], [0, 50, 0, 0, 50, 0]]


def test_processes_that_did_other_things_are_refused() -> None:
    with pytest.raises(TrainError, match="rank 1 ran 0 of the collective 'nccl_sum' and rank 0 1"):
        shares_of(trace(work("nccl_sum", 0, 1)), trace(rank=1))
    with pytest.raises(TrainError, match=r"the traces are of \[1, 2\] steps"):
        shares_of(trace(), trace(rank=1, steps=(Span(0, 1), Span(1, 2))))


def breakdown() -> StepTimeBreakdown:
    shares = Shares(
        compute_ns=6_000_000,
        communication_ns=1_500_000,
        imbalance_ns=500_000,
        input_ns=0,
        launch_ns=2_000_000,
        overlapped_ns=7,
    )
    return StepTimeBreakdown(
        device="a GPU", batch_size=64, shares=((shares, shares), (shares, shares)), undisturbed_ms=9.5
    )


def test_people_get_a_table_and_programs_plain_fields() -> None:
    said = breakdown().describe().splitlines()
    assert said[0] == "2 steps of 64 examples on a GPU: 10.00 ms each; 9.50 ms without the profiler."
    assert said[1].split() == ["step", "compute", "communication", "imbalance", "input", "launch", "overlapped"]
    assert said[2].split()[:6] == ["rank", "0", "10.00", "ms", "6.00", "ms"]
    assert said[4].split()[0] == "mean"
    assert [line.split(":")[0] for line in said[5:]] == ["communication 15%", "launch 20%"]
    fields = json.loads(json.dumps(breakdown().as_json()))
    assert fields["fractions"] == {
        "compute": 0.6,
        "communication": 0.15,
        "imbalance": 0.05,
        "input": 0.0,
        "launch": 0.2,
    }
    step = fields["ranks"][1][0]
    parts = ("compute", "communication", "imbalance", "input", "launch")
    assert sum(step[f"{name}_ns"] for name in parts) == step["wall_ns"] == 10_000_000


def event(name: str, cat: str, start_us: float, end_us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": end_us - start_us, "tid": 1, "args": args}


def mark(name: str, start_us: float, end_us: float) -> dict[str, Any]:
    return event(name, "user_annotation", start_us, end_us)


def on_a_gpu() -> dict[str, Any]:
    """Three steps whose device runs behind its host, a validation before the last one."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            mark(BATCH, 0, 1), mark(STEP, 1, 3), mark(BATCH, 3, 4), mark(STEP, 4, 6),
            mark(ASIDE, 50, 80), mark(BATCH, 80, 85), mark(STEP, 85, 90),
            event("cudaGraphLaunch", "cuda_runtime", 2, 2.5, correlation=1),
            event("cudaGraphLaunch", "cuda_runtime", 5, 5.5, correlation=2),
            event("cudaLaunchKernel", "cuda_runtime", 60, 60.5, correlation=3),
            event("cuLaunchKernelEx", "cuda_driver", 86, 86.25, correlation=4),
            event("gemm", "kernel", 3, 20, correlation=1, stream=7),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 18, 22.125, correlation=1, stream=9),
            event("gemm", "kernel", 24, 40, correlation=2, stream=7),
            event("evaluate", "kernel", 61, 70, correlation=3, stream=7),
            event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 84, 88, correlation=99, stream=11),
            event("gemm", "kernel", 89, 99.5, correlation=4, stream=7),
            event(STEP, "gpu_user_annotation", 3, 22, stream=7),
        ]
    }  # fmt: skip


def test_steps_are_what_the_device_did_for_them() -> None:
    read = read_trace(on_a_gpu(), 3, on_gpu=True, before=1)
    # The first is only there to say when the second began; the last began when the validation was over.
    assert read.steps == (Span(22_125, 40_000), Span(80_000, 99_500))
    assert {one.lane for one in read.work} == {"stream 7", "stream 9", "stream 11"}
    assert [one.kind for one in read.work] == ["compute", "collective", "compute", "compute", "copy", "compute"]
    first, last = breakdown_of([read], device="", batch_size=1).shares[0]
    assert first.parts == {"compute": 16_000, "communication": 0, "imbalance": 0, "input": 0, "launch": 1_875}
    assert last.parts == {"compute": 10_500, "communication": 0, "imbalance": 0, "input": 8_000, "launch": 1_000}
    assert pickle.loads(pickle.dumps(read)) == read


@pytest.mark.parametrize("name", KERNELS)
def test_what_goes_over_gpus_own_memory_is_a_collective(name: str) -> None:
    written = on_a_gpu()
    written["traceEvents"].append(event(name, "kernel", 90, 101.5, correlation=4, stream=8))
    read = read_trace(written, 0, on_gpu=True, before=1)
    last = breakdown_of([read], device="", batch_size=1).shares[0][-1]
    assert (last.parts["compute"], last.parts["communication"], last.overlapped_ns) == (10_500, 2_000, 9_500)


def test_on_a_cpu_an_operation_that_waits_in_a_collective_computes_nothing() -> None:
    events = [
        mark(BATCH, 0, 4),
        event("aten::empty", "cpu_op", 1, 2),
        mark(STEP, 4, 40),
        event("autograd::engine", "cpu_op", 5, 30),
        event("c10d::allreduce_", "cpu_op", 10, 20),
        event("gloo:all_reduce", "cpu_op", 28, 35) | {"tid": 2},
    ]
    read = read_trace({"traceEvents": events}, 0, on_gpu=False)
    assert read.steps == (Span(0, 35_000),)
    (shares,) = breakdown_of([read], device="", batch_size=1).shares[0]
    assert shares.parts == {"compute": 15_000, "communication": 15_000, "imbalance": 0, "input": 4_000, "launch": 1_000}
    assert shares.overlapped_ns == 2_000


def test_a_trace_without_marks_or_kernels_is_refused() -> None:
    with pytest.raises(TrainError, match="0 marked steps"):
        read_trace({"traceEvents": [event("gemm", "kernel", 0, 1)]}, 0, on_gpu=True)
    with pytest.raises(TrainError, match="3 marked steps, of which 3 did nothing that it knows of"):
        read_trace(
            {"traceEvents": [e for e in on_a_gpu()["traceEvents"] if "cuda" not in e.get("cat", "")]}, 0, on_gpu=True
        )


@pytest.mark.parametrize("name", ["timeline.svg", "timeline.png"])
def test_a_step_is_drawn(tmp_path: Path, name: str) -> None:
    read = read_trace(on_a_gpu(), 0, on_gpu=True)
    file = draw_timeline([read, read], tmp_path / "pictures" / name)
    start = file.read_bytes()[:200]
    assert (b"<?xml" if name.endswith("svg") else b"PNG") in start


def a_trainer() -> tuple[Trainer, ArraySet]:
    examples = ArraySet(inputs=np.ones((50, 8), np.float32), targets=np.zeros(50, np.int64))
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        batch_size=10,
        steps=99,
        execution=StepExecution(threads=1),
    )
    return Trainer(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), recipe, 99, inputs=examples.inputs[:2]
    ), examples


def test_real_steps_add_up(tmp_path: Path) -> None:
    trainer, examples = a_trainer()
    with trainer.feed(examples, 0, print) as feed:
        found = profiled(trainer, feed, 4, tmp_path)
    assert found is not None
    (steps,) = found.shares
    assert len(steps) == 4
    assert all(share.compute_ns > 0 and share.launch_ns > 0 and share.communication_ns == 0 for share in steps)
    assert found.undisturbed_ms is not None
    assert {file.name for file in tmp_path.iterdir()} == {"trace.json", "step-time.json", "timeline.svg"}
    assert json.loads((tmp_path / "step-time.json").read_text()) == json.loads(json.dumps(found.as_json()))
    # The file says the same again, and the steps follow upon each other.
    again = read_trace(json.loads((tmp_path / "trace.json").read_text()), 0, on_gpu=False, before=3)
    assert [step.length_ns for step in again.steps] == [share.wall_ns for share in steps]
    assert all(one.end_ns == other.start_ns for one, other in pairwise(again.steps))


def test_what_cannot_be_profiled_is_said_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, examples = a_trainer()
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')

    def unwritable(self: object, file: str) -> None:
        """As torch does on a disk that is full."""

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", unwritable)
    loop = Loop(
        trainer,
        examples,
        None,
        History(),
        Watchdog(trainer.world),
        checkpoints=None,
        callbacks=Callbacks(),
        start_event=Started(name="net", folder=None, step=0, total_steps=99),
        resume_hint="",
        profile=Profile(trainer.world, 4, 10, tmp_path),
    )
    loop.run(Progress("net", 99, 0))
    assert loop.history.step == 99
    said = capsys.readouterr().out
    assert "No profile: the steps were taken, and no profile was made of them (rank 0 of 1: [Errno 2]" in said
    assert "trace.json" in said


def test_profiling_needs_a_step() -> None:
    with pytest.raises(TrainError, match="0 steps are to be profiled"):
        Profile(World(), 0, 1, Path())
    assert Profile(World(), 5, 1, Path()).steps_needed == WARM_UP_STEPS + 13
