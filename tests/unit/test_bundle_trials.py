"""Trials of bundles in disposable processes, and deadlines of loads."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.errors import PenstockError, ServeError
from penstock.core.machine.priority import LOW
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.loading_steps import EXPORTING
from penstock.runtime.trial_order import TrialOrder
from penstock.serve.control import bundle_trials
from penstock.serve.control.bundle_trials import BundleTrials
from penstock.serve.control.fork_server import ForkServer
from penstock.serve.repository.bundle_preparation import RememberedFailure
from penstock.serve.repository.load_deadlines import LoadDeadlines
from penstock.serve.settings import ExecutionSettings, LimitSettings, ModelSettings, Settings
from tests.support.processes import eventually, exists
from tests.support.small import APP_PY, examples, write_app
from tests.support.thorough import thorough
from tests.support.warm_client import SOCKET_VARIABLE

# Runs only where the application is imported by somebody else than the test.
ELSEWHERE = "import os, sys, time\nif 'pytest' not in sys.modules:\n    {}\n"
# Of a trial that ends: at its low priority, its imports take long on a busy machine.
PATIENCE_S = 300.0
# Writes its process first.
PID = "open({!r}, 'w').write(str(os.getpid()))\n    "


@pytest.fixture(autouse=True)
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a Python for each trial: a fork of one that has imported torch is no session of its own."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)


def made(folder: Path, line: str, *, before: str = "", app: str = APP_PY) -> Path:
    """Write a bundle of an application that runs a line wherever it is imported after this test."""
    write_app(folder, ELSEWHERE.format(before + line) + app)
    found = find_application(str(folder / "app.py"))
    return Bundle.write(found, found.model(), examples(), to=folder / "bundle").folder


def trials(
    folder: Path, timeout_s: float = PATIENCE_S, executor: str = "auto", forks: ForkServer | None = None
) -> BundleTrials:
    return BundleTrials(
        Settings(
            models=ModelSettings(bundles=(folder,)),
            limits=LimitSettings(load_timeout_s=timeout_s),
            execution=ExecutionSettings(cache=folder / "cache", device="cpu", executor=executor),
        ),
        forks,
    )


def refused(check: Callable[[], BundleTrials], bundle: Path) -> str:
    with pytest.raises(PenstockError) as refusal:
        asyncio.run(check().check(bundle))
    return str(refusal.value)


@pytest.mark.thorough
def test_what_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = made(tmp_path, "pass")
    asyncio.run(trials(tmp_path).check(bundle))
    monkeypatch.setattr(BundleTrials, "_run", lambda *given: pytest.fail("tried again"))
    asyncio.run(trials(tmp_path).check(bundle))
    # With another executor the engine does more with it.
    with pytest.raises(pytest.fail.Exception):
        asyncio.run(trials(tmp_path, executor="torch").check(bundle))


def test_an_application_of_penstock_needs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_application("digits")
    raw = found.application.input
    made = Bundle.write(found, found.model(), np.zeros((2, *raw.shape), raw.numpy_dtype), to=tmp_path / "bundle")
    monkeypatch.setattr(BundleTrials, "_run", lambda *given: pytest.fail("tried"))
    asyncio.run(trials(tmp_path).check(made.folder))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        thorough("raise SystemExit('enough')", "does not import: SystemExit: enough"),
        ("os._exit(3)", "ended the process that imported it (status 3)"),
        thorough("os.kill(os.getpid(), 11)", "ended the process that imported it (status -11)"),
        thorough("raise ValueError('no')", "does not import: ValueError: no"),
        thorough("sys.stdout.close(); raise KeyError('\U0001f525' * 100_000)", "KeyError"),
    ],
)
def test_an_application_that_ends_its_process_is_refused(tmp_path: Path, line: str, said: str) -> None:
    assert said in refused(lambda: trials(tmp_path), made(tmp_path, line))


def began(monkeypatch: pytest.MonkeyPatch, what: Callable[[], bool]) -> None:
    """Begin the deadlines of trials when something holds: until then a busy machine takes as long as it likes."""
    start = BundleTrials._start_process

    def started(*given: Any) -> Any:
        process = start(*given)
        eventually(what, within_s=PATIENCE_S)
        return process

    monkeypatch.setattr(BundleTrials, "_start_process", started)


def test_an_application_that_never_ends_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    # Its whole line.
    began(monkeypatch, lambda: child.exists() and child.read_text().endswith("\n"))
    line = f"import subprocess; subprocess.Popen(['sh', '-c', 'echo $$ > {child}; sleep 1000']); time.sleep(1000)"
    bundle = made(tmp_path, line, before=PID.format(str(tmp_path / "pid")))
    assert "took longer than 0.5 s; mend the application, or raise --load-timeout-s" in refused(
        lambda: trials(tmp_path, timeout_s=0.5), bundle
    )
    assert not exists(int((tmp_path / "pid").read_text()))
    # Nobody waits for its end.
    eventually(lambda: not exists(int(child.read_text())), within_s=30)


def test_loads_share_a_trial_and_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = made(tmp_path, "os._exit(3)")
    runs: list[object] = []
    run = BundleTrials._run

    async def counted(self: BundleTrials, order: TrialOrder) -> tuple[int, bytes]:
        runs.append(order)
        return await run(self, order)

    monkeypatch.setattr(BundleTrials, "_run", counted)

    async def scene() -> None:
        tried = trials(tmp_path)
        both = await asyncio.gather(*(tried.check(bundle) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, ServeError) for each in both)
        # Remembered for the load that waited for its turn.
        with pytest.raises(RememberedFailure, match=r"status 3.* \(remembered; it is tried again in \d+ s\)\.$"):
            await tried.check(bundle)

    asyncio.run(scene())
    assert len(runs) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("line", ["pass", "time.sleep(60)"])
def test_what_the_next_trials_are_forked_from_starts_after_a_trial_and_not_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(bundle_trials, "FORKED_FOR_S", 0.2)
    # Where it ends by itself, it says so last.
    bundle = made(tmp_path, line, app=f"{APP_PY}\nopen({str(tmp_path / 'over')!r}, 'w').close()\n")
    (tmp_path / "over").unlink()
    calls: list[str] = []

    class Forks:
        """A fork server that has not been started yet."""

        def fork(self, target: str, argument: str, descriptors: tuple[int, ...]) -> None:
            calls.append("fork")

        def start(self) -> None:
            calls.append("start after" if (tmp_path / "over").exists() else "start")

        def pause(self) -> None:
            calls.append("pause")

    async def scene() -> None:
        tried = trials(tmp_path, timeout_s=PATIENCE_S if line == "pass" else 1.0, forks=cast("ForkServer", Forks()))
        await asyncio.gather(tried.check(bundle), return_exceptions=True)
        await asyncio.sleep(0.4)

    asyncio.run(scene())
    # One that hangs was killed before its end.
    assert calls == ["fork", "start after" if line == "pass" else "start", "pause"]


@pytest.mark.thorough
def test_a_trial_has_a_low_priority_and_a_group_of_its_own_in_the_session_of_the_server(tmp_path: Path) -> None:
    said = tmp_path / "said"
    line = "os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0), os.getpgid(0) == os.getpid()"
    bundle = made(tmp_path, "pass", before=f"open({str(said)!r}, 'w').write(repr(({line})))\n    ")
    asyncio.run(trials(tmp_path).check(bundle))
    assert said.read_text() == repr((max(LOW, os.getpriority(os.PRIO_PROCESS, 0)), os.getsid(0), True))


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["torch", "auto"])
def test_a_network_is_made_where_the_engine_would_make_it(tmp_path: Path, executor: str) -> None:
    app = APP_PY.replace(
        "super().__init__()\n", "super().__init__()\n        if 'pytest' not in sys.modules: os._exit(4)\n"
    )
    bundle = made(tmp_path, "pass", app=app)
    if executor == "torch":
        assert "status 4" in refused(lambda: trials(tmp_path, executor=executor), bundle)
    else:
        # The process of the exporter makes it.
        asyncio.run(trials(tmp_path, executor=executor).check(bundle))


@pytest.mark.thorough
def test_changed_sources_are_tried_only_where_they_are_accepted(tmp_path: Path) -> None:
    bundle = made(tmp_path, "pass")
    write_app(tmp_path, "raise SystemExit('changed')\n" + APP_PY)
    settings = Settings(
        models=ModelSettings(bundles=(bundle,), accept_changed_app=True),
        execution=ExecutionSettings(cache=tmp_path / "cache", device="cpu"),
    )
    assert "SystemExit: changed" in refused(lambda: BundleTrials(settings), bundle)
    # Without, the engine refuses them before they run.
    asyncio.run(trials(tmp_path).check(bundle))


@pytest.mark.thorough
def test_a_network_that_could_not_be_exported_is_made_by_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes = tmp_path / "makes"
    slow = APP_PY.replace(
        "super().__init__()\n",
        f"super().__init__()\n        if 'pytest' not in sys.modules: open({str(makes)!r}, 'w'); time.sleep(1000)\n",
    )
    bundle = made(tmp_path, "pass", app=f"import sys, time\n{slow}")

    async def check(*, failed: bool, timeout_s: float) -> None:
        settings = Settings(
            models=ModelSettings(bundles=(bundle,)),
            limits=LimitSettings(load_timeout_s=timeout_s),
            execution=ExecutionSettings(cache=tmp_path / "cache", device="cpu"),
        )
        await BundleTrials(settings, unexported=lambda manifest: failed).check(bundle)

    asyncio.run(check(failed=False, timeout_s=PATIENCE_S))
    began(monkeypatch, makes.exists)
    with pytest.raises(ServeError, match=r"took longer than 0\.5 s"):
        asyncio.run(check(failed=True, timeout_s=0.5))


def test_a_load_is_given_up_after_the_deadline_of_a_step() -> None:
    async def scene() -> None:
        deadlines = LoadDeadlines(0.3)
        never = asyncio.get_running_loop().create_future()
        start_s = time.monotonic()
        waiting = asyncio.create_task(deadlines.wait(1, never))
        for _ in range(3):
            await asyncio.sleep(0.2)
            deadlines.begin_step(1, "measuring")
            deadlines.begin_step(2, "another one")
        with pytest.raises(ServeError, match=r"after 0.3 s in one step \(measuring\)"):
            await waiting
        assert time.monotonic() - start_s > 0.8
        assert never.cancelled()
        # An export ends itself.
        later = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(deadlines.wait(1, later))
        await asyncio.sleep(0)
        deadlines.begin_step(1, f"{EXPORTING} (it took 9 s last time)")
        await asyncio.sleep(0.5)
        later.set_result("done")
        assert await waiting == "done"

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_load_that_ended_when_it_is_cancelled_still_gives_its_table() -> None:
    async def scene() -> None:
        deadlines = LoadDeadlines(60)
        load = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(deadlines.wait(1, load))
        await asyncio.sleep(0)
        load.set_result("a table")
        waiting.cancel()
        assert await waiting == "a table"

    asyncio.run(asyncio.wait_for(scene(), 10))
