// The steps of an answer as they come: one text, or the outputs of each step by name.

import { element, percent } from "./dom.js";
import { largest } from "./recognition.js";
import { toText } from "./tensors.js";

const MOST_LINES = 2000; // of outputs that are no text

/** The text of an answer, of `textOfSteps`, with `add(outputs)` for each step and `end()`. */
export class TextOfSteps {
  constructor(text) {
    this.text = text;
    this.element = element("p", { className: "answer" });
  }

  add(outputs) {
    this.element.append(this.text.add(outputs));
  }

  end() {
    this.element.append(this.text.end());
  }
}

/** A line for each step of each output, with `add(outputs)` for each step and `end()`. */
export class LinesOfSteps {
  #lines = 0;

  constructor(specs, write) {
    Object.assign(this, { specs, write });
    this.lists = specs.map(() => element("ol", { className: "steps", tabIndex: 0 }));
    this.element = element("div", {}, ...specs.map((spec, at) => this.#section(spec, this.lists[at])));
  }

  add(outputs) {
    if (this.#lines++ >= MOST_LINES) return;
    this.specs.forEach((spec, at) => {
      const list = this.lists[at];
      list.append(element("li", {}, this.#line(spec, outputs[spec.name])));
      list.scrollTop = list.scrollHeight;
    });
  }

  end() {
    if (this.#lines > MOST_LINES) for (const list of this.lists) list.append(element("li", {}, "…"));
  }

  #section(spec, list) {
    const section = element("section", { className: "output" }, element("h2", {}, spec.name), list);
    section.setAttribute("aria-label", spec.name);
    return section;
  }

  #line({ labels, dtype }, { values, shape }) {
    if (!labels?.length || shape.length !== 1) return toText(values, shape, this.write(dtype));
    const best = largest(Array.from(values, Number));
    const share = Number(values[best]);
    return `${labels[best]} ${share >= 0 && share <= 1 ? percent(share) : share.toPrecision(3)}`;
  }
}
