"""The sentences on command lines that typer refuses."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from penstock.cli import main
from penstock.cli.remote_arguments import run_at
from penstock.cli.serve import checked_cache
from penstock.core.errors import StorageError
from penstock.core.remote.cache_variables import cache_folder


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a wrong command line prints: one line on standard error, and exit status 2."""
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    # Nothing is wrapped.
    monkeypatch.setenv("COLUMNS", "20")
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1), printed
    return printed.err.rstrip()


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("serve b --port abc", "--port is 'abc'; give a whole number, such as --port 8000."),
        ("serve b --port=8o00", "--port is '8o00'; give a whole number, such as --port 8000."),
        ("serve b --max-batch x", "--max-batch is 'x'; give a whole number."),
        ("serve b --latency-ms fast", "--latency-ms is 'fast'; give a number, such as --latency-ms 50."),
        ("train digits --steps 1.5", "--steps is '1.5'; give a whole number."),
        ("export b --port 70000", "--port is '70000'; give a whole number from 0 to 65535, such as --port 8300."),
        ("watch p --threads -1", "--threads is '-1'; give a whole number from 1, such as --threads 1."),
        ("tiles s p --threshold 5", "--threshold is '5'; give a number from 0.001 to 1."),
        ("bench streams --count 3 --count x", "--count is 'x'; give a whole number."),
        ("inspect b --format xml", "--format is 'xml'; give text or json."),
        ("serve b --port", "--port has no value; give a whole number, such as --port 8000."),
        ("serve b --app", "--app has no value; give one, as --app REF."),
        ("serve b --compile=yes", "--compile takes no value; write --compile or --no-compile alone."),
        ("score", "score needs BUNDLE; write 'penstock score BUNDLE IN --out OUT'."),
        ("score b in", "score needs --out; write 'penstock score BUNDLE IN --out OUT'."),
        ("new images f.py", "new images needs --data; write 'penstock new images FILE.py --data DATA'."),
        ("train digits extra", "train does not take the argument 'extra'; write 'penstock train [APP]'."),
        (
            "watch packs/two x.csv",
            "watch does not take the argument 'x.csv'; write 'penstock watch PACK --source x.csv'.",
        ),
        ("srve b", "there is no command 'srve'. Did you mean 'serve', 'score'?"),
        ("bench xyz", "there is no command 'xyz'; see 'penstock bench --help'."),
    ],
)
def test_the_sentence_has_the_option_the_value_and_the_remedy(
    typed: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, *typed.split()) == f"penstock: {sentence}"


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("serve b --lat 5", "do you mean --latency-ms?"),
        ("serve b --mem 5", "do you mean --memory-fraction?"),
        ("serve b --ticket 5", "do you mean --ticket-key or --ticket-s?"),
        ("serve b --prot 5", "do you mean --port?"),
        ("serve b --pre", "do you mean --precision?"),
        ("serve b --no-exact", "do you mean --exact?"),
        ("serve b -p 5", "do you mean --port or --precision?"),
        ("serve b -port 5", "serve has no option -port; do you mean --port?"),
        ("serve b --m 5", "see 'penstock serve --help'."),
        ("serve b --zzz", "see 'penstock serve --help'."),
        ("train digits --batchsize 3", "do you mean --batch-size?"),
        ("train digits --batch_size 3", "do you mean --batch-size?"),
        ("train digits --epoch 3", "do you mean --epochs?"),
        ("train digits --bs 3", "see 'penstock train --help'."),
        ("--versoin", "do you mean --version?"),
    ],
)
def test_the_option_that_begins_so_or_is_close_is_suggested_or_none(
    typed: str, suggestion: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, *typed.split()).endswith(suggestion)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--batch-size 0", "--batch-size is 0; it must be a number above 0."),
        ("--epochs -1", "--epochs is -1.0; it must be a number above 0."),
        ("--precision int8", "--precision is 'int8'; choose one of"),
        ("--workers -1", "--workers is -1; it must be a number above 0."),
        ("--set batch_size=0", "the recipe has batch_size 0; it must be a number above 0."),
        ("--profile 0", "--profile is 0; give at least 1 step."),
        ("--on yarn", "--on is 'yarn'; give slurm, ray or spark://HOST:PORT."),
    ],
)
def test_an_option_that_is_a_setting_of_the_recipe_is_named(
    typed: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, "train", "digits", "--out", "nowhere", *typed.split()).startswith(
        f"penstock: {sentence}"
    )


@pytest.mark.parametrize("words", [[], ["bench"], ["new"]])
def test_a_group_without_a_command_prints_its_help_as_an_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert f"Usage: {' '.join(['penstock', *words])} [OPTIONS] COMMAND" in printed.err


@pytest.mark.parametrize("words", [[], ["bench"], ["new"]])
def test_the_help_that_was_asked_for_is_an_answer(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.err) == (0, "")
    assert f"Usage: {' '.join(['penstock', *words])} [OPTIONS] COMMAND" in printed.out


@pytest.mark.parametrize("path", ["file", "file/below", "file/far/below"])
def test_a_cache_that_cannot_be_a_folder_is_refused_at_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert said(monkeypatch, capsys, "serve", "b", "--cache", f"{tmp_path / path}") == (
        f"penstock: the cache {tmp_path / path} cannot be made: {file} is no folder; name another one with --cache."
    )


def test_a_cache_in_a_home_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, "serve", "b", "--cache", "~nobody-of-this-name/cache") == (
        "penstock: the cache ~nobody-of-this-name/cache cannot be found: there is no such home folder; set HOME, or "
        "name another folder for the cache (--cache, PENSTOCK_CACHE)."
    )


def test_a_cache_need_not_be_there_nor_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checked_cache(Path("~/new/cache")) == tmp_path / "new" / "cache"
    # Its graphs are read.
    tmp_path.chmod(0o500)
    try:
        assert checked_cache(tmp_path) == tmp_path
        assert checked_cache(tmp_path / "new") == tmp_path / "new"
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    "command", [["inspect", "b"], ["tiles", "b", "slide.png"], ["score", "b", "in", "--to", "out"]]
)
def test_every_command_with_a_cache_says_that_its_home_is_not_known(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").touch()
    Image.new("RGB", (64, 64)).save(tmp_path / "slide.png")
    assert "there is no such home folder; set HOME, or name another folder for the cache" in said(
        monkeypatch, capsys, *command, "--cache", "~nobody-of-this-name/cache"
    )


def test_a_run_in_a_folder_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user without one."""
    monkeypatch.setenv("PENSTOCK_CACHE", "~nobody-of-this-name/cache")
    assert run_at(tmp_path).folder == tmp_path
    with pytest.raises(StorageError, match="there is no such home folder"):
        cache_folder()
