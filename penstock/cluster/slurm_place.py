"""Report the modules that the machines of a Slurm job lack: `python slurm_place.py FOLDER MODULE...` in a task on each.

It runs before the ranks, from a copy in the folder of the job: a machine that lacks Penstock cannot import it.
"""

import json
import os
import socket
import sys
from importlib.util import find_spec

EXIT_MISSING = 3


def main(folder: str, needed: list[str]) -> int:
    """Write what this machine has into FOLDER/RANK.json; return `EXIT_MISSING` if a module is missing."""
    # Its own folder is not that of any module.
    sys.path.pop(0)
    missing = [name for name in needed if find_spec(name) is None]
    found = {"host": socket.gethostname(), "python": sys.executable, "missing": missing, "sees_job": True}
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, f"{os.environ.get('SLURM_PROCID', '0')}.json")
    with open(f"{file}.new", "w") as sink:
        json.dump(found, sink)
    os.replace(f"{file}.new", file)
    return EXIT_MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
