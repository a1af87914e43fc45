"""`penstock score`, as it is typed: what is refused before a bundle is read."""

import sys
from pathlib import Path

import pytest

from penstock.cli import main


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--input", "numbers"), "--input is 'numbers'; give TENSOR=COLUMN."),
        (("--input", "x=a", "--input", "x=b"), "--input names two columns for 'x', 'a' and 'b'; give one."),
        (("--on-error", "skip"), "--on-error is 'skip'; choose fail or null."),
    ],
)
def test_options_are_checked_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    sentence: str,
) -> None:
    given = ["penstock", "score", str(tmp_path / "none"), str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*given, *options])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, capsys.readouterr().err) == (2, f"penstock: {sentence}\n")


@pytest.mark.parametrize("chain", ["chain.py", "chain.py:photos", "package.module:photos"])
def test_a_chain_is_refused_and_a_folder_with_a_colon_is_a_bundle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, chain: str
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("{}\n")
    monkeypatch.setattr(sys, "argv", ["penstock", "score", chain, str(lines), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    assert "chains are not scored" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path(chain).mkdir()
    with pytest.raises(SystemExit):
        main()
    assert "chains" not in capsys.readouterr().err
