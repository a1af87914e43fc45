// Numbers as what they are: pictures, lines over time, named quantities, scores.

import { drawLine } from "./charts.js";
import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LEAST_POINTS = 8; // fewer are read, not drawn
const MOST_POINTS = 1500; // of a line
const MOST_LINES = 6;
const LEAST_SIDE = 6; // of a picture
const WAV_HEAD = 44;
const LISTED = ["bool", "int64", "uint64"];
const SCORES = /probab|logit|score|confidence|likelihood/i;

/** Whether numbers with labels are scores, so that the largest is the answer. Otherwise labels are names of quantities. */
export const areScores = ({ labels, units }) => labels.length > 0 && (!units || SCORES.test(units));

/** Whether the units say that a number is a probability, which is shown in percent. */
export const areProbabilities = ({ units }) => units === "probability";

/** A number with few digits; whole numbers as they are. */
export const digits = (value) => (typeof value !== "number" || Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4))));

/** Numbers of 32 bits, in nested lists, with as few digits as they need. */
export function fewDigits(value) {
  if (Array.isArray(value)) return value.map(fewDigits);
  const places = [6, 7, 8].find((count) => Math.fround(Number(value.toPrecision(count))) === Math.fround(value));
  return places ? Number(value.toPrecision(places)) : value;
}

/** A score of a spec: in percent, or the number. */
export const scoreText = (spec, value) => (areProbabilities(spec) ? `${(100 * value).toFixed(1)} %` : value.toPrecision(3));

const READERS = {
  bool: ["getUint8", 1],
  uint8: ["getUint8", 1],
  int8: ["getInt8", 1],
  uint16: ["getUint16", 2],
  int16: ["getInt16", 2],
  uint32: ["getUint32", 4],
  int32: ["getInt32", 4],
  float32: ["getFloat32", 4],
  float64: ["getFloat64", 8],
};

export const isReadable = (dtype) => dtype in READERS;

/** The numbers of little-endian bytes. */
export function numbersOf(dtype, buffer) {
  const [read, size] = READERS[dtype];
  const view = new DataView(buffer.buffer ?? buffer, buffer.byteOffset ?? 0, buffer.byteLength);
  return Array.from({ length: Math.floor(buffer.byteLength / size) }, (_, index) => view[read](index * size, true));
}

/** The little-endian bytes of numbers. */
export function bytesOf(dtype, numbers) {
  const [read, size] = READERS[dtype];
  const view = new DataView(new ArrayBuffer(size * numbers.length));
  numbers.forEach((number, index) => view[read.replace("get", "set")](index * size, number, true));
  return view.buffer;
}

/** The tensors of a request by name, as nested lists, or null where a browser does not see them in the body. */
export function inputOf(app, type, bytes, text) {
  const [spec] = app.inputs;
  if (type === "application/json") {
    try {
      const given = JSON.parse(text);
      return app.input ? { [spec.name]: given } : given;
    } catch {
      return null;
    }
  }
  const sound = type === "audio/wav";
  if (!app.input || !isReadable(spec.dtype) || !(sound || type === "application/octet-stream")) return null;
  const flat = numbersOf(spec.dtype, sound ? bytes.subarray(WAV_HEAD) : bytes);
  const sizes = app.live ? [flat.length / rowOf(spec.shape), ...spec.shape.slice(1)] : spec.shape;
  return { [spec.name]: nest(flat, sizes) };
}

const rowOf = (shape) => shape.slice(1).reduce((product, size) => product * size, 1);

/** A flat list as nested lists. */
export function nest(flat, [size, ...rest]) {
  if (size === undefined) return flat[0];
  if (!rest.length) return flat;
  const step = rest.reduce((product, each) => product * each, 1);
  return Array.from({ length: size }, (_, index) => nest(flat.slice(index * step, (index + 1) * step), rest));
}

/** A canvas with a grey or RGB picture, or null if the numbers are none. */
export function pictureOf(spec, value) {
  const [height, width, channels = 1, more] = shapeOf(value);
  if (spec.labels.length || more !== undefined || !(height >= LEAST_SIDE && width >= LEAST_SIDE)) return null;
  if (channels !== 1 && channels !== 3) return null;
  // Of two dimensions, only what is declared as 8 bits, or is about square, is a picture rather than a signal.
  if (shapeOf(value).length === 2 && spec.dtype !== "uint8" && Math.max(height, width) > 2 * Math.min(height, width)) return null;
  const flat = value.flat(Infinity);
  const [low, high] = spec.dtype === "uint8" ? [0, Math.max(1, spec.limits?.[1] ?? 255)] : bounds(flat);
  const canvas = element("canvas", { width, height, className: "tensor-picture", role: "img", aria: { label: `${spec.name} as a picture` } });
  const rgba = new Uint8ClampedArray(4 * width * height);
  for (let at = 0; at < width * height; at++) {
    for (let channel = 0; channel < 3; channel++) {
      rgba[4 * at + channel] = (255 * (flat[channels * at + (channels === 3 ? channel : 0)] - low)) / (high - low || 1);
    }
    rgba[4 * at + 3] = 255;
  }
  canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
  return canvas;
}

/** A tensor as a picture or as lines; or null. */
export function drawingOf(spec, value) {
  const canvas = pictureOf(spec, value);
  if (!canvas || spec.dtype === "uint8") return canvas ?? chartOf(spec, value);
  const [low, high] = bounds(value.flat(Infinity)).map((number) => `${digits(number)}${spec.units && ` ${spec.units}`}`);
  return element("figure", { className: "signal" }, canvas, element("figcaption", {}, `black is ${low}, white ${high}`));
}

/** Lines over the first dimension, one for each of a few columns, with the range of the numbers; or null. */
function chartOf(spec, value) {
  const lines = linesOf(spec, value);
  if (!lines) return null;
  const [low, high] = bounds(lines.flat());
  const names = lines.length > 1 ? lines.map((_, index) => spec.labels[index] ?? `${index}`) : [];
  const legend = names.map((name, index) => element("span", {}, element("i", { className: `series s${index}` }), name));
  const span = `${digits(low)} to ${digits(high)}${spec.units && ` ${spec.units}`}`;
  const label = `${spec.name}: ${lines[0].length} points, ${span}`;
  return element(
    "figure",
    { className: "signal", role: "img", aria: { label } },
    plot(lines, low, high),
    element("figcaption", {}, element("span", {}, `${lines[0].length.toLocaleString("en")} points, ${span}`), ...legend),
  );
}

/** The same, small and without words. */
export function sparkline(spec, value) {
  const lines = linesOf(spec, value);
  return lines && plot(lines, ...bounds(lines.flat()));
}

function plot(lines, low, high) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  lines.forEach((line, index) => {
    const step = Math.max(1, Math.ceil(line.length / MOST_POINTS));
    const kept = line.filter((_, at) => at % step === 0);
    const place = (number, at) => [(100 * at) / (kept.length - 1), 96 - (92 * (number - low)) / (high - low || 1)];
    drawLine(svg, `s${index}`, kept.map(place));
  });
  return svg;
}

function linesOf({ dtype }, value) {
  // Ids, flags and counts are read; a line through ids means nothing.
  if (LISTED.includes(dtype)) return null;
  const shape = shapeOf(value);
  if (!(shape[0] >= LEAST_POINTS) || shape.length > 2 || !value.flat().every(Number.isFinite)) return null;
  if (shape.length === 1) return [value];
  return shape[1] && shape[1] <= MOST_LINES ? Array.from({ length: shape[1] }, (_, column) => value.map((row) => row[column])) : null;
}

/** The sizes of nested lists, by their first elements. */
export function shapeOf(value) {
  const shape = [];
  for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
  return shape;
}

// Not Math.min(...numbers): a signal can have more numbers than a call takes.
const bounds = (numbers) => numbers.reduce(([low, high], number) => [Math.min(low, number), Math.max(high, number)], [Infinity, -Infinity]);
