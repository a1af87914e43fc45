// Several named tensors: an example to begin with, and the answer tensor by tensor.

import { Bars } from "./bars.js";
import { element, write } from "./dom.js";
import { areScores, digits, drawingOf, scoreText } from "./values.js";

const EXAMPLE_LENGTH = 6;
const LARGEST_EXAMPLE = 1024; // numbers
const MOST_ROWS = 100;
const MOST_NUMBERS = 64; // in front of those that are folded

/** `ids: int64[tokens ≤ 64], token ids`. */
export function describe({ name, dtype, shape, meaning, units }) {
  const sizes = shape.map((size) => (typeof size === "number" ? size : `${size.name} ≤ ${size.max}`));
  return `${name}: ${dtype}[${sizes.join(", ")}], ${meaning}${units && ` (${units})`}`;
}

/** Valid inputs as JSON by name, or nothing if that would be long. */
export function exampleOf(specs) {
  const sizes = specs.map(({ shape }) => shape.map(lengthOf));
  const count = sizes.reduce((sum, shape) => sum + shape.reduce((product, size) => product * size, 1), 0);
  if (count > LARGEST_EXAMPLE) return "";
  const lines = specs.map((spec, at) => `  ${JSON.stringify(spec.name)}: ${JSON.stringify(nested(spec, sizes[at]))}`);
  return `{\n${lines.join(",\n")}\n}`;
}

const lengthOf = (size) => (typeof size === "number" ? size : Math.min(size.max, Math.max(size.min, EXAMPLE_LENGTH)));

function nested(spec, shape) {
  let next = 0;
  const make = (sizes) => (sizes.length === 0 ? exampleNumber(spec, next++) : Array.from({ length: sizes[0] }, () => make(sizes.slice(1))));
  return make(shape);
}

function exampleNumber({ dtype, limits }, index) {
  if (dtype === "bool") return 1;
  const [low, high] = limits ?? [0, dtype.startsWith("float") ? 0 : 100];
  // Flags, such as a mask, are set.
  if (high - low <= 1) return high;
  return low + ((index + 1) % (Math.floor(high - low) + 1));
}

/** The output tensors, each under its name: bars, a picture, lines or numbers, by what it is. */
export class NamedTensors {
  constructor(specs) {
    this.tensors = specs.map((spec) => {
      const bars = spec.labels.length > 0 && spec.shape.length === 1 ? new Bars(spec) : null;
      const drawn = element("div", { className: "drawn" });
      const text = element("pre", { className: "reply", tabIndex: 0, aria: { label: spec.name } });
      const all = element("pre", { className: "numbers", tabIndex: 0 });
      const fold = element("details", {}, element("summary", {}, "All numbers"), all);
      const title = element("h2", {}, spec.name, " ", element("small", {}, spec.meaning));
      const shown = bars ? [bars.view] : [drawn, text, fold];
      return { spec, bars, drawn, text, all, fold, view: element("section", { className: "tensor" }, title, ...shown) };
    });
    this.view = element("div", { className: "tensors" }, ...this.tensors.map((tensor) => tensor.view));
    this.clear();
  }

  /** Shows tensors by name if these are they; returns whether they are. */
  show(named) {
    const found = this.tensors.every(({ spec }) => fits(spec, named?.[spec.name]));
    this.view.hidden = !found;
    if (found) for (const tensor of this.tensors) this.#show(tensor, named[tensor.spec.name]);
    return found;
  }

  #show({ spec, bars, drawn, text, all, fold }, value) {
    if (bars) return bars.show(value);
    const picture = drawingOf(spec, value);
    drawn.replaceChildren(...(picture ? [picture] : []));
    const words = inWords(spec, value);
    write(text, picture && !spec.labels.length ? "" : words.text);
    write(all, words.isAll && !(picture && !spec.labels.length) ? "" : JSON.stringify(value));
    fold.hidden = all.textContent === "";
  }

  clear() {
    this.view.hidden = true;
    for (const { bars, drawn, text, all, fold } of this.tensors) {
      bars?.clear();
      drawn.replaceChildren();
      write(text, "");
      write(all, "");
      fold.hidden = true;
    }
  }
}

/** Whether a value has the form of a tensor: numbers in lists, as many as its fixed sizes say. */
function fits(spec, value, axis = 0) {
  if (axis === spec.shape.length) return typeof value === "number" || typeof value === "boolean";
  const size = spec.shape[axis];
  if (!Array.isArray(value) || (typeof size === "number" && value.length !== size)) return false;
  return value.every((item) => fits(spec, item, axis + 1));
}

/** A tensor as text, and whether that is all of it. */
function inWords(spec, value) {
  const units = spec.units ? ` ${spec.units}` : "";
  if (!Array.isArray(value)) return { text: digits(value) + units, isAll: true };
  if (value.length === 0) return { text: "none", isAll: true };
  if (spec.shape.length < 2) return { text: numbers(value) + units, isAll: value.length <= MOST_NUMBERS };
  const rows = value.slice(0, MOST_ROWS).map((row, index) => `${index}  ${ofRow(spec, row)}`);
  const rest = value.length > MOST_ROWS ? `\n… and ${(value.length - MOST_ROWS).toLocaleString("en")} more` : "";
  const flat = value[0].flat?.(Infinity) ?? [];
  return { text: rows.join("\n") + rest, isAll: !rest && flat.length <= MOST_NUMBERS && !(areScores(spec) && spec.shape.length === 2) };
}

function ofRow(spec, row) {
  if (!areScores(spec) || spec.shape.length !== 2) return numbers(row.flat(Infinity));
  const best = row.indexOf(Math.max(...row));
  return `${spec.labels[best]} ${scoreText(spec, row[best])}`;
}

function numbers(values) {
  const shown = values.slice(0, MOST_NUMBERS).map(digits);
  return shown.join(", ") + (values.length > MOST_NUMBERS ? `, … (${values.length.toLocaleString("en")} in all)` : "");
}
