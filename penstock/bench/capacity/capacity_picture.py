"""A picture of a day: the load, latency and refusals, and the seconds around the failure at the peak."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.capacity.capacity_run import CapacityResult
from penstock.bench.capacity.day import ServiceDay
from penstock.bench.capacity.sizing import BEFORE_S, PERCENT, WARM_S, ServicePlan
from penstock.core.errors import BenchError

SHOWN_S = 20


def check_picture(file: Path) -> None:
    """Check, before a day is simulated, that a picture of it can be written; make its folder.

    Args:
        file: The picture.

    Raises:
        BenchError: It cannot.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if file.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise BenchError(f"{file} is no picture by its name; let it end with .png, .svg or .pdf.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{file} cannot be written ({error.strerror}); name another file.") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise BenchError(f"{file} cannot be written; name another file.")


def draw_day(result: CapacityResult, file: Path) -> Path:
    """Draw a result; the suffix of the file chooses the format.

    Args:
        result: The result.
        file: The picture.

    Raises:
        BenchError: It cannot be written.
    """
    from matplotlib.figure import Figure

    services = len(result.plans)
    figure = Figure(figsize=(11, 3.2 * services + 0.6), layout="constrained", facecolor="white")
    panels = figure.subplots(services, 3, squeeze=False)
    for row, plan, day in zip(panels, result.plans, result.days, strict=True):
        _draw_load(row[0], plan, day)
        _draw_latency(row[1], day)
        _draw_failure(row[2], plan)
    figure.suptitle(
        f"{result.settings.demand.users:,.0f} users, {result.servers:,} servers, {result.settings.conditions.policy}",
        fontsize=10,
    )
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise BenchError(f"{file} cannot be written ({error.strerror}); name another file.") from None
    return file


def _draw_load(axes: Any, plan: ServicePlan, day: ServiceDay) -> None:
    what = "requests/s" if plan.service.chunk_ms is None else "streams begun/s"
    axes.fill_between(day.hour_T, day.rate_T, alpha=0.3, label=what)
    axes.set_title(f"{plan.service.name}: {plan.servers:,} servers, {what}", fontsize=9)
    axes.set_ylim(0)
    axes.set_xlim(0, 24)
    busy = axes.twinx()
    busy.plot(day.hour_T, day.busy_T * 100, color="tab:red", linewidth=1)
    busy.set_ylim(0, 100)
    busy.set_ylabel("% of the engines' time", color="tab:red", fontsize=8)
    _mark_outage(axes, day)


def _draw_latency(axes: Any, day: ServiceDay) -> None:
    budget_ms = day.service.latency_ms
    axes.plot(day.hour_T, np.minimum(day.p99_s_T * 1e3, 8 * budget_ms), label="p99 of answers, ms")
    axes.axhline(budget_ms, color="grey", linestyle="--", linewidth=1, label="budget")
    axes.plot(day.hour_T, day.refused_T * 100, color="tab:orange", linewidth=1, label="refused, %")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0)
    axes.set_xlim(0, 24)
    axes.set_xlabel("hour", fontsize=8)
    axes.set_title("latency and refusals of the day", fontsize=9)
    axes.legend(fontsize=7)
    _mark_outage(axes, day)


def _draw_failure(axes: Any, plan: ServicePlan) -> None:
    failure, begin = plan.failure, int(BEFORE_S - WARM_S)
    second = np.arange(min(failure.counts.groups, begin + SHOWN_S))
    p99_ms = failure.counts.percentiles_s(PERCENT, answered_only=True)[second] * 1e3
    lost = (failure.counts.refused / np.maximum(failure.counts.offered, 1))[second]
    axes.plot(second - begin, p99_ms, marker=".", label="p99 of answers, ms")
    axes.plot(second - begin, lost * 100, color="tab:orange", marker=".", linewidth=1, label="not answered, %")
    axes.axhline(plan.service.latency_ms, color="grey", linestyle="--", linewidth=1, label="budget")
    axes.axvline(0, color="tab:red", linewidth=1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0)
    axes.set_xlabel("seconds from the failure", fontsize=8)
    axes.set_title("a zone and nodes fail at the peak", fontsize=9)
    axes.legend(fontsize=7)


def _mark_outage(axes: Any, day: ServiceDay) -> None:
    hours = day.hour_T[day.lost_T]
    if hours.size:
        width = 24 / len(day.hour_T)
        for hour in hours.tolist():
            axes.axvspan(hour, hour + width, color="tab:red", alpha=0.15, linewidth=0)
