"""A load of rows of several lengths through the scheduler, on a clock that moves by the predicted times."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.serve.engine.length_scheduler import schedule_lengths
from penstock.serve.engine.scheduler import Columns
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import LOW_PRIORITY

# R rows of the load

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLoad:
    """Rows that arrive one after the other.

    Args:
        lengths_R: Their lengths.
        arrivals_R: Their arrivals, ascending, in nanoseconds.
        budget_R: Their latency budgets in nanoseconds.
        low_R: Whether they are of low priority.
    """

    lengths_R: Ints
    arrivals_R: Ints
    budget_R: Ints
    low_R: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What became of a load.

    Args:
        met_R: Rows that were answered in time.
        latency_R: Time from arrival to answer; 0 where there was none.
        busy_share: Work that was answered in time over the time of the whole load.
    """

    met_R: npt.NDArray[np.bool_]
    latency_R: Ints
    busy_share: float


def poisson_load(
    costs: LengthCosts, lengths: list[int], load: float, rows: int, budgets_ns: list[int], seed: int
) -> SimulatedLoad:
    """Poisson arrivals, in which each length offers equally much work, together `load` times what there is time for."""
    rng = np.random.default_rng(seed)
    weights = 1 / costs.shares_of(np.array(lengths))
    lengths_R = rng.choice(lengths, rows, p=weights / weights.sum())
    gaps_R = costs.shares_of(lengths_R) / load * rng.exponential(1.0, rows)
    return SimulatedLoad(
        lengths_R=lengths_R,
        arrivals_R=gaps_R.cumsum().astype(np.int64),
        budget_R=rng.choice(budgets_ns, rows),
        low_R=np.zeros(rows, np.bool_),
    )


def together(first: SimulatedLoad, second: SimulatedLoad) -> SimulatedLoad:
    """Both loads at the same time."""
    order_R = np.concatenate([first.arrivals_R, second.arrivals_R]).argsort(kind="stable")
    names = SimulatedLoad.__slots__
    return SimulatedLoad(
        **{name: np.concatenate([getattr(first, name), getattr(second, name)])[order_R] for name in names}
    )


def simulate(load: SimulatedLoad, costs: LengthCosts) -> Simulated:
    """Run a load to its end, without admission control."""
    rows = len(load.lengths_R)
    deadline_R = load.arrivals_R + load.budget_R
    zeros_R = np.zeros(rows, np.int64)
    flags_R = np.where(load.low_R, LOW_PRIORITY, 0)
    columns = Columns(zeros_R, zeros_R, zeros_R, zeros_R, zeros_R, deadline_R[:, None], flags_R[:, None])
    consumed_R, finished_R, now_ns, work_ns = zeros_R.copy(), zeros_R.copy(), 0, 0.0
    while consumed_R.sum() < rows:
        view = columns._replace(
            submitted=(load.arrivals_R <= now_ns).astype(np.int64),
            consumed=consumed_R,
            produced=consumed_R,
            taken=consumed_R,
        )
        chosen = schedule_lengths(view, load.lengths_R[:, None], now_ns, costs)
        consumed_R = consumed_R.copy()
        consumed_R[chosen.run] += 1
        consumed_R[chosen.expire] += 1
        if chosen.run.size:
            now_ns += costs.of(chosen.run.size, int(load.lengths_R[chosen.run].max()))
            finished_R[chosen.run] = now_ns
        elif not chosen.expire.size:
            now_ns = int(load.arrivals_R[load.arrivals_R > now_ns].min())
    assert (consumed_R == 1).all()
    met_R = (finished_R > 0) & (finished_R <= deadline_R)
    work_ns = float(costs.shares_of(load.lengths_R[met_R]).sum())
    latency_R = np.where(finished_R > 0, finished_R - load.arrivals_R, 0)
    return Simulated(met_R=met_R, latency_R=latency_R, busy_share=work_ns / now_ns)
