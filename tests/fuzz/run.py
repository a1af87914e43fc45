"""Drive the borders with inputs that look for new paths.

    python -m tests.fuzz.run --inputs N [--target NAME] [--seed S] [--record]

With atheris (`.venv/bin/pip install -e '.[fuzz]'`) coverage guides the inputs; where it is not
installed, the mutations of the continuous integration are run on, which one line says.
"""

import argparse
import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import CORPUS, MOST_BYTES, TOKENS, mutations, seeds_of

NAMES = tuple(sorted(folder.name for folder in CORPUS.iterdir()))
# An input that takes longer, by the clock on the wall, whatever else the machine does, or that takes the process past
# so much memory, is a failure too.
LONGEST_S = 30
MOST_MEMORY_MB = 2_048
TRACEBACK_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Results of one target.

    Args:
        inputs: How many were run.
        seconds: How long that took.
        failing: The bytes of the first input that failed, or None.
        story: What was raised.
    """

    inputs: int
    seconds: float
    failing: bytes | None = None
    story: str = ""


def mutated(name: str, inputs: int, seed: int) -> Outcome:
    """Run a target on mutations of its seeds, without coverage, until one fails."""
    from tests.fuzz.targets import TARGETS

    start_s = time.perf_counter()
    for done, data in zip(range(inputs), mutations(seeds_of(name), random.Random(seed)), strict=False):
        try:
            TARGETS[name](data)
        except Exception:  # noqa: BLE001 - whatever a target raises is what is looked for
            return Outcome(
                inputs=done + 1,
                seconds=time.perf_counter() - start_s,
                failing=data,
                story=traceback.format_exc(limit=-4),
            )
    return Outcome(inputs=inputs, seconds=time.perf_counter() - start_s)


def guided(name: str, inputs: int, seed: int) -> Outcome:
    """Run a target under libFuzzer in a process of its own, which ends at the first failure."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        found, failures, dictionary = (Path(folder) / part for part in ("found", "failures", "dictionary"))
        found.mkdir()
        failures.mkdir()
        dictionary.write_text("".join(f'"{_escaped(token)}"\n' for token in TOKENS))
        options = [f"-runs={inputs}", f"-seed={seed}", f"-max_len={MOST_BYTES}", f"-timeout={LONGEST_S}"]
        options += [f"-rss_limit_mb={MOST_MEMORY_MB}", f"-dict={dictionary}", f"-artifact_prefix={failures}/"]
        command = [
            sys.executable,
            "-u",
            "-m",
            "tests.fuzz.run",
            "--child",
            name,
            *options,
            str(found),
            str(CORPUS / name),
        ]
        start_s = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        seconds = time.perf_counter() - start_s
        counts = [int(count) for count in re.findall(r"^#(\d+)\s", process.stderr, re.MULTILINE)]
        done = re.search(r"^Done (\d+) runs", process.stderr, re.MULTILINE)
        if process.returncode == 0 and done:
            return Outcome(inputs=int(done[1]), seconds=seconds)
        failing = [file.read_bytes() for file in sorted(failures.iterdir())]
        return Outcome(
            inputs=max(counts, default=0),
            seconds=seconds,
            failing=failing[0] if failing else b"",
            story=_end_of(process.stdout) or _end_of(process.stderr),
        )


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token[:60])


def _end_of(story: str) -> str:
    return "\n".join(story.strip().splitlines()[-TRACEBACK_LINES:])


def child(name: str, options: list[str]) -> None:
    """Hand the process to libFuzzer, which ends it."""
    # Of what is compiled it would see no coverage.
    os.environ["PENSTOCK_INTERPRETED"] = "1"
    atheris: Any = importlib.import_module("atheris")

    # Only what is under test is instrumented: coverage of NumPy or of the tests would lead astray.
    with atheris.instrument_imports(include=["penstock.serve", "penstock.core"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS

    atheris.Setup([name, *options], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    """Run the command line; return 1 if any input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs a target")
    parser.add_argument("--target", choices=NAMES, help="one target; all by default")
    parser.add_argument("--seed", type=int, default=1, help="of chance")
    parser.add_argument("--record", action="store_true", help="append the count of failures to benchmarks/results")
    arguments = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    print("Inputs are guided by coverage (atheris)." if has_atheris else "atheris is not installed: mutations alone.")
    drive = guided if has_atheris else mutated
    failed = total = 0
    for name in [arguments.target] if arguments.target else NAMES:
        outcome = drive(name, arguments.inputs, arguments.seed)
        rate = outcome.inputs / outcome.seconds
        total += outcome.inputs
        verdict = "failed" if outcome.failing is not None else "good"
        print(f"{name:10} {outcome.inputs:10,} inputs {rate:10,.0f} inputs/s  {verdict}", flush=True)
        if outcome.failing is not None:
            failed += 1
            print(f"{outcome.story}\nreplay: tests.fuzz.targets.TARGETS[{name!r}]({outcome.failing!r})", flush=True)
    if arguments.record:
        record(failed, total, f"python -m tests.fuzz.run --inputs {arguments.inputs} --seed {arguments.seed}")
    return 1 if failed else 0


def record(failed: int, total: int, command: str) -> None:
    """Append the results of all targets."""
    from benchmarks.acceptance.report.results import record_result
    from penstock.bench.measurement import make_measurement

    line = make_measurement(
        [float(failed)],
        id="server.fuzz_failures",
        workload=f"{total:,} inputs guided by coverage over the {len(NAMES)} borders: {', '.join(NAMES)}",
        metric="inputs that crash, hang, take too much memory or get a wrong answer",
        unit="failures",
        command=command,
    )
    record_result(line, "server")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    sys.exit(main())
