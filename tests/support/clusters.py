"""Fixtures of tests on the real clusters of `make fleet`.

A test module assigns those that it needs, `started_anew` always:

    started_anew = started_anew_fixture()
    running = running_fixture()
    spark = cluster_fixture("spark")
"""

import sys
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks.acceptance.fleet.clusters import CLUSTERS, Cluster, cluster
from benchmarks.acceptance.fleet.installed import NotInstalled


def started_anew_fixture() -> Any:
    """Return the fixture by which commands are processes of their own, not forks of one that only this process reaches.

    It applies to all tests of the module.
    """

    @pytest.fixture(scope="module", autouse=True)
    def started_anew() -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", f"{sys.prefix}/bin/python")
            yield

    return started_anew


def running_fixture() -> Any:
    """Return the fixture of each cluster in turn, which the tests of a module share."""

    @pytest.fixture(scope="module", params=list(CLUSTERS))
    def running(request: pytest.FixtureRequest, started_anew: None) -> Generator[Cluster]:
        yield from _running(request.param)

    return running


def cluster_fixture(name: str) -> Any:
    """Return the fixture of one cluster, which each test gets for itself.

    Args:
        name: slurm, spark or ray.
    """

    @pytest.fixture
    def alone(started_anew: None) -> Generator[Cluster]:
        yield from _running(name)

    return alone


def _running(name: str) -> Generator[Cluster]:
    try:
        with cluster(name) as found:
            yield found
    except NotInstalled as error:
        pytest.skip(str(error))
