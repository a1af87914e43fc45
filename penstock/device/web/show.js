// A tensor of an answer as what it is: bars of scores, labels of rows, lines over time, numbers.

import { element, percent } from "./dom.js";
import { largest, likeliest } from "./recognition.js";
import { toText } from "./tensors.js";

const BARS = 5;
const MOST_ROWS = 200;
const MOST_TEXT = 4000; // longer ones are folded
const DIGITS = 6; // shown of a float32
const LEAST_POINTS = 8;
const MOST_LINES = 6;
const SVG = "http://www.w3.org/2000/svg";
const SCORES = /probab|logit|score|confidence|likelihood/i;

/** Whether numbers with labels are scores, so that the largest is the answer. Otherwise labels are names of quantities. */
export const areScores = ({ labels, units }) => Boolean(labels?.length) && (!units || SCORES.test(units));

/** A section with the name of a tensor and what it holds. */
export function output(spec, { values, shape }) {
  const heading = element("h2", {}, `${spec.name} `, element("small", {}, `${spec.dtype}[${shape.join(", ")}]`));
  const section = element("section", { className: "output" }, heading, content(spec, values, shape));
  section.setAttribute("aria-label", spec.name);
  return section;
}

/** The function that writes a number of a dtype. */
export function numbersOf(dtype) {
  return dtype === "float32" ? (value) => String(Number(value.toPrecision(DIGITS))) : String;
}

function content(spec, values, shape) {
  const { dtype, labels, units } = spec;
  const write = numbersOf(dtype);
  if (!labels?.length || !(areScores(spec) || shape.length === 1)) return numeric(spec, values, shape, write);
  const numbers = Array.from(values, Number);
  const isShare = units === "probability";
  const score = (value) => (isShare ? percent(value) : `${Number(value.toPrecision(4))}${units && !areScores(spec) ? ` ${units}` : ""}`);
  if (shape.length === 1) return bars(spec, numbers, score, isShare);
  const rows = Math.min(numbers.length / labels.length, MOST_ROWS);
  const best = Array.from({ length: rows }, (_, row) => {
    const scores = numbers.slice(row * labels.length, (row + 1) * labels.length);
    const index = largest(scores);
    return element("li", {}, element("b", {}, labels[index]), element("small", {}, score(scores[index])));
  });
  const list = element("ol", { className: "words" }, ...best);
  const chart = lines(spec.name, numbers, shape);
  return chart ? element("div", {}, chart, list) : list;
}

function numeric({ name, units }, values, shape, write) {
  const text = toText(values, shape, write) + (units && !shape.length ? ` ${units}` : "");
  const numbers = element("pre", { tabIndex: 0 }, text);
  const chart = lines(name, Array.from(values, Number), shape);
  if (!chart && text.length <= MOST_TEXT) return numbers;
  const fold = element("details", {}, element("summary", {}, `All ${values.length.toLocaleString("en")} numbers`), numbers);
  return element("div", {}, ...(chart ? [chart] : []), fold);
}

/** Lines over the first dimension, one for each of a few columns, or null. */
function lines(name, numbers, [points, columns = 1, more]) {
  if (!(points >= LEAST_POINTS) || !columns || columns > MOST_LINES || more !== undefined || !numbers.every(Number.isFinite)) return null;
  const extreme = (pick) => numbers.reduce((best, number) => pick(best, number));
  const [low, high] = [extreme(Math.min), extreme(Math.max)];
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 100 100", preserveAspectRatio: "none", class: "signal", role: "img" })) svg.setAttribute(key, value);
  svg.setAttribute("aria-label", `${name}: ${points} points from ${low.toPrecision(3)} to ${high.toPrecision(3)}`);
  for (let column = 0; column < columns; column++) {
    const place = (_, at) => `${((100 * at) / (points - 1)).toFixed(2)} ${(96 - (92 * (numbers[at * columns + column] - low)) / (high - low || 1)).toFixed(2)}`;
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", `s${column}`);
    path.setAttribute("d", `M${Array.from({ length: points }, place).join("L")}`);
    svg.append(path);
  }
  return svg;
}

function bars(spec, numbers, score, isShare) {
  const { labels, units } = spec;
  const [lowest, highest] = isShare ? [0, 1] : [Math.min(0, ...numbers), Math.max(0, ...numbers)];
  const size = highest - lowest || 1;
  // Quantities stay in their order, and none is the answer.
  const order = areScores(spec) ? likeliest(numbers, BARS) : labels.map((_, index) => index);
  const rows = order.map((index) => {
    const fill = element("i");
    // From zero, to the left for negative numbers.
    fill.style.transform = `translateX(${(100 * (Math.min(0, numbers[index]) - lowest)) / size}%) scaleX(${Math.abs(numbers[index]) / size})`;
    const track = element("span", { className: "track" }, fill);
    return element("li", {}, element("span", {}, labels[index]), track, element("b", {}, score(numbers[index])));
  });
  const list = element("ol", { className: "bars" }, ...rows);
  const kind = isShare || !areScores(spec) ? "" : units || "scores, not probabilities";
  return kind ? element("div", {}, list, element("p", { className: "remark" }, kind)) : list;
}
