"""Profiling of a few training steps, and the breakdown of their time."""

import json
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.core.errors import TrainError
from penstock.train.data.loader import Loader
from penstock.train.parallel.world import World
from penstock.train.profile.kernel_trace import ASIDE, BATCH, STEP, read_trace
from penstock.train.profile.step_time import StepTimeBreakdown, Trace, breakdown_of
from penstock.train.profile.timeline import draw_timeline
from penstock.train.step.cuda_graph import EAGER_STEPS, STEPS_AHEAD
from penstock.train.trainer import Trainer

log = logging.getLogger(__name__)

# Libraries choose algorithms, and the step is captured.
WARM_UP_STEPS = EAGER_STEPS + 5
# Profiled steps that fill the device's queue; only the steady state after them is counted.
LEAD_IN_STEPS = STEPS_AHEAD + 1
TRACE_FILE, BREAKDOWN_FILE, PICTURE_FILE = "trace.json", "step-time.json", "timeline.svg"


@final
class NoProfile(TrainError):
    """A profile could not be made; the steps were taken all the same."""


@final
class Profile:
    """Profiles a training: after a warm-up, some steps without the profiler, for comparison, then as many with it.

    Every process has one, and marks the same steps.

    Args:
        world: The processes.
        steps: Number of steps that are counted.
        batch_size: Examples a step, over all processes.
        folder: The folder of trace.json, of trace-RANK.json of the other processes, step-time.json and timeline.svg.
        left: Number of steps left in the run; None if unlimited.

    Attributes:
        steps_needed: Number of steps until the profile is complete.

    Raises:
        TrainError: Fewer steps are left than it takes.
    """

    def __init__(self, world: World, steps: int, batch_size: int, folder: Path, *, left: int | None = None) -> None:
        if steps < 1:
            raise TrainError(f"{steps} steps are to be profiled; give at least 1.")
        needed = WARM_UP_STEPS + 2 * steps + LEAD_IN_STEPS
        if left is not None and left < needed:
            raise TrainError(
                f"{needed} steps are needed for the profile, its warm-up included, and {left} are left; train longer, "
                f"or profile fewer."
            )
        self.steps_needed = needed
        self._world, self._steps, self._batch_size, self._folder = world, steps, batch_size, folder
        self._taken = 0
        self._aside_s = self._started_s = 0.0
        self._undisturbed_ms: float | None = None
        self._failed: str | None = None
        activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Keep the events of all profiler cycles; otherwise torch warns.
        self._profiler = profile(activities=activities, acc_events=True)

    @property
    def is_done(self) -> bool:
        """True after the last step."""
        return self._taken == self.steps_needed

    def step(self, trainer: Trainer, feed: Loader, step: int) -> Tensor:
        """Take a step, and mark the wait for its batch and the host's part of it in the trace."""
        with record_function(BATCH):
            batch = next(feed)
        with record_function(STEP):
            return trainer.step(batch, step)

    @contextmanager
    def aside(self) -> Generator[None]:
        """Context for work outside steps, such as a validation."""
        started_s = time.perf_counter()
        with record_function(ASIDE):
            yield
        self._aside_s += time.perf_counter() - started_s

    def taken(self) -> StepTimeBreakdown | None:
        """Count a step; all processes call this.

        Returns:
            The breakdown, in the first process after the last step; otherwise None.

        Raises:
            NoProfile: After the last step, if the profiler or the evaluation of its trace failed in a process.
        """
        self._taken += 1
        if self._taken == WARM_UP_STEPS:
            self._barrier()
            self._started_s, self._aside_s = time.perf_counter(), 0.0
        elif self._taken == WARM_UP_STEPS + self._steps:
            self._barrier()
            spent_s = time.perf_counter() - self._started_s - self._aside_s
            self._undisturbed_ms = spent_s * 1000 / self._steps
            with self._failure_kept():
                self._profiler.start()
            self._barrier()
        elif self._taken == self.steps_needed:
            self._barrier()
            return self._finish()
        return None

    @contextmanager
    def _failure_kept(self) -> Generator[None]:
        """Keep an error until all processes have met: a failed profile must not end the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - neither the profiler nor what draws names its errors
            said = " ".join(str(error).split())[:300].removesuffix(".")
            self._failed = self._failed or f"{self._world.label}: {said or type(error).__name__}"

    def _barrier(self) -> None:
        """Wait until all processes have finished the same step."""
        self._world.sum_on_host(0.0)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _finish(self) -> StepTimeBreakdown | None:
        trace: Trace | None = None
        with self._failure_kept():
            trace = self._own_trace()
        of_ranks: list[tuple[Trace | None, str | None]] = self._world.all_gather_objects((trace, self._failed))
        self._failed = next((failed for _, failed in of_ranks if failed), None)
        breakdown: StepTimeBreakdown | None = None
        if self._world.is_rank_zero and self._failed is None:
            with self._failure_kept():
                breakdown = self._break_down([trace for trace, _ in of_ranks if trace is not None])
        if self._failed is not None:
            raise NoProfile(f"the steps were taken, and no profile was made of them ({self._failed}).")
        return breakdown

    def _own_trace(self) -> Trace:
        rank = self._world.rank
        self._profiler.stop()
        file = self._folder / (TRACE_FILE if rank == 0 else f"trace-{rank}.json")
        # torch ignores a file that it cannot write, and an old one would be read in its place.
        file.unlink(missing_ok=True)
        self._profiler.export_chrome_trace(str(file))
        try:
            written = json.loads(file.read_bytes())
        except ValueError:
            raise TrainError(f"{file} is not whole; see that its disk has room.") from None
        return read_trace(written, rank, on_gpu=self._world.device.type == "cuda", before=LEAD_IN_STEPS)

    def _break_down(self, traces: list[Trace]) -> StepTimeBreakdown:
        breakdown = breakdown_of(
            traces,
            device=self._world.describe(),
            batch_size=self._batch_size,
            undisturbed_ms=self._undisturbed_ms,
        )
        (self._folder / BREAKDOWN_FILE).write_text(json.dumps(breakdown.as_json(), indent=2) + "\n")
        if find_spec("matplotlib"):
            draw_timeline(traces, self._folder / PICTURE_FILE)
        else:
            log.warning(
                "matplotlib is not installed, so there is no %s; pip install 'penstock-nn[train]'", PICTURE_FILE
            )
        return breakdown
