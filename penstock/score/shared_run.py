"""A planned run that several processes share: written by the one that plans it, and read by those that score units."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import pyarrow as pa

from penstock.core.errors import ScoreError
from penstock.core.json_record import read_record
from penstock.core.remote.remote_copy import local_bundle
from penstock.score.bodies import body_reader
from penstock.score.files import InputFile, InputFolder, OutputFolder
from penstock.score.network import HowToRun, LoadedNetwork
from penstock.score.parts import Parts
from penstock.score.plan import Kind, Plan, ScoreOptions, Sources, Unit, read_footers
from penstock.score.score_run import PlannedRun, describe_run, score_units

# Units that one process scores come from few files at a time.
_FOOTERS_KEPT = 16
# The fields of a run that are JSON values.
_PLAIN = ("bundle", "reference", "out", "url", "shown", "is_one_file", "description")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRun:
    """A run as each of its processes knows it.

    Args:
        bundle: The absolute path of the bundle, or its URL.
        reference: Finds the application; empty for the reference in the bundle.
        out: The absolute path of the output folder, or its URL.
        url: The URL of the input folder.
        shown: The input in messages.
        is_one_file: The input is one file.
        plan: The plan; the footers of Parquet files are read by those who need them.
        description: What all parts have in common.
        how: How the bundle is run.
        todo: Places in the plan of the units that are shared out.
    """

    bundle: str
    reference: str
    out: str
    url: str
    shown: str
    is_one_file: bool
    plan: Plan
    description: dict[str, Any]
    how: HowToRun
    todo: Sequence[int]

    def write(self, file: Path) -> None:
        """Write it to a file."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        how = asdict(self.how) | {"cache": str(self.how.cache)}
        file.write_text(json.dumps(fields | {"todo": [*self.todo], "how": how, "plan": _plan_json(self.plan)}))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what `write` wrote."""
        found = json.loads(file.read_bytes())
        return cls(
            **{name: found[name] for name in _PLAIN},
            todo=found["todo"],
            how=read_record(HowToRun, found["how"]),
            plan=_plan_of(found["plan"]),
        )


def _plan_json(plan: Plan) -> dict[str, Any]:
    """Write a plan as JSON values; its units have the places of their files."""
    places = {file.name: place for place, file in enumerate(plan.files)}
    return {
        "kind": plan.kind.value,
        "files": [[file.name, file.size, file.stamp] for file in plan.files],
        "units": [
            [[places[file.name] for file in unit.files], unit.begin, unit.end, unit.first_row, unit.weight]
            for unit in plan.units
        ],
        "tensors": dict(plan.sources.tensors),
        "body": plan.sources.body,
        "options": asdict(plan.options),
        "left_out": [*plan.left_out],
        "schema": _schema_text(plan.schema),
        "kept": _schema_text(pa.schema(plan.kept)),
        "outputs": _schema_text(pa.schema(plan.outputs)),
    }


def _plan_of(found: Mapping[str, Any]) -> Plan:
    files = [InputFile(name=name, size=size, stamp=stamp) for name, size, stamp in found["files"]]
    options = found["options"]
    return Plan(
        kind=Kind(found["kind"]),
        units=[
            Unit(files=tuple(files[place] for place in places), begin=begin, end=end, first_row=first, weight=weight)
            for places, begin, end, first, weight in found["units"]
        ],
        sources=Sources(tensors=found["tensors"], body=found["body"]),
        options=ScoreOptions(**options | {"keep": tuple(options["keep"])}),
        schema=_schema(found["schema"]),
        kept=[*_schema(found["kept"])],
        outputs=[*_schema(found["outputs"])],
        files=files,
        left_out=found["left_out"],
        footers={},
    )


def _schema_text(schema: Any) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _schema(text: str) -> Any:
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


@final
class UnitScorer:
    """Scores units of a run that another process has planned.

    Args:
        run: The run.
        application: Reference of the application on this machine; None for that of the run.

    Raises:
        BundleError: The bundle is not here, or is damaged.
        ScoreError: This machine would run the network in another way, or the bundle is another one.
    """

    def __init__(self, run: SharedRun, application: str | None = None) -> None:
        how = replace(run.how, app=application or run.reference or None)
        self._run = run
        self._place = InputFolder.of_listed(run.url, run.plan.files, is_one_file=run.is_one_file, shown=run.shown)
        self._network = LoadedNetwork(local_bundle(run.bundle, how.cache), how)
        options = run.plan.options
        try:
            self._check(describe_run(self._network, self._place, options, how))
            self._bodies = body_reader(
                self._network.application, self._network.prepare, content_type=options.content_type, body=options.body
            )
            self._parts = Parts(OutputFolder(run.out), run.description, joins=True)
        except BaseException:
            self._network.close()
            raise
        self._footers: dict[str, Any] = {}

    def score(self, units: Sequence[int]) -> None:
        """Score units whose parts are not there.

        Args:
            units: Their places in the plan.

        Raises:
            ScoreError: An input is damaged or has changed, or a row has no answer.
            StorageError: The input cannot be read, or the output cannot be written.
        """
        for unit in units:
            chosen = self._run.plan.units[unit]
            plan = replace(self._run.plan, units=[chosen], footers=self._footers_of(chosen.files))
            planned = PlannedRun(place=self._place, plan=plan, description=self._run.description, bodies=self._bodies)
            score_units(self._network, planned, self._parts)

    def close(self) -> None:
        """End the processes that run the network."""
        self._network.close()

    def _footers_of(self, files: Sequence[InputFile]) -> dict[str, Any]:
        if self._run.plan.kind is not Kind.PARQUET:
            return {}
        if missing := [file for file in files if file.name not in self._footers]:
            self._place.check_unchanged(missing)
            if len(self._footers) >= _FOOTERS_KEPT:
                self._footers.clear()
            self._footers |= read_footers(self._place, missing)
        return {file.name: self._footers[file.name] for file in files}

    def _check(self, found: dict[str, Any]) -> None:
        wanted = self._run.description
        if found == wanted:
            return
        if found["bundle"] != wanted["bundle"]:
            raise ScoreError(
                f"{self._run.bundle} is another bundle here ({found['bundle'][:12]}, and that of the command is "
                f"{wanted['bundle'][:12]}); copy it to this machine again."
            )
        now, then = found["options"], wanted["options"]
        differs = next((name for name in then if now[name] != then[name]), "application")
        raise ScoreError(
            f"this machine has {differs} {now.get(differs)!r}, and that of the command has {then.get(differs)!r}; the "
            f"answers may differ, so install the same environment on all machines, or name --executor torch."
        )
