"""`penstock bench soak`, short: load, two kills, and nothing wrong, hung or lost."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.bench.soak import Plan, soak
from penstock.cli import build
from penstock.core.errors import BenchError
from tests.support.serving import write_doubler

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_a_short_soak_with_two_kills(tmp_path: Path) -> None:
    plan = Plan(bundle=write_doubler(tmp_path), seconds=20, rate=200, kill_every_s=3.0, budget_ms=500, seed=4)
    said: list[str] = []
    soaked = soak(plan, said.append)
    churned = soaked.churned
    assert len(soaked.kills) == 2
    assert churned.offered > 3000
    assert churned.answered + churned.refused + soaked.lost_by_kills == churned.offered
    assert churned.answered > churned.offered / 2
    assert (churned.wrong, churned.hung, churned.failed, soaked.lost) == (0, 0, 0, 0)
    assert churned.opened > 50
    # A run as short as this says whether memory is measured, not whether it grows.
    assert abs(soaked.growth) < 0.5
    assert soaked.first.keys() == {"engine", "front-end 0", "front-end 1", "supervisor"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minutes", "0.1"], "the soak lasts 6 s; it must last at least 10"),
        (["--frontends", "0"], "give --frontends 1 or more"),
        (["--load", "1.5"], "the load is 1.5"),
    ],
)
def test_a_soak_that_would_say_nothing_is_refused(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(build(), ["bench", "soak", "--bundle", "nowhere", *options])
    assert isinstance(result.exception, BenchError)
    assert sentence in str(result.exception)
