// A bar for each label of a tensor, the largest in front.

import { element, write } from "./dom.js";

const MOST_BARS = 12; // of more labels the likeliest are shown

export class Bars {
  constructor(spec) {
    this.spec = spec;
    this.rows = spec.labels.slice(0, MOST_BARS).map((label) => {
      const row = { label, name: element("span"), fill: element("i"), number: element("b") };
      row.view = element("li", {}, row.name, element("span", { className: "track" }, row.fill), row.number);
      return row;
    });
    this.view = element("ol", { className: "bars", aria: { label: spec.meaning } }, ...this.rows.map((row) => row.view));
  }

  /** Shows one number for each label; returns the label and the number, as text, of the largest. */
  show(values) {
    const ranked = values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
    const shares = areShares(values);
    const [lowest, highest] = [Math.min(0, ...values), Math.max(...values)];
    const all = values.length <= MOST_BARS;
    this.rows.forEach((row, place) => {
      const index = all ? place : ranked[place];
      const value = values[index];
      const length = shares ? value : (value - lowest) / (highest - lowest || 1);
      setRow(row, this.spec.labels[index], number(value, shares), length, index === ranked[0]);
    });
    return { label: this.spec.labels[ranked[0]], value: number(values[ranked[0]], shares) };
  }

  clear() {
    for (const row of this.rows) setRow(row, row.label, null, 0, false);
  }
}

/** Whether all numbers can be shares of one, which are shown in percent. */
export const areShares = (values) => values.every((value) => value >= 0 && value <= 1);

/** A share in percent, or three digits of another number. */
export function number(value, isShare) {
  if (!isShare) return value.toPrecision(3);
  return `${(100 * value).toFixed(1)} %`;
}

function setRow(row, label, text, length, largest) {
  write(row.name, label);
  write(row.number, text ?? "");
  row.fill.style.transform = `scaleX(${length})`;
  row.view.toggleAttribute("data-largest", largest);
}
