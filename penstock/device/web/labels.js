// The answers of a classifier: the label in large letters, and the likeliest ones as bars.

import { byId, element, percent, write } from "./dom.js";
import { Recognition, likeliest } from "./recognition.js";
import { Smoothing } from "./smoothing.js";

const BARS = 5;

export class LabelAnswers {
  keepsPicture = false;

  constructor({ outputs, recognition }) {
    this.main = outputs[0];
    this.recognition = recognition && new Recognition(recognition);
    this.smoothing = this.recognition && new Smoothing(this.recognition);
    this.rows = Array.from({ length: Math.min(BARS, this.main.labels.length) }, bar);
    byId("bars").replaceChildren(...this.rows.map(({ view }) => view));
  }

  /** The answer to one picture, without smoothing. */
  photo({ outputs }) {
    const probabilities = outputs[this.main.name];
    return this.recognition?.answer(probabilities) ?? this.#plain(probabilities);
  }

  /** The answer to a frame of a video, smoothed with those before. */
  frame({ outputs, capturedMs }) {
    const probabilities = outputs[this.main.name];
    return this.smoothing?.take(probabilities, capturedMs / 1000) ?? this.#plain(probabilities);
  }

  /** Reset for another source. */
  reset() {
    this.smoothing?.reset();
  }

  /** Show an answer; return what is announced to screen readers. */
  show({ label, group, probability, group_probability, unsure, top }) {
    byId("label").toggleAttribute("data-unsure", unsure);
    write(byId("label-big"), unsure ? "unsure" : group);
    write(byId("label-small"), unsure ? "" : [label === group ? "" : (label ?? "which kind is unsure"), percent(label && label !== group ? probability : group_probability)].filter(Boolean).join(" · "));
    this.rows.forEach((row, place) => {
      const [name, share] = top[place];
      write(row.name, name);
      write(row.number, percent(share));
      row.fill.style.transform = `scaleX(${share})`;
    });
    return unsure ? "unsure" : [group, label !== group && label].filter(Boolean).join(", ");
  }

  /** The answer of an application without a recognition: the likeliest label. */
  #plain(probabilities) {
    const top = likeliest(probabilities, BARS).map((index) => [this.main.labels[index], probabilities[index]]);
    const [label, probability] = top[0];
    return { label, group: label, probability, group_probability: probability, unsure: false, top };
  }
}

function bar() {
  const row = { name: element("span"), fill: element("i"), number: element("b") };
  row.view = element("li", {}, row.name, element("span", { className: "track" }, row.fill), row.number);
  return row;
}
