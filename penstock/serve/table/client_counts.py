"""Live streams by client, in memory that all front-ends share: a count-min sketch, and each front-end writes its own.

A count is the smallest of D cells that a keyed hash of the client chooses, summed over the front-ends (Cormode and
Muthukrishnan, An improved data stream summary: the count-min sketch and its applications, 2005). So the memory is
bounded whatever addresses connect, and a count is never too small. It is too large only for a client whose D cells are
all shared with others; the key of the hash is secret, so that nobody can choose addresses to that end.
"""

import mmap
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Self, final

import numpy as np
import numpy.typing as npt

# F front-ends, D cells of a client, W cells to choose each from

DEPTH, WIDTH = 4, 16_384
_SECRET_BYTES = 64
_EACH_DEPTH = np.arange(DEPTH)


@final
class ClientCounts:
    """The counts as an array over one buffer; only the front-end that this is made for changes them through it.

    Args:
        frontends: F.
        index: Index of this front-end; counts that an earlier process of it left are cleared.
        buffer: Memory of `nbytes` bytes: a secret, then zeros.
    """

    def __init__(self, frontends: int, index: int, buffer: mmap.mmap) -> None:
        self._secret = buffer[:_SECRET_BYTES]
        self._counts_FDW: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32, offset=_SECRET_BYTES).reshape(
            frontends, DEPTH, WIDTH
        )
        self._own_DW = self._counts_FDW[index]
        self._own_DW[:] = 0

    @classmethod
    def private(cls) -> Self:
        """Make the counts of a single front-end."""
        buffer = mmap.mmap(-1, nbytes(1))
        buffer[:_SECRET_BYTES] = secrets.token_bytes(_SECRET_BYTES)
        return cls(1, 0, buffer)

    @classmethod
    def attached(cls, frontends: int, index: int, file: Path) -> Self:
        """Map the counts in a file that `write_counts` made."""
        with file.open("r+b") as opened:
            return cls(frontends, index, mmap.mmap(opened.fileno(), nbytes(frontends)))

    def of(self, client: str) -> int:
        """Return the count of a client, over all front-ends."""
        return int(self._counts_FDW[:, _EACH_DEPTH, self._cells_of(client)].sum(0).min())

    def add(self, client: str, count: int) -> None:
        """Add to the count of a client."""
        self._own_DW[_EACH_DEPTH, self._cells_of(client)] += count

    def _cells_of(self, client: str) -> npt.NDArray[np.uint16]:
        digest = blake2b(client.encode("utf-8", "surrogateescape"), digest_size=2 * DEPTH, key=self._secret).digest()
        return np.frombuffer(digest, np.uint16) % WIDTH


def write_counts(file: Path, frontends: int) -> None:
    """Write a file for the counts of so many front-ends."""
    file.write_bytes(secrets.token_bytes(_SECRET_BYTES) + bytes(nbytes(frontends) - _SECRET_BYTES))


def nbytes(frontends: int) -> int:
    """Bytes of the buffer."""
    return _SECRET_BYTES + frontends * DEPTH * WIDTH * 4
