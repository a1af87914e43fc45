// Several named tensors: an example to begin with, and the answer tensor by tensor.

import { Bars, areShares, number } from "./bars.js";
import { element, write } from "./dom.js";

const EXAMPLE_LENGTH = 6;
const LARGEST_EXAMPLE = 1024; // numbers
const MOST_ROWS = 100;
const MOST_NUMBERS = 64;

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

/** The output tensors, each under its name: bars where it has a number for each label. */
export class NamedTensors {
  constructor(specs) {
    this.tensors = specs.map((spec) => {
      const bars = spec.labels.length > 0 && spec.shape.length === 1 ? new Bars(spec) : null;
      const text = element("pre", { className: "reply", tabIndex: 0, aria: { label: spec.name } });
      const title = element("h2", {}, spec.name, " ", element("small", {}, spec.meaning));
      return { spec, bars, text, view: element("section", { className: "tensor" }, title, bars?.view ?? text) };
    });
    this.view = element("div", { className: "tensors" }, ...this.tensors.map((tensor) => tensor.view));
    this.clear();
  }

  /** Shows a reply if it has these tensors by name; returns whether it has. */
  show(reply) {
    const found = this.tensors.every(({ spec }) => fits(spec, reply?.[spec.name]));
    this.view.hidden = !found;
    if (!found) return false;
    for (const { spec, bars, text } of this.tensors) {
      if (bars) bars.show(reply[spec.name]);
      else write(text, inWords(spec, reply[spec.name]));
    }
    return true;
  }

  clear() {
    this.view.hidden = true;
    for (const { bars, text } of this.tensors) {
      bars?.clear();
      write(text, "");
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

function inWords(spec, value) {
  if (!Array.isArray(value)) return String(value);
  if (value.length === 0) return "none";
  if (spec.shape.length < 2) return numbers(value);
  const rows = value.slice(0, MOST_ROWS).map((row, index) => `${index}  ${ofRow(spec, row)}`);
  const rest = value.length > MOST_ROWS ? `\n… and ${value.length - MOST_ROWS} more` : "";
  return rows.join("\n") + rest;
}

function ofRow(spec, row) {
  if (spec.labels.length === 0 || spec.shape.length !== 2) return numbers(row.flat(Infinity));
  const best = row.indexOf(Math.max(...row));
  return `${spec.labels[best]} ${number(row[best], areShares(row))}`;
}

function numbers(values) {
  const shown = values.slice(0, MOST_NUMBERS).map((value) => (Number.isInteger(value) ? value : Number(value).toPrecision(3)));
  return shown.join(", ") + (values.length > MOST_NUMBERS ? `, … (${values.length.toLocaleString("en")} in all)` : "");
}
