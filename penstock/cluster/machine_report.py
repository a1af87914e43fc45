"""The report of a task on its machine. It names no module of Penstock, because it runs where there may be none.

Spark and Ray pickle the function that `machine_report` returns by value, with the task that calls it. Slurm runs the
text of this file: `python -c TEXT '{"job": JOB, "paths": [...], "needed": [...]}'` prints the report as a line of JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

EXIT_UNFIT = 3


def machine_report(job: str, paths: Sequence[str], needed: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return the function with which a task reports its machine.

    The report has `host`, `python`, `job`, `missing` (modules), `unseen` (paths), and `fit`, True if nothing is missing
    or unseen.

    Args:
        job: The file of the job's record.
        paths: Further paths that the machine must see.
        needed: Modules that its Python must have.
    """

    def report() -> dict[str, Any]:
        import os
        import socket
        import sys
        from importlib.util import find_spec

        missing = [name for name in needed if find_spec(name) is None]
        unseen = [path for path in (job, *paths) if not os.path.exists(path)]
        return {
            "host": socket.gethostname(),
            "python": sys.executable,
            "job": job,
            "missing": missing,
            "unseen": unseen,
            "fit": not missing and not unseen,
        }

    return report


def main(arguments: str) -> int:
    """Print the report of this machine; return `EXIT_UNFIT` if it cannot run the job."""
    found = machine_report(**json.loads(arguments))()
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0 if found["fit"] else EXIT_UNFIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
