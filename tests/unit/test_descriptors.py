"""The connections that a limit of open files leaves room for."""

import logging
import sys
from pathlib import Path

import pytest

from penstock.serve.control.descriptors import FILES, grpc_limits, within_limit
from penstock.serve.exchange.reserved_places import PLACES
from penstock.serve.settings import LimitSettings, ModelSettings, NetworkSettings, Settings


def connections(descriptors: int, *, grpc_port: int | None = None, most: int = 10_000) -> tuple[int, int]:
    """Connections of HTTP and of gRPC under a limit."""
    settings = Settings(
        models=ModelSettings(bundles=(Path("bundle"),)),
        network=NetworkSettings(grpc_port=grpc_port),
        limits=LimitSettings(max_connections=most),
    )
    lowered = within_limit(settings, descriptors)
    return lowered.limits.max_connections, grpc_limits(lowered, descriptors).max_connections


def test_connections_stay_below_the_limit_of_open_files(caplog: pytest.LogCaptureFixture) -> None:
    assert connections(sys.maxsize) == (10_000, 10_000)
    assert connections(65_536)[0] == 10_000
    assert connections(65_536, grpc_port=0) == (10_000, 10_000)
    assert not caplog.records
    for descriptors in (64, 256, 512, 1_024, 4_096, 20_000):
        assert 1 <= connections(descriptors)[0] < descriptors
        http, grpc = connections(descriptors, grpc_port=0)
        assert 1 <= grpc <= http
        assert http + 3 * grpc < descriptors
        if descriptors >= 1_024:
            assert FILES + http + 3 * grpc + (2 + 3) * PLACES <= descriptors
    assert connections(20_000, most=500)[0] == 500


def test_few_connections_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert connections(1_024)[0] == 768
    (record,) = caplog.records
    assert "1024 open files, so that a front-end has at most 768 connections, not 10000" in record.getMessage()


def test_all_that_is_lowered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        http, grpc = connections(4_096, grpc_port=0)
    (record,) = caplog.records
    assert f"at most {http} connections, and {grpc} of gRPC, not 10000" in record.getMessage()
    assert record.levelno == logging.INFO
