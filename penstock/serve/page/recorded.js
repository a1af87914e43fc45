// What was recorded of an example, beside what the server says now.

import { element, write } from "./dom.js";
import { areScores, scoreText } from "./values.js";

/** A line about the recorded answer, or nothing. */
export class Recorded {
  constructor(app) {
    this.app = app;
    this.view = element("p", { className: "recorded" });
  }

  /** `recorded` and `now` are tensors by name; without one of both there is nothing to compare. */
  show(recorded, now) {
    write(this.view, recorded ? [...this.#words(recorded), now ? difference(recorded, now) : ""].filter(Boolean).join("; ") : "");
  }

  #words(recorded) {
    const [spec] = this.app.outputs;
    const values = recorded[spec.name];
    if (!areScores(spec) || spec.shape.length !== 1 || this.app.outputs.length > 1) return [];
    const best = values.indexOf(Math.max(...values));
    return [`Recorded: ${spec.labels[best]}, ${scoreText(spec, values[best])}`];
  }
}

function difference(recorded, now) {
  let most = 0;
  for (const [name, before] of Object.entries(recorded)) {
    const [a, b] = [before, now[name]].map((value) => [value].flat(Infinity).map(Number));
    if (a.length !== b.length) return "the recorded answer has another form";
    a.forEach((number, at) => (most = Math.max(most, Math.abs(number - b[at]))));
  }
  return most === 0 ? "the recorded answer is the same" : `the recorded answer differs by ${most.toPrecision(2)} at most`;
}
