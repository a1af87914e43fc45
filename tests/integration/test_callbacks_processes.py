"""Callbacks in several processes: only the first one calls them, and a stop ends all after the same step."""

from pathlib import Path

import pytest

from tests.support.training import APPLICATION, LIMIT_S, fields, losses, penstock_run

pytestmark = [pytest.mark.timeout(2 * LIMIT_S), pytest.mark.slow]

# Validations are far apart.
CALLBACK = """

from dataclasses import replace
from pathlib import Path

from penstock import Callback
from penstock.train.callbacks.callback import Stop


class StopAtTen(Callback):
    def start(self, event):
        with (event.folder / "starts").open("a") as file:
            file.write(f"{os.environ.get('RANK', 0)}\\n")

    def step(self, event):
        return Stop(reason="ten steps") if event.step == 10 else None


recipe = replace(recipe, callbacks=[StopAtTen()], steps=200, selection=Selection(every_epochs=100))
"""


@pytest.mark.parametrize(("processes", "last"), [(1, 10), (2, 64)])
def test_a_stop_reaches_all_processes_at_the_same_step(processes: int, last: int, tmp_path: Path) -> None:
    app, run = tmp_path / "app.py", tmp_path / "run"
    app.write_text(APPLICATION + CALLBACK)
    done = penstock_run("train", app, "--out", run, "--device", "cpu", "--processes", processes)
    assert done.returncode == 0, done.stderr
    found = fields(run)
    assert (found["state"], found["stopped_after"], found["stopped_because"]) == ("finished", last, "ten steps")
    assert (found["processes"], (run / "starts").read_text()) == (processes, "0\n")
    assert [line[0] for line in losses(run)] == [last]
    assert (run / "bundle").is_dir()
