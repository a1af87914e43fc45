"""`penstock score` on one machine: reading, the network and writing at the same time."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

import pyarrow as pa

from penstock.core.errors import ScoreError
from penstock.score.answers import error_column, output_columns, reply_column
from penstock.score.blocks import RowBlock, read_blocks
from penstock.score.bodies import BodyReader, body_reader
from penstock.score.files import InputFolder, OutputFolder
from penstock.score.network import HowToRun, LoadedNetwork, RunsElsewhere
from penstock.score.parts import Parts, ScoredPart
from penstock.score.plan import SCHEMA_VERSION, Kind, Plan, ScoreOptions, Unit, make_plan, part_name

# Blocks that wait for the writer, for each thread of the network.
_AHEAD = 2
# A stage that works for this share of the time bounds a run.
MOST = 0.5
_LOOK_S = 0.1

Progress = Callable[[int, int], object]


@final
@dataclass(kw_only=True, slots=True)
class ScoreReport:
    """The result of a run.

    Args:
        rows: Rows of the output.
        errors: Those without an answer.
        new_rows: Rows that this run has scored.
        seconds: The time from the first row read to the last part written.
        busy: Share of that time in which each stage worked; of several threads, their mean.
        left_out: Files of the input that were not read.
        removed: Parts of an earlier input.
        unreadable: Damaged parts that were written again.
    """

    rows: int = 0
    errors: int = 0
    new_rows: int = 0
    seconds: float = 0.0
    busy: Mapping[str, float] = field(default_factory=dict[str, float])
    left_out: int = 0
    removed: int = 0
    unreadable: int = 0

    @property
    def bound_by(self) -> str:
        """The stage that worked for most of the time; empty if none did, as in a run of moments."""
        stage = max(self.busy, key=self.busy.__getitem__, default="")
        return stage if self.busy.get(stage, 0.0) >= MOST else ""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    """The answers of a block, the count of rows without one, and the seconds that decoding and conversion took."""

    batch: Any
    errors: int
    decoding_s: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run that was planned.

    Args:
        place: The input.
        plan: Its units, and what is read and written.
        description: What all parts have in common; see `describe_run`.
        bodies: Decodes bodies; None if the application reads none.
    """

    place: InputFolder
    plan: Plan
    description: Mapping[str, Any]
    bodies: BodyReader | None

    def names(self) -> list[str]:
        """The name of the part of each unit."""
        return [part_name(self.description, unit) for unit in self.plan.units]

    def finish(self, parts: Parts, whole: Sequence[ScoredPart], report: ScoreReport) -> ScoreReport:
        """Write the manifest, and complete the report of a run.

        Args:
            parts: The output.
            whole: The parts of all units.
            report: What is known of the run.

        Raises:
            ScoreError: A part is missing: another run has removed it.
        """
        removed = parts.finish(self.place, self.plan.units, whole)
        report.rows, report.errors = sum(part.rows for part in whole), sum(part.errors for part in whole)
        report.left_out, report.removed = len(self.plan.left_out), len(removed)
        report.unreadable = len(parts.unreadable)
        return report


def plan_run(
    network: LoadedNetwork | RunsElsewhere,
    place: InputFolder,
    out: OutputFolder,
    options: ScoreOptions,
    how: HowToRun,
    **sizes: int,
) -> PlannedRun:
    """Plan a run: list its units and check its columns.

    Args:
        network: The bundle.
        place: The input.
        out: The output folder.
        options: What is read and written.
        how: How the bundle is run.
        sizes: Sizes of units, see `make_plan`.

    Raises:
        ScoreError: The input does not fit, or is damaged, or the output is inside it.
    """
    check_apart(place, out)
    bodies = body_reader(network.application, network.prepare, content_type=options.content_type, body=options.body)
    plan = make_plan(place, network.application, options, bodies, **sizes)
    return PlannedRun(place=place, plan=plan, description=describe_run(network, place, options, how), bodies=bodies)


def describe_run(
    network: LoadedNetwork | RunsElsewhere, place: InputFolder, options: ScoreOptions, how: HowToRun
) -> dict[str, Any]:
    """Describe what all parts of an output folder have in common, as JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "bundle": network.files.manifest.content_hash,
        "application": network.application.name,
        "input": f"{place.url}/{place.files[0].name}" if place.is_one_file else place.url,
        "options": {
            "input": dict(options.columns),
            "body": options.body,
            "content_type": options.content_type,
            "keep": list(options.keep),
            "reply": options.reply,
            "on_error": options.on_error,
            "precision": how.precision,
            "batch": how.batch,
            "runs_by": network.runs_by,
            "changed_sources": dict(network.changed_sources),
        },
    }


def check_apart(place: InputFolder, out: OutputFolder) -> None:
    """Check that the output folder is not in the input folder.

    Raises:
        ScoreError: It is.
    """
    if place.is_one_file:
        return
    inner, outer = out.real, place.real
    if inner == outer or inner.startswith(f"{outer.rstrip('/')}/"):
        raise ScoreError(f"--out {out} is inside the input {place}, and would be scored the next time; choose another.")


def score(
    network: LoadedNetwork,
    place: InputFolder,
    out: OutputFolder,
    options: ScoreOptions,
    how: HowToRun,
    progress: Progress = lambda done, total: None,
    **sizes: int,
) -> ScoreReport:
    """Score an input, or go on where a run of the same command ended.

    Args:
        network: The bundle.
        place: The input.
        out: The output folder.
        options: What is read and written.
        how: How the bundle was loaded.
        progress: Called with what is done and its total, in rows, bytes or files.
        sizes: Sizes of units, see `make_plan`.

    Raises:
        ScoreError: The input does not fit, is damaged or changes, or the output is of another run.
        StorageError: The input cannot be read, or the output cannot be written.
    """
    planned = plan_run(network, place, out, options, how, **sizes)
    parts, names = Parts(out, planned.description), planned.names()
    run = _Run(network, planned, parts, progress)
    found = run.over(dict(zip(names, planned.plan.units, strict=True)))
    return planned.finish(parts, [found[name] for name in names], run.report)


def score_units(network: LoadedNetwork, planned: PlannedRun, parts: Parts) -> dict[str, ScoredPart]:
    """Score the units of a plan whose parts are not there; return all parts by name.

    Args:
        network: The bundle.
        planned: The plan of a run, or of some of its units.
        parts: The output.

    Raises:
        ScoreError: An input is damaged or has changed, or a row has no answer.
        StorageError: The input cannot be read, or the output cannot be written.
    """
    units = dict(zip(planned.names(), planned.plan.units, strict=True))
    return _Run(network, planned, parts, lambda done, total: None).over(units)


@final
class _Run:
    """The threads of a run: one reads, some run the network, and the caller's writes in the order of the input."""

    def __init__(self, network: LoadedNetwork, planned: PlannedRun, parts: Parts, progress: Progress) -> None:
        self._network, self._parts, self._progress = network, parts, progress
        self._place, self._plan, self._bodies = planned.place, planned.plan, planned.bodies
        self._ended = threading.Event()
        self._queue: queue.Queue[Any] = queue.Queue(_AHEAD * network.workers)
        self._reading_s = 0.0
        self._done, self._total = 0, sum(unit.weight for unit in planned.plan.units)
        self.report = ScoreReport()

    def over(self, units: Mapping[str, Unit]) -> dict[str, ScoredPart]:
        """Score the units whose parts are not there; return all parts by name."""
        there = {name: part for name in units if (part := self._parts.found(name)) is not None}
        self._done = sum(units[name].weight for name in there)
        self._progress(self._done, self._total)
        todo = {name: unit for name, unit in units.items() if name not in there}
        begin_s, before_s = time.perf_counter(), self._network.network_s
        stages = {"decoding": 0.0, "writing": 0.0}
        with ThreadPoolExecutor(self._network.workers, "score") as pool:
            reader = threading.Thread(target=self._read, args=(todo, pool), name="score-reader")
            reader.start()
            try:
                there.update(self._written(todo, stages))
            finally:
                self._ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                reader.join()
        seconds = time.perf_counter() - begin_s
        busy = {
            "reading": self._reading_s,
            "decoding": stages["decoding"] / self._network.workers,
            "the network": (self._network.network_s - before_s) / self._network.at_once,
            "writing": stages["writing"],
        }
        self.report.seconds = seconds
        self.report.busy = {name: min(1.0, each / seconds) for name, each in busy.items()} if seconds else {}
        return there

    def _read(self, todo: Mapping[str, Unit], pool: ThreadPoolExecutor) -> None:
        try:
            for name, unit in todo.items():
                begin_s = time.perf_counter()
                made = self._parts.found_now(name)
                self._reading_s += time.perf_counter() - begin_s
                if made is not None:
                    # By another run, meanwhile.
                    self._put(("there", name, made))
                    continue
                self._put(("unit", name, unit))
                for block in self._blocks(unit):
                    self._put(("block", name, pool.submit(self._scored, block)))
            self._put(("end", "", None))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that writes, which waits for it
            self._put(("error", "", error))

    def _blocks(self, unit: Unit) -> Iterator[RowBlock]:
        network = self._network
        blocks = read_blocks(self._place, self._plan, unit, network.application, self._bodies, network.block_rows)
        while True:
            begin_s = time.perf_counter()
            block = next(blocks, None)
            self._reading_s += time.perf_counter() - begin_s
            if block is None or self._ended.is_set():
                return
            yield block

    def _put(self, item: tuple[str, str, Any]) -> None:
        while not self._ended.is_set():
            try:
                self._queue.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return

    def _scored(self, block: RowBlock) -> _Scored:
        network, plan = self._network, self._plan
        begin_s = time.perf_counter()
        chunks = block.load()
        decoding_s = time.perf_counter() - begin_s
        answers = network.answers(chunks)
        columns = output_columns(network.application, answers, chunks, list(plan.outputs))
        if plan.options.reply:
            columns.append(reply_column(network.application, answers, chunks))
        if chunks.errors and plan.options.on_error == "fail":
            row = min(chunks.errors)
            path = block.paths if isinstance(block.paths, str) else block.paths[row]
            at = "byte" if plan.kind is Kind.LINES else "row"
            raise ScoreError(
                f"{path}, {at} {block.rows[row].as_py():,}: {chunks.errors[row].rstrip('.')}. Mend it, or keep such "
                f"rows with --on-error null, in another --out."
            )
        if chunks.errors and plan.options.reply:
            # A reply that failed leaves no other answer either.
            columns[: len(plan.outputs)] = output_columns(network.application, answers, chunks, list(plan.outputs))
        if plan.options.on_error == "null":
            columns.append(error_column(chunks))
        batch = pa.RecordBatch.from_arrays([block.path_column(), block.rows, *block.kept, *columns], schema=plan.schema)
        return _Scored(batch=batch, errors=len(chunks.errors), decoding_s=decoding_s)

    def _written(self, todo: Mapping[str, Unit], stages: dict[str, float]) -> Iterator[tuple[str, ScoredPart]]:
        kind, name, item = self._next()
        while kind != "end":
            if kind == "there":
                self._advance(todo[name])
                yield name, item
                kind, name, item = self._next()
                continue
            assert kind == "unit", kind
            unit: Unit = item
            part_of = name
            with self._parts.writing(part_of, self._plan.schema) as part:
                kind, name, item = self._next()
                while kind == "block":
                    scored: _Scored = item.result()
                    stages["decoding"] += scored.decoding_s
                    begin_s = time.perf_counter()
                    part.write(scored.batch, scored.errors)
                    stages["writing"] += time.perf_counter() - begin_s
                    if self._plan.kind is not Kind.LINES:
                        self._progress(self._done + part.rows, self._total)
                    kind, name, item = self._next()
                begin_s = time.perf_counter()
                self._place.check_unchanged(unit.files)
            stages["writing"] += time.perf_counter() - begin_s
            self.report.new_rows += part.rows
            self._advance(unit)
            yield part_of, ScoredPart(name=part_of, rows=part.rows, errors=part.errors)

    def _advance(self, unit: Unit) -> None:
        self._done += unit.weight
        self._progress(self._done, self._total)

    def _next(self) -> tuple[str, str, Any]:
        kind, name, item = self._queue.get()
        if kind == "error":
            raise item
        return kind, name, item
