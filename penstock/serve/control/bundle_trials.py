"""Trials of bundles before an engine loads them: each in a disposable process, with a deadline.

A trial costs the start of an interpreter and the imports of the application. It is left out for an application of
penstock itself, and for content that has passed before with the same versions, which the cache remembers.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import final

from penstock.core.bundles.bundle import Manifest, read_manifest
from penstock.core.bundles.bundle_application import ComparedSources, compare_sources
from penstock.core.errors import PenstockError, ServeError, SourcesChanged
from penstock.core.machine.priority import lower_priority
from penstock.core.source_files.find_application import application_names
from penstock.runtime.trial_order import MAX_VERDICT_BYTES, TrialOrder
from penstock.serve.background import BackgroundTasks
from penstock.serve.control.fork_generation import ForkedProcess, Preload
from penstock.serve.control.fork_server import ForkServer
from penstock.serve.repository.bundle_preparation import RememberedFailure
from penstock.serve.settings import Settings

# Trials at a time; further ones wait.
MAX_TRIALS = 16
# A failure is remembered for so many times the time that it took, and at least for so long: a load that waits for its
# turn gets it without another trial.
REMEMBERED_TIMES = 2.0
MIN_REMEMBERED_S = 5.0
# A bundle that passed its trial, and then failed where it was loaded, is refused for so long.
REFUSED_S = 60.0
# The process that trials are forked from ends this long after the last one.
FORKED_FOR_S = 60.0
# What a process needs that trials are forked from.
PRELOADS = (Preload("torch"), Preload("penstock.runtime.trial"))
_PACKAGES = ("penstock-nn", "torch", "numpy", "onnxruntime")


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    until_s: float


@final
class BundleTrials:
    """Tries bundles for a server.

    Args:
        settings: Settings of the server.
        forks: Forks the processes of trials from the second one on, as long as they are frequent; None to start a
            Python each time.
        unexported: Tells whether the engine makes a network because its export failed.
    """

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer | None = None,
        unexported: Callable[[Manifest], bool] = lambda manifest: False,
    ) -> None:
        self._forks = forks
        self._unexported = unexported
        self._pause: asyncio.TimerHandle | None = None
        self._processes: set[int] = set()
        self._tasks = BackgroundTasks()
        self._models, self._execution = settings.models, settings.execution
        self._timeout_s = settings.limits.load_timeout_s
        self._places = asyncio.Semaphore(MAX_TRIALS)
        self._passed: set[str] = set()
        self._failed: dict[str, _Failure] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def processes(self) -> frozenset[int]:
        """The processes of trials that run."""
        return frozenset(self._processes)

    async def check(self, bundle: Path, before: ComparedSources | None = None) -> ComparedSources:
        """Try a bundle, unless it has passed before; callers for the same one share a trial.

        Args:
            bundle: Its folder.
            before: What an earlier call returned; the sources are not compared again where it still holds.

        Returns:
            The sources that were compared.

        Raises:
            PenstockError: It cannot be used, or its application ends or delays the process that imports it.
        """
        # In a thread: source files are read.
        compared, key, network = await asyncio.to_thread(self._look, bundle, before)
        if not key or key in self._passed:
            return compared
        failure = self._failed.get(key)
        if failure is not None and (left_s := failure.until_s - time.monotonic()) > 0:
            raise RememberedFailure(failure.reason, left_s)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._try(key, bundle, network=network))
        # One of several callers may give up.
        await asyncio.shield(task)
        if self._models.accept_changed_app:
            await asyncio.to_thread(self._check_tried, key, bundle, compared)
        return compared

    def _check_tried(self, key: str, bundle: Path, compared: ComparedSources) -> None:
        """Check that the sources are still the compared ones: a trial that accepts changed sources tries any.

        Raises:
            ApplicationError: The application is not there any more.
            SourcesChanged: They are others.
        """
        manifest = compared.manifest
        if compare_sources(bundle, manifest, self._models.app).sources != compared.sources:
            self._passed.discard(key)
            raise SourcesChanged(f"the sources of application {manifest.name!r} changed in its trial; load it again.")

    async def refuse(self, bundle: Path, reason: str) -> None:
        """Refuse a bundle for a while, and try it anew after that: its trial passed, and its load was fatal.

        Args:
            bundle: Its folder.
            reason: What `check` raises meanwhile.
        """
        with suppress(PenstockError, OSError):
            _, key, _ = await asyncio.to_thread(self._look, bundle)
            if key:
                self._passed.discard(key)
                await asyncio.to_thread(self._file(key).unlink, missing_ok=True)
                self._failed[key] = _Failure(reason, time.monotonic() + REFUSED_S)

    def _look(self, bundle: Path, before: ComparedSources | None = None) -> tuple[ComparedSources, str, bool]:
        """Compare the sources, identify what is tried, and tell whether its network is made.

        Returns:
            The sources, the name of the trial, empty where none is needed, and whether it makes the network.

        Raises:
            PenstockError: The bundle or its application is not there.
        """
        manifest = read_manifest(bundle)
        if before is not None and self._still_holds(before, manifest):
            compared = before
        else:
            compared = compare_sources(bundle, manifest, self._models.app)
        network = self._makes_network(manifest)
        return compared, self._key(bundle, compared, network=network), network

    def _still_holds(self, before: ComparedSources, manifest: Manifest) -> bool:
        """Tell whether sources need not be compared again, since an engine refuses any others than these."""
        return before.manifest == manifest and not before.changed and not self._models.accept_changed_app

    def _key(self, bundle: Path, compared: ComparedSources, *, network: bool) -> str:
        manifest, reference = compared.manifest, compared.reference
        # The engine says what is wrong with changed sources, unless they are accepted: those have no name.
        if compared.changed:
            return f"{bundle}:{reference}:{time.monotonic_ns()}" if self._models.accept_changed_app else ""
        if reference in application_names() and manifest.raw is None:
            return ""
        parts = (manifest.content_hash, reference, network, sys.version, *map(_version, _PACKAGES))
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        if self._file(key).is_file():
            self._passed.add(key)
        return key

    def _makes_network(self, manifest: Manifest) -> bool:
        """Tell whether an engine makes the network itself, and not only the process that exports it."""
        execution = self._execution
        in_steps = manifest.generate is not None or manifest.rate_hz is not None
        on_a_gpu = any(each.startswith("cuda") for each in execution.devices) or (
            "auto" in execution.devices and Path("/dev/nvidiactl").exists()
        )
        by_torch = execution.executor == "torch" or execution.exact
        return in_steps or on_a_gpu or by_torch or self._unexported(manifest)

    async def _try(self, key: str, bundle: Path, *, network: bool) -> None:
        started_s = time.monotonic()
        try:
            async with self._places:
                reason = await self._verdict(bundle, network=network)
        finally:
            del self._running[key]
        now_s = time.monotonic()
        if reason:
            self._failed = {other: each for other, each in self._failed.items() if each.until_s > now_s}
            kept_s = max(MIN_REMEMBERED_S, REMEMBERED_TIMES * (now_s - started_s))
            self._failed[key] = _Failure(reason, now_s + kept_s)
            raise ServeError(reason)
        self._passed.add(key)
        if not self._models.accept_changed_app:
            # Without a cache, the next server tries it again.
            with suppress(OSError):
                await asyncio.to_thread(self._remember, key)

    def _file(self, key: str) -> Path:
        return self._execution.cache.expanduser() / "trials" / key

    def _remember(self, key: str) -> None:
        self._file(key).parent.mkdir(parents=True, exist_ok=True)
        self._file(key).touch()

    async def _verdict(self, bundle: Path, *, network: bool) -> str:
        """Run the trial; returns why the bundle cannot be used, empty if it passed."""
        models = self._models
        order = TrialOrder(
            bundle=str(bundle), app=models.app, accept_changed=models.accept_changed_app, network=network
        )
        try:
            status, said = await self._run(order)
        except TimeoutError:
            return (
                f"reading its files and importing its application took longer than {self._timeout_s:g} s; mend the "
                f"application, or raise --load-timeout-s."
            )
        if said:
            return json.loads(said)
        return f"its application ended the process that imported it (status {status}); mend the application."

    async def _run(self, order: TrialOrder) -> tuple[int, bytes]:
        """Run the process of a trial to its end; returns its status and what it said.

        Raises:
            TimeoutError: It took too long, and was killed.
        """
        # Its standard input ends with this process, and then it ends itself.
        (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
        try:
            process = self._start_process(order, their_input, their_output)
            self._processes.add(process.pid)
            exit_fd = os.pidfd_open(process.pid)
            try:
                await asyncio.wait_for(_readable(exit_fd), self._timeout_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # It may not have had the time to make its group.
                process.kill()
                reaped = self._tasks.start(self._reap(process, exit_fd))
                self._fork_next()
            status = await reaped
            # A process of another session may hold the other end open.
            os.set_blocking(our_output, False)
            said = b""
            with suppress(BlockingIOError):
                said = os.read(our_output, MAX_VERDICT_BYTES)
            return status, said
        finally:
            for descriptor in (their_input, our_input, our_output, their_output):
                os.close(descriptor)

    def _fork_next(self) -> None:
        """Have the next trials forked for a while: a model seldom comes alone."""
        if self._forks is None:
            return
        # Not beside a trial that was started: both import torch, which at a low priority on a busy core takes long.
        self._forks.start()
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(FORKED_FOR_S, self._forks.pause)

    async def _reap(self, process: "subprocess.Popen[bytes] | ForkedProcess", exit_fd: int) -> int:
        """Wait for a process and return its status: on a busy core, its end at a low priority takes a while."""
        try:
            await _readable(exit_fd)
        finally:
            os.close(exit_fd)
            status = process.wait()
            self._processes.discard(process.pid)
        return status

    def _start_process(
        self, order: TrialOrder, their_input: int, output: int
    ) -> "subprocess.Popen[bytes] | ForkedProcess":
        """Start the process of a trial, in a process group to be killed with all that the application started."""
        text = order.to_json()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            forked = None
            if self._forks is not None:
                forked = self._forks.fork("trial", text, (their_input, output, nowhere))
            if forked is not None:
                return forked
            command = [sys.executable, "-m", "penstock.runtime.trial", text]
            # No session of its own: the kernel may schedule sessions as groups, each with the same share of a core.
            process = subprocess.Popen(command, stdin=their_input, stdout=output, stderr=nowhere, process_group=0)
            # Its own imports are most of its work. It sets the same before it runs what others wrote.
            lower_priority(process.pid)
            return process
        finally:
            os.close(nowhere)


async def _readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
