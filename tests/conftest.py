"""Options and Hypothesis profiles of all tests, and processes that begin with torch imported."""

import gc
import os
import sys
from collections.abc import Generator
from contextlib import ExitStack

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from penstock.serve.compiled import stale_names
from tests.support.generated import FULL
from tests.support.warm import PYTHON_VARIABLE, warm_processes

# Each of its cases is one page.
DOCUMENTATION = "test_docs.py::test_every_example_runs["

# A deadline of an example is wall-clock time, which a busy machine exceeds.
for _profile in (settings.get_current_profile_name(), FULL):
    settings.register_profile(_profile, settings(deadline=None))
settings.load_profile(settings.get_current_profile_name())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start each process anew, and not as a fork")


def pytest_configure(config: pytest.Config) -> None:
    _refuse_stale_modules()
    if config.option.cold or config.option.collectonly:
        return
    if PYTHON_VARIABLE in os.environ:
        # A worker of pytest-xdist shares that of its controller.
        sys.executable = os.environ[PYTHON_VARIABLE]
        return
    warm = ExitStack()
    warm.enter_context(warm_processes(eager=bool(config.getoption("numprocesses", None))))
    config.add_cleanup(warm.close)


def _refuse_stale_modules() -> None:
    """Test what is there, not what was compiled from an earlier source."""
    if PYTHON_VARIABLE not in os.environ and (stale := stale_names()):
        raise pytest.UsageError(f"Run `make setup`: {', '.join(stale)} was changed after it was compiled.")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without garbage collection, which takes 3 s of a processor in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start files with long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: "tests/unit" in item.nodeid)


class _FileScheduling(LoadScopeScheduling):
    """Keep the tests of a file on one worker; each page of the documentation counts as a file."""

    def _split_scope(self, nodeid: str) -> str:
        # pytest 9.2 ignores the group that xdist 3.8 adds to an item's id, so that `--dist loadgroup` groups nothing.
        return nodeid if DOCUMENTATION in nodeid else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _FileScheduling(config, log)
