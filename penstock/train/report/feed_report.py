"""Waits of steps for examples: whether the data or the steps limit a training, and what would help."""

from dataclasses import asdict, dataclass

from penstock.core.machine.cores import available_cores
from penstock.core.wording.counted import counted
from penstock.train.data.loader import Loader

# A run reports its waits above this share of its time and this many seconds; the first batch is always waited for.
WAITED_SHARE, WAITED_S = 0.02, 2.0
# Threads that compute for this share of their time are limited by decoding, not by storage.
COMPUTING_SHARE = 0.7
# Reading that is so many times as fast as the steps does not limit them.
FAST_READING = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedFigures:
    """Reading of examples in one process, while it trained.

    Args:
        waited_share: Share of the time in which steps waited for examples, from 0 to 1.
        waited_s: Seconds of these waits.
        threads: Threads that read ahead.
        read_per_s: Examples a second that these threads can read; None if they read none.
        steps_per_s: Examples a second that the steps take without their waits; None if there was no warm step.
        computing_share: Share of the threads' time in which they computed; else they waited for storage or for a core.
    """

    waited_share: float
    waited_s: float
    threads: int
    read_per_s: float | None
    steps_per_s: float | None
    computing_share: float | None

    def fields(self) -> dict[str, float]:
        """Return the known values by name, rounded, for run.json."""
        return {name: round(value, 4) for name, value in asdict(self).items() if value is not None}

    def describe(self, cores: int, *, in_memory: bool = False) -> str | None:
        """Return a sentence on the limit of the training and the remedy; None if the steps hardly waited.

        Args:
            cores: Processor cores that this process may use.
            in_memory: The examples are in memory, so that reading is no more than copying.
        """
        if self.waited_share <= WAITED_SHARE or self.waited_s <= WAITED_S:
            return None
        said = f"{self.waited_share:.0%} of the time the steps waited for examples"
        if self.read_per_s is None or self.computing_share is None:
            return f"{said}."
        threads = "the step's own thread" if not self.threads else counted(self.threads, "reading thread")
        steps = "" if self.steps_per_s is None else f", and the steps take {self.steps_per_s:,.0f}/s"
        said += f": {threads} read {self.read_per_s:,.0f} examples/s{steps}."
        if in_memory or (self.steps_per_s is not None and self.read_per_s >= FAST_READING * self.steps_per_s):
            return f"{said} The overhead of each batch is the limit, not storage: larger batches (batch_size) help."
        more = f"give more workers (--workers; {cores} cores can be used)" if self.threads < cores else "use more cores"
        if self.computing_share >= COMPUTING_SHARE:
            return f"{said} Decoding is the limit: {more}, or decode once ('penstock shard')."
        waited = f"the threads waited for {1 - self.computing_share:.0%} of their time, for storage or for a core"
        return f"{said} Storage or busy cores are the limit ({waited}): copy the data to faster storage, or {more}."


def feed_figures(feed: Loader, seconds: float, steps_per_s: float | None) -> FeedFigures:
    """Describe the reading of a training that ended.

    Args:
        feed: The loader of its steps.
        seconds: Duration of the training.
        steps_per_s: Examples a second of this process that its warm steps take without their waits; None if unknown.
    """
    reading = feed.reading
    return FeedFigures(
        waited_share=feed.waited_s / seconds,
        waited_s=feed.waited_s,
        threads=reading.threads,
        read_per_s=reading.examples_per_s,
        steps_per_s=steps_per_s,
        computing_share=reading.cpu_s / reading.wall_s if reading.wall_s else None,
    )


def feed_sentence(figures: FeedFigures, *, in_memory: bool = False) -> str | None:
    """Return `describe` for the cores of this machine."""
    return figures.describe(available_cores(), in_memory=in_memory)
