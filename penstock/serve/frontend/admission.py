"""Admission control of live streams, from the measured time of batches."""

from penstock.serve.table.costs import Costs


def admits(streams: int, chunk_s: float, costs: Costs, budget_ns: int, share: float = 1.0) -> bool:
    """Decide whether this many streams, the new one included, can be answered in time.

    Streams send a chunk every `chunk_s`, each at moments of its own, and the next batch starts as soon as the last one
    ends. While a cycle of c seconds runs, `streams * c / chunk_s` chunks come, which are the next batch. So the batch
    settles where it takes as long as its own rows took to come. Beyond what the network can carry there is no such
    size. A chunk waits for the batch that runs when it comes, and then for its own: two cycles.

    Args:
        streams: Number of streams, the new one included.
        chunk_s: Seconds of the signal in a chunk.
        costs: The measured time of every batch size.
        budget_ns: Latency budget of a chunk, in nanoseconds.
        share: Share of the engine's time that this table gets.
    """
    cycle = cycle_ns(streams, chunk_s, costs, share)
    return cycle is not None and 2 * cycle <= budget_ns


def max_streams(chunk_s: float, costs: Costs, budget_ns: int, share: float = 1.0) -> float:
    """Estimate how many streams can be answered in time: as many as fill a measured batch while it runs.

    Args:
        chunk_s: Seconds of the signal in a chunk.
        costs: The measured time of every batch size.
        budget_ns: As for `admits`.
        share: Share of the engine's time that this table gets.

    Returns:
        1 at least: an idle server always tries.
    """
    times = ((rows, costs.of(rows) / share) for rows in costs.rows)
    return max([1.0, *(rows * chunk_s * 1e9 / ns for rows, ns in times if 0 < 2 * ns <= budget_ns)])


def cycle_ns(streams: int, chunk_s: float, costs: Costs, share: float = 1.0) -> float | None:
    """Steady-state time of a batch in nanoseconds; None if there is none.

    Args:
        streams: As for `admits`, like the others.
        chunk_s: Seconds of the signal in a chunk.
        costs: The measured time of every batch size.
        share: Share of the engine's time that this table gets.
    """
    between_ns = chunk_s * 1e9 / streams  # from a chunk of one stream to the next one of another
    before, before_ns = 0, 0.0
    for rows in costs.rows:
        ns = costs.of(rows) / share
        if ns <= rows * between_ns:
            if before == 0:
                return ns
            # Both the curve and the arrival time of rows are linear between two measured sizes.
            over, under = before_ns - before * between_ns, rows * between_ns - ns
            return before_ns + (ns - before_ns) * over / (over + under) if over + under > 0 else ns
        before, before_ns = rows, ns
    return None
