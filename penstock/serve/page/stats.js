// Figures from the server's counters, every one a difference between two polls. Counters grow, but fall by what one of
// several engines had counted when that is lost: then nothing is drawn for that moment, rather than less than nothing.

export const SHOWN_S = 60;
const RATE_WINDOW_S = 1;
export const WINDOW_S = 5;
// After a longer pause (a hidden tab, a server that was away) lines are broken instead of drawn across it.
const GAP_S = 3;

/**
 * The value below which a share of what a histogram counted lies, by interpolation in its bin; null when it is empty.
 * `upper` holds the bins' upper edges; the last bin may be open, with the upper edge null.
 */
export function quantile({ upper, counts }, share) {
  const total = sum(counts);
  if (total === 0) return null;
  let left = share * total;
  for (let bin = 0; bin < counts.length; bin++) {
    if (counts[bin] > 0 && left <= counts[bin]) {
      const lower = bin === 0 ? 0 : upper[bin - 1];
      return lower + ((upper[bin] ?? lower) - lower) * (left / counts[bin]);
    }
    left -= counts[bin];
  }
  return upper.findLast((edge) => edge !== null);
}

/** What was counted between two polls. */
export function between(before, after) {
  const seconds = after.uptime_s - before.uptime_s;
  const histogram = (key, edges) => ({
    upper: after[key][edges],
    counts: after[key].counts.map((value, bin) => Math.max(0, value - before[key].counts[bin])),
  });
  const batch = histogram("batch", "upper");
  const latency = histogram("latency", "upper_ms");
  const batches = sum(batch.counts);
  return {
    answeredPerS: Math.max(0, after.answered - before.answered) / seconds,
    lostPerS: Math.max(0, lost(after) - lost(before)) / seconds,
    batch,
    meanBatch: batches === 0 ? null : sum(latency.counts) / batches,
    latency,
    queue: histogram("queue", "upper_ms"),
    compute: histogram("compute", "upper_ms"),
  };
}

/** The polls of the last minute, and a point of each chart for every one of them. */
export class History {
  #polls = [];
  points = [];

  /** Takes the newest poll; returns what was counted in the last seconds, or null as long as there is only one poll. */
  add(stats) {
    const last = this.#polls.at(-1);
    const restarted = last && stats.uptime_s < last.uptime_s;
    if (restarted) {
      this.#polls = [];
      this.points = [];
    }
    if (last && !restarted && stats.uptime_s - last.uptime_s > GAP_S) this.points.push(point(stats.uptime_s));
    this.#polls.push(stats);
    this.#polls = this.#polls.filter((poll) => poll.uptime_s >= stats.uptime_s - SHOWN_S);
    this.points = this.points.filter((point) => point.atS >= stats.uptime_s - SHOWN_S - GAP_S);
    const recent = this.#last(WINDOW_S);
    const now = this.#last(RATE_WINDOW_S);
    if (!recent || !now) return null;
    this.points.push(point(stats.uptime_s, now, recent));
    return { ...recent, answeredPerS: now.answeredPerS, lostPerS: now.lostPerS };
  }

  #last(seconds) {
    const newest = this.#polls.at(-1);
    // Polls are not exactly as far apart as they should be.
    const since = newest.uptime_s - seconds - 0.2;
    const before = this.#polls.find((poll) => poll.uptime_s >= since);
    const usable = before !== newest ? before : this.#polls.at(-2);
    return usable ? between(usable, newest) : null;
  }
}

function point(atS, now = null, recent = null) {
  return {
    atS,
    answeredPerS: now && now.answeredPerS,
    lostPerS: now && now.lostPerS,
    p50: recent && quantile(recent.latency, 0.5),
    p98: recent && quantile(recent.latency, 0.98),
    p99: recent && quantile(recent.latency, 0.99),
  };
}

const lost = (stats) => stats.refused + stats.expired + stats.failed;
const sum = (counts) => counts.reduce((total, value) => total + value, 0);
