"""The command `penstock`, and `python -m penstock`."""

import sys

from penstock.core.machine.extras import missing_package

EXIT_USER_ERROR = 2


def main() -> None:
    """Run the command line; a missing package is one sentence on stderr and exit status 2."""
    try:
        from penstock.cli import main as command_line

        command_line()
    except ModuleNotFoundError as error:
        command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
        sentence = missing_package(f"penstock {command}".strip(), error.name, command)
        if sentence is None:
            raise
        sys.stderr.write(f"penstock: {sentence}\n")
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
