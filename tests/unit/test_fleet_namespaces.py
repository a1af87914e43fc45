"""Network namespaces of `make fleet`, with a program `ip` that fails where it is told to."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.acceptance.fleet.installed import NotInstalled
from benchmarks.acceptance.fleet.namespaces import namespaces
from penstock.core.errors import BenchError

IP = """#!/bin/sh
echo "$*" >> {log}
case "$*" in {fails}) echo "Operation not permitted" >&2; exit 1;; esac
"""
Fake = Callable[[str], Path]


@pytest.fixture
def fake_ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    def write(fails: str) -> Path:
        (tmp_path / "ip").write_text(IP.format(log=tmp_path / "log", fails=fails))
        (tmp_path / "ip").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        return tmp_path / "log"

    return write


def test_what_cannot_be_made_is_not_installed_and_the_rest_is_removed(fake_ip: Fake) -> None:
    log = fake_ip("'netns add '*-1")
    says = r"cannot be made here \('ip netns add ps\w+-1': Operation not permitted"
    with pytest.raises(NotInstalled, match=says), namespaces():
        pytest.fail("they were made")
    assert [line.split()[:2] for line in log.read_text().splitlines()[-2:]] == [["netns", "delete"], ["link", "delete"]]


def test_what_cannot_be_removed_is_no_reason_to_skip_a_test(fake_ip: Fake) -> None:
    log = fake_ip("'netns delete '*")
    says = r"is left here \('ip netns delete ps\w+-0'"
    with pytest.raises(BenchError, match=says) as raised, namespaces() as network:
        assert len(network.nodes) == 2
    assert not isinstance(raised.value, NotInstalled)
    # The bridge was removed all the same.
    assert log.read_text().splitlines()[-1].startswith("link delete ps")
