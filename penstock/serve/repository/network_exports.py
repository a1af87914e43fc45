"""Exports of networks to ONNX for a server, beside the changes of its models: one takes minutes, and may never end.

An engine that serves loads the graph from the cache and exports nothing itself, so that no other load waits for it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from penstock.core.bundles.bundle import Manifest, read_manifest
from penstock.core.errors import PenstockError
from penstock.runtime.onnx.export_order import ExportOrder, ExportWord
from penstock.runtime.onnx.exporter_process import EXPORT_TIMEOUT_S
from penstock.runtime.onnx.onnx_cache import is_refused, needs_export
from penstock.serve.background import BackgroundTasks
from penstock.serve.settings import Settings

# Exports at a time; further ones wait. Each takes hundreds of megabytes and more.
MAX_EXPORTS = 8
# Reads at a time of what a process has written.
_READ_BYTES = 1 << 16

Report = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Export:
    """An export that runs, and who is told of its steps."""

    reports: list[Report] = field(default_factory=list[Report])
    activity: str = ""
    task: "asyncio.Task[str] | None" = None

    def report(self, activity: str) -> None:
        self.activity = activity
        for report in self.reports:
            report(activity)


@final
class NetworkExports:
    """Exports networks in processes of their own, each with its deadlines.

    Args:
        settings: Settings of the server.
    """

    def __init__(self, settings: Settings) -> None:
        self._models, self._execution = settings.models, settings.execution
        self._timeout_s = settings.limits.load_timeout_s
        self._places = asyncio.Semaphore(MAX_EXPORTS)
        self._running: dict[ExportOrder, _Export] = {}
        self._processes: set[int] = set()
        self._tasks = BackgroundTasks()
        # Content hashes of bundles whose last export failed.
        self._failed: set[str] = set()
        execution = self._execution
        self._on_cpu = any(device in ("cpu", "auto") for device in execution.devices)
        self._exports = execution.executor != "torch" and not execution.exact

    @property
    def processes(self) -> frozenset[int]:
        """The processes that run."""
        return frozenset(self._processes)

    async def is_needed(self, bundle: Path) -> bool:
        """Tell whether an engine would export the network of a bundle.

        Args:
            bundle: Its folder.

        Raises:
            PenstockError: There is no such bundle.
        """
        # In a thread: files are read.
        return self._on_cpu and self._exports and await asyncio.to_thread(self._is_needed, bundle)

    def _is_needed(self, bundle: Path) -> bool:
        manifest = read_manifest(bundle)
        return manifest.generate is None and needs_export(manifest, self._execution.cache)

    def has_failed(self, manifest: Manifest) -> bool:
        """Tell whether torch runs the network of a bundle because its export failed."""
        if not (self._on_cpu and self._exports):
            return False
        try:
            return manifest.content_hash in self._failed or is_refused(manifest, self._execution.cache)
        except PenstockError:
            # A package is missing.
            return True

    async def export(self, bundle: Path, app: str, report: Report) -> str:
        """Export the network of a bundle; callers for the same one share an export.

        Args:
            bundle: Its folder.
            app: Reference of the application, if it is another than the one that the bundle or the command names.
            report: Called with each step.

        Returns:
            Why there is no graph; empty if there is.
        """
        order = ExportOrder(
            bundle=str(bundle),
            cache=str(self._execution.cache),
            app=app or self._models.app,
            accept_changed=self._models.accept_changed_app,
            devices=self._execution.devices,
            choice=self._execution.executor,
            stall_s=self._timeout_s,
        )
        export = self._running.get(order)
        if export is None:
            export = self._running[order] = _Export()
            export.task = asyncio.create_task(self._export(order, export))
        export.reports.append(report)
        if export.activity:
            report(export.activity)
        assert export.task is not None, order
        # One of several callers may give up.
        return await asyncio.shield(export.task)

    async def _export(self, order: ExportOrder, export: _Export) -> str:
        try:
            async with self._places:
                reason = await asyncio.wait_for(self._run(order, export), EXPORT_TIMEOUT_S + self._timeout_s)
        except TimeoutError:
            reason = (
                f"the export, or that of another process for which it waited, took longer than {EXPORT_TIMEOUT_S} s"
            )
        except OSError as error:
            reason = f"{sys.executable} cannot be run ({error.strerror or error})"
        finally:
            del self._running[order]
        with suppress(PenstockError):
            content = (await asyncio.to_thread(read_manifest, Path(order.bundle))).content_hash
            (self._failed.add if reason else self._failed.discard)(content)
        return reason

    async def _run(self, order: ExportOrder, export: _Export) -> str:
        command = [sys.executable, "-m", "penstock.runtime.onnx.export_ahead", order.to_json()]
        # Its standard input ends with this process, and then it ends itself. Its group has the exporter too.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._processes.add(process.pid)
        assert process.stdin is not None, command
        assert process.stdout is not None, command
        try:
            word = await self._last_word(process.stdout.fileno(), export)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
            process.stdout.close()
            reaped = self._tasks.start(self._reap(process))
        status = await reaped
        if word is None or word.activity:
            return f"the process that exports it ended with status {status}"
        self._on_cpu = self._on_cpu and word.on_cpu
        return word.failure

    async def _reap(self, process: subprocess.Popen[bytes]) -> int:
        # In a thread: a process that reads from a slow file system ends late.
        status = await asyncio.to_thread(process.wait)
        self._processes.discard(process.pid)
        return status

    async def _last_word(self, output: int, export: _Export) -> ExportWord | None:
        """Read the lines of the process to their end."""
        os.set_blocking(output, False)
        word, rest = None, b""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(output, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    read = os.read(output, _READ_BYTES)
                    if not read:
                        return word
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        word = ExportWord.from_line(line)
                        if word.activity:
                            export.report(word.activity)
        finally:
            loop.remove_reader(output)
