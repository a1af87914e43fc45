"""`python -m benchmarks.acceptance soak`, short: load, two kills, and nothing wrong, hung or lost."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.acceptance.__main__ import app
from benchmarks.acceptance.server.soak import SoakSettings, run_soak
from penstock.core.errors import BenchError
from tests.support.serving import write_doubler


@pytest.mark.slow
@pytest.mark.alone
def test_a_short_soak_with_two_kills(tmp_path: Path) -> None:
    settings = SoakSettings(
        bundle=write_doubler(tmp_path), seconds=20, rate=200, kill_every_s=3.0, budget_ms=500, seed=4
    )
    said: list[str] = []
    result = run_soak(settings, said.append)
    requests = result.requests
    assert len(result.kills) == 2
    assert requests.offered > 3000
    assert requests.answered + requests.rejected + result.lost_by_kills == requests.offered
    assert requests.answered > requests.offered / 2
    assert (requests.wrong, requests.hung, requests.failed, result.lost) == (0, 0, 0, 0)
    assert requests.opened > 50
    # A run as short as this says whether memory is measured, not whether it grows.
    assert abs(result.growth) < 0.5
    assert result.first.keys() == {"engine", "front-end 0", "front-end 1", "supervisor"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minutes", "0.1"], "the soak lasts 6 s; it must last at least 10"),
        (["--frontends", "0"], "give --frontends 1 or more"),
        (["--load", "1.5"], "the load is 1.5"),
    ],
)
def test_a_soak_that_would_say_nothing_is_refused(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["soak", "--bundle", "nowhere", *options])
    assert isinstance(result.exception, BenchError)
    assert sentence in str(result.exception)
