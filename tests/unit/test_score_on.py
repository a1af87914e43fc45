"""`penstock score --on` without a cluster: what each process gets, what it checks, and what is left."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main, score_on
from penstock.cli.launch_options import cluster_options
from penstock.cli.train_on import ClusterOptions
from penstock.cluster import slurm_units
from penstock.cluster.job import UNITS
from penstock.cluster.outcome import RankOutcome
from penstock.cluster.slurm_batch import KINDS
from penstock.cluster.slurm_engine import outcomes_folder
from penstock.cluster.units_engine import UnitsEngine, tasks_of, units_done
from penstock.cluster.units_task import (
    EXIT_ENDED,
    ended_sentence,
    parts_there,
    passing_sentence,
    score_units,
    score_units_or_end,
    scorer_of,
)
from penstock.core.errors import ClusterError, DeviceLost, ScoreError, StorageError
from penstock.score.network import LoadedNetwork
from penstock.score.plan import ScoreOptions
from penstock.score.score_run import ScoreReport
from penstock.score.shared_run import SharedRun, UnitScorer
from tests.support.scored import fixed_lists, hashes, how_to_run, numbers, run, write_numbers, write_parquet
from tests.support.serving import write_doubler


class Here(UnitsEngine):
    """Scores in this process, as the process of an engine does; `lost` units are not scored."""

    def __init__(self, lost: int = 0, before: Callable[[Path], object] = lambda file: None) -> None:
        self._lost, self._before = lost, before
        self.files: list[str] = []

    def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
        """See `UnitsEngine`."""
        self.files = sorted(each.name for each in file.parent.iterdir())
        self._before(file)
        for task in tasks_of(units[self._lost :], most=3):
            done(units_done(score_units(file, task)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doubler")
    write_doubler(folder)
    write_numbers(folder / "in", [250, 1, 99], rows=50)
    return folder


def scored(
    monkeypatch: pytest.MonkeyPatch,
    engine: UnitsEngine,
    place: Path,
    to: object,
    source: object = None,
    **options: Any,
) -> tuple[ScoreReport, list[tuple[int, int]]]:
    monkeypatch.setattr(score_on, "_engine", lambda cluster, out: engine)
    launch = cluster_options("ray", None, None, 2, None, {})
    cluster = ClusterOptions(on="ray", launch=launch, cores=1, restarts=None)
    seen: list[tuple[int, int]] = []
    how, out = how_to_run(place / "cache"), str(to)
    given = ScoreOptions(**options)
    report = score_on.score_on(
        place / "bundle", str(source or place / "in"), out, given, how, cluster, lambda *at: seen.append(at)
    )
    return report, seen


def test_parts_and_manifest_are_those_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    how = how_to_run(place / "cache")
    run(LoadedNetwork(place / "bundle", how), place / "in", tmp_path / "whole", how, keep=("id",), reply=True)
    engine = Here()
    report, seen = scored(monkeypatch, engine, place, tmp_path / "out", keep=("id",), reply=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert (report.rows, report.new_rows, report.errors) == (350, 350, 0)
    assert seen == [(0, 8), (3, 8), (6, 8), (8, 8)]
    assert engine.files == ["job.json", "sources.zip", UNITS]
    # A part that is there is not scored again.
    gone = sorted((tmp_path / "out").glob("*.parquet"))[3]
    rows = json.loads((tmp_path / "out" / "_manifest.json").read_bytes())["parts"]
    gone.unlink()
    report, seen = scored(monkeypatch, engine, place, tmp_path / "out", keep=("id",), reply=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert report.new_rows == next(part["rows"] for part in rows if part["file"] == gone.name)
    assert seen == [(7, 8), (8, 8)]
    # With all there, no engine runs.
    engine = Here(before=lambda file: pytest.fail("it ran"))
    report, _ = scored(monkeypatch, engine, place, tmp_path / "out", keep=("id",), reply=True)
    assert (report.rows, report.new_rows) == (350, 0)


def test_lines_and_files_and_a_bucket(monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(f"{json.dumps({'numbers': row})}\n" for row in numbers(40).tolist()))
    (tmp_path / "files").mkdir()
    for at in range(5):
        (tmp_path / "files" / f"{at}.txt").write_text(str(20 + at))
    how = how_to_run(place / "cache")
    network = LoadedNetwork(place / "bundle", how)
    for source, options in ((lines, {}), (tmp_path / "files", {"content_type": "text/x-number"})):
        out, whole = f"memory://{tmp_path.name}/{source.name}", tmp_path / f"whole-{source.name}"
        run(network, source, whole, how, **options)
        scored(monkeypatch, Here(), place, out, source, **options)
        system = fsspec.filesystem("memory")
        there = {Path(name).name: system.cat(name) for name in system.find(f"/{tmp_path.name}/{source.name}")}
        assert there == {file.name: file.read_bytes() for file in whole.iterdir()}
    # The files of the job are beside the downloads, and gone.
    assert not list((place / "cache" / "score").glob(".cluster/*"))


def test_a_unit_that_is_missing_leaves_no_manifest(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(ScoreError, match=r"^2 of 8 parts are not in .*; run the same command again, and see that all"):
        scored(monkeypatch, Here(lost=2), place, tmp_path / "out")
    assert not (tmp_path / "out" / "_manifest.json").exists()
    report, _ = scored(monkeypatch, Here(), place, tmp_path / "out")
    assert (report.rows, report.new_rows) == (350, 100)


def test_a_part_that_was_cut_off_is_not_taken_for_done(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    scored(monkeypatch, Here(), place, tmp_path / "out")
    whole = hashes(tmp_path / "out")
    damaged = next((tmp_path / "out").glob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    report, _ = scored(monkeypatch, Here(), place, tmp_path / "out")
    assert report.unreadable == 1
    assert hashes(tmp_path / "out") == whole


def test_a_row_without_an_answer_is_the_sentence_of_the_command(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    given = numbers(90)
    given[60] = 13
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": fixed_lists(given)}, rows=30)
    with pytest.raises(ClusterError, match=r"^a\.parquet, row 60: the network raised ValueError: thirteen\. Mend it"):
        scored(monkeypatch, Here(), place, tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "out" / "_manifest.json").exists()
    assert not (tmp_path / "out" / ".cluster").exists()
    report, _ = scored(monkeypatch, Here(), place, tmp_path / "null", tmp_path / "in", on_error="null")
    assert (report.rows, report.errors) == (90, 1)


def test_a_machine_that_would_answer_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    def changed(file: Path) -> None:
        shared = SharedRun.read(file.with_name(UNITS))
        described = shared.description | {"options": shared.description["options"] | {"runs_by": "ONNX Runtime on cpu"}}
        replace(shared, description=described).write(file.with_name(UNITS))

    with pytest.raises(
        ClusterError, match=r"^on \S+: this machine has runs_by 'torch on cpu', and that of the command"
    ):
        scored(monkeypatch, Here(before=changed), place, tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    write_doubler(other, sleep_s=0.001)

    def replaced(file: Path) -> None:
        shared = SharedRun.read(file.with_name(UNITS))
        replace(shared, bundle=str(other / "bundle"), reference="").write(file.with_name(UNITS))
        file.with_name("job.json").write_text(
            json.dumps(json.loads(file.read_text()) | {"application": "", "sources": {}})
        )

    with pytest.raises(ClusterError, match=r"^on \S+: .*other/bundle is another bundle here"):
        scored(monkeypatch, Here(before=replaced), place, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_file_that_changed_after_planning_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    write_numbers(source, [60], rows=30)

    def rewritten(file: Path) -> None:
        write_numbers(source, [60, 30], rows=30)

    with pytest.raises(ClusterError, match=r"^000\.parquet changed while .* was scored; run the same command again"):
        scored(monkeypatch, Here(before=rewritten), place, tmp_path / "out", source)
    assert not (tmp_path / "out" / "_manifest.json").exists()


def test_what_may_pass_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path) -> None:
    def failing(self: UnitScorer, units: Sequence[int]) -> None:
        raise StorageError("the bucket is away; try again.")

    monkeypatch.setattr(UnitScorer, "score", failing)
    with pytest.raises(StorageError, match="the bucket is away"):
        scored(monkeypatch, Here(), place, tmp_path / "out")
    said = "Traceback\n  File x\npenstock.core.errors.StorageError: the bucket is away; try again.\n\n\tat org.apache"
    assert passing_sentence(said) == "the bucket is away; try again."
    assert passing_sentence("penstock.core.errors.ScoreError: it is wrong.\n") == ""


def test_a_kept_process_that_lost_its_gpu_ends_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(self: UnitScorer, units: Sequence[int]) -> None:
        raise DeviceLost("the GPU failed (an error of CUDA); restart the process.")

    def left(status: int) -> None:
        raise SystemExit(status)

    def kept(file: Path) -> None:
        assert ended_sentence(file) == ""
        with pytest.raises(SystemExit) as raised:
            score_units_or_end(file, [0])
        assert raised.value.code == EXIT_ENDED
        assert (
            ended_sentence(file)
            == f"on {socket.gethostname()}: the GPU failed (an error of CUDA); restart the process."
        )

    monkeypatch.setattr(UnitScorer, "score", failing)
    monkeypatch.setattr(os, "_exit", left)
    # An engine that starts a new process for each attempt gets the error itself.
    with pytest.raises(DeviceLost):
        scored(monkeypatch, Here(before=kept), place, tmp_path / "out")
    assert "penstock: on " in capfd.readouterr().err


def test_tasks_of_slurm_share_the_units(monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path) -> None:
    def by_rank(file: Path) -> None:
        outcomes_folder(file, 1).mkdir()
        todo = SharedRun.read(file.with_name(UNITS)).todo
        for rank in (1, 0):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            assert slurm_units.main([str(file), "1"]) == 0
            assert parts_there(str(tmp_path / "out")) == (len(todo) // 2 if rank else len(todo))
        ends = [RankOutcome.parse(each.read_text()) for each in sorted(outcomes_folder(file, 1).glob("*.json"))]
        assert [(end.rank, end.status) for end in ends] == [(0, 0), (1, 0)]
        shutil.rmtree(outcomes_folder(file, 1))

    report, _ = scored(monkeypatch, Here(before=by_rank), place, tmp_path / "out")
    assert report.rows == 350
    kind = KINDS["score"]
    assert kind.progress(str(tmp_path / "out")) == 8
    own = RankOutcome(rank=0, host="h", status=2, sentence="it fails.")
    assert [kind.ends_all(replace(own, status=status)) for status in (2, 0, -9, 3)] == [True, False, False, False]


@given(st.integers(0, 300), st.integers(1, 40))
def test_each_unit_is_in_one_task(units: int, most: int) -> None:
    tasks = tasks_of(range(units), most)
    assert [unit for task in tasks for unit in task] == list(range(units))
    assert len(tasks) <= most
    assert all(tasks)


def test_a_machine_that_cannot_score_is_named() -> None:
    here: dict[str, Any] = {"host": "n2", "python": "/bin/python3", "job": "/out/job.json", "unseen": []}
    with pytest.raises(ClusterError, match=r"on n2 \(/bin/python3\) has no torch; install the same"):
        units_done({"place": here | {"missing": ["torch"]}})
    with pytest.raises(ClusterError, match=r"^n2 does not see /out/job\.json; give an --out in a folder that all"):
        units_done({"place": here | {"missing": [], "unseen": ["/out/job.json", "/in"]}})
    with pytest.raises(ClusterError, match=r"^n2 does not see /data/in; put it into a folder that all machines share"):
        units_done({"place": here | {"missing": [], "unseen": ["/data/in"]}})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--processes", "2"), "--processes, --gpus and --restarts are for a cluster; give --on slurm, ray or spark"),
        (("--on", "slurm"), "--on slurm needs the number of processes on all machines together"),
        (("--on", "yarn", "--processes", "2"), "--on is 'yarn'; give slurm, ray or spark://HOST:PORT."),
        (("--on", "ray", "--processes", "2", "--gpus", "2"), "--gpus 2 and --processes 2 contradict each other"),
        (("--on", "slurm", "--processes", "2", "--restarts", "-1"), "--restarts is -1; it must be at least 0."),
        (("--on", "ray", "--processes", "2", "--restarts", "1"), "--restarts is for Slurm; Spark and Ray give up"),
        (("--on", "ray", "--gpus", "2", "--device", "cpu"), "--device cpu and --gpus 2 contradict each other"),
    ],
)
def test_a_wrong_command_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    sentence: str,
) -> None:
    given = ["penstock", "score", str(tmp_path / "none"), str(tmp_path / "in"), "--to", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*given, *options])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"penstock: {sentence}")
    assert not (tmp_path / "out").exists()


def test_what_is_left_of_an_earlier_command_ends(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier: list[Path] = []

    def killed(file: Path) -> None:
        # As after SIGKILL: the files of the job remain.
        shutil.copytree(file.parent, tmp_path / "kept")
        earlier.append(file)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(monkeypatch, Here(before=killed), place, tmp_path / "out")
    shutil.copytree(tmp_path / "kept", earlier[0].parent)
    scored(monkeypatch, Here(), place, tmp_path / "out")
    assert "An earlier command for this output had not ended" in capsys.readouterr().err
    there = hashes(tmp_path / "out")
    scorer_of.cache_clear()
    assert "another command scores into the same folder" in score_units(earlier[0], [0])["error"]
    assert slurm_units.main([str(earlier[0]), "1"]) == 2
    assert hashes(tmp_path / "out") == there


def test_a_command_whose_output_another_one_took_writes_no_manifest(
    monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path
) -> None:
    class Late(Here):
        def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
            super().run(file, units, done)
            shutil.rmtree(file.parent)

    with pytest.raises(ClusterError, match="another command scores into the same folder"):
        scored(monkeypatch, Late(), place, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*manifest*"))
