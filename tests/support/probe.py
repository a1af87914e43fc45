"""A process that describes itself, for tests of how processes are started: `python -m tests.support.probe [CODE]`."""

import json
import os
import sys


def main() -> None:
    described = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "said": os.environ.get("PROBE"),
        "torch": "torch" in sys.modules,
        "pid": os.getpid(),
        "read": sys.stdin.readline(),
    }
    print(json.dumps(described), flush=True)
    print("done", file=sys.stderr, flush=True)
    if sys.argv[1:]:
        exec(sys.argv[1])


if __name__ == "__main__":
    main()
