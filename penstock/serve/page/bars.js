// A bar for each label of a tensor, the largest in front.

import { element, write } from "./dom.js";
import { areProbabilities, areScores, digits, scoreText } from "./values.js";

const MOST_BARS = 12; // of more labels the likeliest are shown

export class Bars {
  constructor(spec) {
    this.spec = spec;
    this.ranks = areScores(spec); // else each number is a quantity of its own, and none is the answer
    this.rows = spec.labels.slice(0, MOST_BARS).map((label) => {
      const row = { label, name: element("span"), fill: element("i"), number: element("b") };
      row.view = element("li", {}, row.name, element("span", { className: "track" }, row.fill), row.number);
      return row;
    });
    const bars = element("ol", { className: "bars", aria: { label: spec.meaning } }, ...this.rows.map((row) => row.view));
    // What the numbers are, unless percent says it.
    const kind = areProbabilities(spec) || !this.ranks ? null : element("p", { className: "bars-kind" }, spec.units || "scores, not probabilities");
    this.view = element("div", {}, bars, ...(kind ? [kind] : []));
  }

  /** Shows one number for each label; returns the label and the number, as text, of the largest. */
  show(values) {
    const ranked = values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
    const shares = areProbabilities(this.spec);
    const [lowest, highest] = shares ? [0, 1] : [Math.min(0, ...values), Math.max(0, ...values)];
    const size = highest - lowest || 1;
    const all = values.length <= MOST_BARS;
    this.rows.forEach((row, place) => {
      const index = all ? place : ranked[place];
      const value = values[index];
      // From zero, to the left for negative numbers.
      const from = (Math.min(0, value) - lowest) / size;
      setRow(row, this.spec.labels[index], this.#number(value), from, Math.abs(value) / size, this.ranks && index === ranked[0]);
    });
    return { label: this.spec.labels[ranked[0]], value: scoreText(this.spec, values[ranked[0]]) };
  }

  #number(value) {
    return this.ranks ? scoreText(this.spec, value) : `${digits(value)}${this.spec.units && ` ${this.spec.units}`}`;
  }

  clear() {
    for (const row of this.rows) setRow(row, row.label, null, 0, 0, false);
  }
}

function setRow(row, label, text, from, length, largest) {
  write(row.name, label);
  write(row.number, text ?? "");
  row.fill.style.transform = `translateX(${100 * from}%) scaleX(${length})`;
  row.view.toggleAttribute("data-largest", largest);
}
