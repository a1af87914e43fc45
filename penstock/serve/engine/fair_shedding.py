"""Fair load shedding: which rows are worked for while there is more work than time, as a pure function.

Earliest deadline first alone collapses under overload: each row is run when it has almost no time left, in a small
batch, and whole kinds of rows are lost, those that are longer or shorter. Here every row has a rank between 0 and 1,
which is a hash of its deadline, so that it stays the same from one tick to the next and says nothing of the row's
length. Under overload only the rows up to some rank are worked for. Every length then loses the same share of its
rows, and those that remain are few enough to run in full batches with time left.

Ranks by hashing that are compared with one moving threshold are the admission levels of DAGOR (SoCC 2018), there
within a class of users; the rows of one request have one deadline, and so one fate.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# R rows by deadline, G groups of rows that are neighbours in that order, T thresholds

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Thresholds of the rank; the shares of work that they keep are 16% apart.
THRESHOLDS: Floats = 0.84 ** np.arange(15, -1, -1.0)
# Work is expected to take this many times what it would in full batches.
MARGIN = 1.2
# Rows in deadline order are compared with their deadlines in so many groups.
MAX_GROUPS = 32
# Of the multiplicative hash: 2**64 over the golden ratio, odd.
ODD, HALF, LOW_BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(11)


class RowWork(NamedTuple):
    """Rows in the order of their deadlines and the time they need, `[R]`, in nanoseconds.

    Args:
        slack_R: Time left until the deadline.
        soft_R: Rows that run even when late.
        share_R: Time of the row as part of a full batch of its own length.
        alone_R: Time of the row by itself.
        batch_R: Time of the smallest batch of its length that is nearly as efficient as a full one.
    """

    slack_R: Ints
    soft_R: Mask
    share_R: Floats
    alone_R: Floats
    batch_R: Floats


class Affordable(NamedTuple):
    """The rows that are worked for.

    Args:
        keep_R: Mask of them; None for all.
        spare_ns: By how much all rows may be delayed with none late; negative if some row is late all the same.
    """

    keep_R: Mask | None
    spare_ns: float


def affordable(work: RowWork, deadline_R: Ints) -> Affordable:
    """Choose the rows that are worked for: all, unless more work is done in time without some.

    Args:
        work: The rows, by deadline.
        deadline_R: Their deadlines, on any clock that does not change.
    """
    # A row that is far down in the order is still in time as part of the last batch.
    limit_R = work.slack_R - (work.batch_R - work.share_R)
    left_R = limit_R - MARGIN * work.share_R.cumsum()
    # Few rows have time to run one by one.
    np.maximum(left_R, work.slack_R - work.alone_R.cumsum(), out=left_R)
    left_R[work.soft_R] = np.inf
    spare_ns = float(left_R.min())
    if spare_ns >= 0:
        return Affordable(None, spare_ns)
    limit_R[work.soft_R] = np.inf
    hopeful_R = MARGIN * work.share_R <= limit_R
    share_R = work.share_R * hopeful_R
    limit_R[~hopeful_R] = np.inf
    rank_R = ranks(deadline_R)
    threshold = _threshold(share_R, limit_R, rank_R)
    if threshold == 1.0:
        return Affordable(None, spare_ns)
    keep_R = hopeful_R & (rank_R <= threshold) | work.soft_R
    keep_R &= MARGIN * (share_R * keep_R).cumsum() <= limit_R
    return Affordable(keep_R if keep_R.any() else None, spare_ns)


def ranks(deadline_R: Ints) -> Floats:
    """Hash deadlines to ranks, spread evenly over 0 to 1."""
    mixed_R = deadline_R.astype(np.uint64) * ODD
    mixed_R ^= mixed_R >> HALF
    mixed_R *= ODD
    return (mixed_R >> LOW_BITS) / float(1 << 53)


def _threshold(share_R: Floats, limit_R: Floats, rank_R: Floats) -> float:
    """Find the threshold with the most work in time minus that which would be late; the highest of equals."""
    rows, levels = len(share_R), len(THRESHOLDS)
    each = -(-rows // MAX_GROUPS)
    level_R = THRESHOLDS.searchsorted(rank_R)
    groups = -(-rows // each)
    if each > 1:
        level_R += np.arange(rows) // each * levels
        limit_G = np.minimum.reduceat(limit_R, np.arange(0, rows, each))
    else:
        level_R += np.arange(0, rows * levels, levels)
        limit_G = limit_R
    work_GT = np.bincount(level_R, share_R, groups * levels).reshape(groups, levels).cumsum(1)
    late_GT = MARGIN * work_GT.cumsum(0) > limit_G[:, None]
    net_T = work_GT.sum(0) - 2 * (work_GT * late_GT).sum(0)
    return float(THRESHOLDS[levels - 1 - net_T[::-1].argmax()])
