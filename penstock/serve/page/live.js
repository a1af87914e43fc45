// The live half: polls the server's counters and shows what they come to.

import { drawArea, drawBars, drawLevels, drawLine, labelBars, labelLevels, roundUp } from "./charts.js";
import { byId, count, milliseconds, write } from "./dom.js";
import { History, SHOWN_S, quantile } from "./stats.js";

let history = new History();
let of = null;

/** Shows the newest counters of an application. */
export function showStats(name, stats) {
  if (name !== of) history = new History();
  of = name;
  write(byId("rate-title"), stats.streams ? "Requests and chunks of streams" : "Requests");
  if (stats.streams) stats = { ...stats, answered: stats.answered + stats.streams.results };
  const recent = history.add(stats);
  showTotals(stats);
  if (!recent) return;
  const nowS = stats.uptime_s;
  showRate(recent, nowS);
  showLatency(recent, nowS, stats.latency_ms);
  showBatches(recent);
}

function showTotals(stats) {
  for (const outcome of ["answered", "refused", "expired", "failed"]) write(byId(outcome), count(stats[outcome]));
  write(byId("slots-in-use"), count(stats.slots.in_use));
  write(byId("slots-total"), count(stats.slots.total));
  byId("slots-meter").style.width = `${(100 * stats.slots.in_use) / stats.slots.total}%`;
  write(byId("uptime"), ` ${duration(stats.uptime_s)} ago`);
}

function showRate(recent, nowS) {
  write(byId("rate"), count(recent.answeredPerS));
  write(byId("lost-rate"), count(recent.lostPerS));
  const peak = Math.max(...history.points.map((point) => Math.max(point.answeredPerS, point.lostPerS)));
  const top = roundUp(Math.max(peak, 10));
  const line = (figure) => series(figure, nowS, (value) => 100 - (96 * value) / top);
  const svg = byId("rate-chart");
  drawLevels(svg, "grid", [4, 52]);
  drawArea(svg, "area", line("answeredPerS"));
  drawLine(svg, "answered", line("answeredPerS"));
  drawLine(svg, "lost", line("lostPerS").map(([x, y]) => [x, peakless(y)]));
  labelLevels(byId("rate-labels"), [
    [4, count(top)],
    [52, count(top / 2)],
  ]);
}

// A loss of nothing is not drawn, so that a line along the bottom always means that something was lost.
const peakless = (y) => (y === 100 ? null : y);

function showLatency(recent, nowS, budgetMs) {
  for (const [id, share] of [["p50", 0.5], ["p98", 0.98], ["p99", 0.99]]) {
    const ms = quantile(recent.latency, share);
    write(byId(id), milliseconds(ms));
    byId(id).parentElement.toggleAttribute("data-over", ms !== null && ms > budgetMs);
  }
  write(byId("budget"), milliseconds(budgetMs));
  const [waiting, network] = [quantile(recent.queue, 0.5), quantile(recent.compute, 0.5)];
  write(byId("parts"), waiting === null ? "" : `median: ${milliseconds(waiting)} waiting, ${milliseconds(network)} in the network`);
  drawLatency(nowS, budgetMs);
}

function drawLatency(nowS, budgetMs) {
  const slowest = Math.max(budgetMs, ...history.points.map((point) => point.p99 ?? 0));
  const [bottom, top] = [Math.log10(budgetMs / 300), Math.log10(slowest * 1.6)];
  const height = (ms) => Math.min(100, (100 * (top - Math.log10(ms))) / (top - bottom));
  const decades = [0.01, 0.1, 1, 10, 100, 1000, 10000].filter((ms) => height(ms) > 3 && height(ms) < 95);
  const svg = byId("latency-chart");
  drawLevels(svg, "grid", decades.map(height));
  drawLevels(svg, "budget", [height(budgetMs)]);
  for (const figure of ["p99", "p98", "p50"]) drawLine(svg, figure, series(figure, nowS, height));
  labelLevels(byId("latency-labels"), decades.map((ms) => [height(ms), `${ms} ms`]));
}

function showBatches({ batch, meanBatch }) {
  write(byId("mean-batch"), meanBatch === null ? "–" : meanBatch.toFixed(1));
  const used = batch.counts.findLastIndex((value) => value > 0);
  const shown = Math.min(batch.counts.length, Math.max(used + 1, 7));
  const largest = Math.max(...batch.counts, 1);
  drawBars(byId("batch-chart"), "bars", batch.counts.slice(0, shown).map((value) => value / largest));
  labelBars(byId("batch-labels"), Array.from({ length: shown }, (_, bin) => bucket(batch.upper, bin)));
}

function bucket(upper, bin) {
  const lower = bin === 0 ? 1 : upper[bin - 1] + 1;
  if (upper[bin] === undefined || upper[bin] === null) return `${lower}+`;
  return `${upper[bin]}`;
}

function series(figure, nowS, height) {
  return history.points.map((point) => [
    100 * (1 - (nowS - point.atS) / SHOWN_S),
    point[figure] === null ? null : height(point[figure]),
  ]);
}

function duration(seconds) {
  if (seconds < 100) return `${Math.floor(seconds)} s`;
  if (seconds < 6000) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}
