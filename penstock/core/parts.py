"""The files of a folder that is verified whenever it is read, a bundle or a pack: read, or said what is wrong."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import PenstockError


@contextmanager
def reading(file: Path, corrupt: type[PenstockError], whole: str) -> Generator[None]:
    """While it is entered, a file is read.

    Args:
        file: Which.
        corrupt: What is raised.
        whole: Of what the file is a part, `"bundle"` say.

    Raises:
        PenstockError: `corrupt`: the file is missing or cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise corrupt(f"{file} is missing; copy the {whole} again.") from None
    except OSError as error:
        raise corrupt(f"{file} cannot be read ({error.strerror}); copy the {whole} again.") from None


def verify_part(file: Path, sha256: str, corrupt: type[PenstockError], whole: str, size: int | None = None) -> None:
    """See that a file is the one that was written.

    Args:
        file: Which.
        sha256: Of what was written.
        corrupt: What is raised.
        whole: Of what the file is a part.
        size: Bytes of what was written, where that is known.

    Raises:
        PenstockError: `corrupt`: the file is missing, cannot be read or is another.
    """
    found = ""
    with reading(file, corrupt, whole):
        bytes_found = file.stat().st_size
        # Not where that is enough to tell: a link to a device would be read for ever.
        if size is None or bytes_found == size:
            with file.open("rb") as source:
                found = hashlib.file_digest(source, "sha256").hexdigest()
    if found != sha256:
        raise corrupt(f"{file} is not the file that was written ({bytes_found:,} bytes); copy the {whole} again.")
