"""The table of `penstock verify`, in a terminal of few columns and in a pipe."""

import pytest

from penstock.cli.verify import _show  # pyright: ignore[reportPrivateUsage]
from penstock.verify.compare import Comparison

FILE = "photographs/of/a/long/walk/coffee.png"


@pytest.mark.parametrize("several", [False, True])
def test_the_worst_example_is_named_whole(several: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = ("kind", "heat") if several else ("",)
    found = [Comparison(backend="Python engine", tensor=tensor, examples=10, worst=FILE) for tensor in tensors]
    _show(found, dict.fromkeys(tensors, 1e-5))
    shown = capsys.readouterr().out
    assert shown.count(FILE) == len(found)
    assert "disagreements" in shown
    assert "…" not in shown
