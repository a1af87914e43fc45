"""Processor time of a refusal over that of an answer, in one process, with both in alternation."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.models.write import write_bundle
from penstock.bench.compiled_program import checked_kind
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError
from penstock.core.remote.remote_copy import DEFAULT_CACHE
from penstock.core.spec import Array
from penstock.serve.control.single_process import SingleProcess
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.http.server_sockets import listeners
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.settings import BatchSettings, ExecutionSettings, ModelSettings, NetworkSettings, Settings
from penstock.serve.table.slots import ANSWERED, REFUSED

SERVER_CORE, LOAD_CORE = 0, 1
CONNECTIONS = 64
BUDGET_MS = 50.0
WARM_UP_S = 0.3
HOST = "127.0.0.1"

Say = Callable[[str], None]


def refusal_ratio(
    repeat: int, seconds: float, say: Say, bundle: Path | None = None, connections: int = CONNECTIONS
) -> list[float]:
    """Return the processor time of a refusal over that of an answer, for each repetition.

    Clients send in a closed loop. Answers: the server as it is. Refusals: all slots are held, so that each request is
    refused; the share of the time for refusals is not limited.

    Args:
        repeat: Repetitions.
        seconds: Duration of each of the two loads.
        say: Called with a sentence for each repetition.
        bundle: The bundle that is served; None for the CNN of `benchmarks/models`.
        connections: Clients.

    Raises:
        BenchError: There are fewer than two cores or no C++ compiler, or an answer was wrong.
    """
    cores = os.sched_getaffinity(0)
    if not {SERVER_CORE, LOAD_CORE} <= cores:
        raise BenchError("the comparison needs cores 0 and 1, one for the server and one for the load.")
    checked_kind("compiled")
    os.sched_setaffinity(0, {SERVER_CORE})
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-refusals-") as name:
            served = bundle or write_bundle("cnn", Path(name) / "cnn").folder
            load = Load(
                rate=None,
                connections=connections,
                seconds=seconds,
                warm_up_s=WARM_UP_S,
                cpus=frozenset({LOAD_CORE}),
                sender="compiled",
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_compare(served, load, repeat, say))
    finally:
        os.sched_setaffinity(0, cores)


async def _compare(bundle: Path, load: Load, repeat: int, say: Say) -> list[float]:
    reserved = ReservedPorts()
    [listener] = listeners(HOST, 0, 1, reserved)
    settings = Settings(
        models=ModelSettings(bundles=(bundle,)),
        network=NetworkSettings(port=listener.getsockname()[1]),
        batching=BatchSettings(latency_ms=BUDGET_MS),
        execution=ExecutionSettings(device="cpu", cache=DEFAULT_CACHE.expanduser()),
        frontends=0,
    )
    process = SingleProcess(settings, listener, reserved)
    serving = asyncio.create_task(process.run())
    try:
        while not (newest := list(process.models.newest)):
            if serving.done():
                serving.result()
            await asyncio.sleep(0.05)
        served = newest[0]
        if not isinstance(served, ServedModel) or not isinstance(served.writer, TableWriter):
            raise BenchError(f"{bundle} is served by several engines or parts; name a bundle of one network.")
        process.refusals.share = float("inf")
        url = f"http://{HOST}:{listener.getsockname()[1]}/"
        target = await asyncio.to_thread(golden_target, url, bundle)
        await _cost_us(served, target, replace(load, seconds=0.5), ANSWERED)
        ratios: list[float] = []
        for repetition in range(repeat):
            answer_us = await _cost_us(served, target, load, ANSWERED)
            refusal_us = await _refusal_us(served.writer, served, target, load)
            ratios.append(refusal_us / answer_us)
            say(f"{repetition + 1} of {repeat}: an answer {answer_us:.1f} us, a refusal {refusal_us:.1f} us")
        return ratios
    finally:
        process.stop()
        await serving
        process.close()


async def _refusal_us(writer: TableWriter, served: ServedModel, target: Target, load: Load) -> float:
    held: list[SlotHandle] = []
    while writer.next_slot is not None:
        held.append(writer.open(_take_none))
    try:
        return await _cost_us(served, target, load, REFUSED)
    finally:
        for handle in held:
            handle.cancel()


def _take_none(status: int, output: Array, last: bool) -> None:
    raise AssertionError(status)


async def _cost_us(served: ServedModel, target: Target, load: Load, column: int) -> float:
    """Return the processor time of this thread for each request of a load that is counted in a column."""
    before, begin_s = served.counts[column], time.thread_time()
    # In a thread: it waits for the processes that send, and checks their answers.
    await asyncio.to_thread(measure, target, load, none_answered=column == REFUSED)
    spent_s, count = time.thread_time() - begin_s, served.counts[column] - before
    if not count:
        raise BenchError("no request was counted; see the server's log.")
    return spent_s * 1e6 / count
