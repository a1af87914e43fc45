// Recorded examples to try: a button each, and the recorded answer beside the network's.

import { found, sentence } from "./boxes.js";
import { element, percent, write } from "./dom.js";
import { GOLDEN } from "./golden.js";
import { largest } from "./recognition.js";
import { areScores, numbersOf, output } from "./show.js";

const LONGEST_FACE = 60;
const MOST_SHOWN = 4; // numbers of a button
const MB = 1e6;

/** The buttons, `view`; `chosen` gets an example, `face` makes what its button shows. */
export class Examples {
  constructor({ files }, golden, face, chosen) {
    const heading = element("p", { className: "remark" }, "Recorded examples");
    this.golden = golden ?? [];
    this.buttons = this.golden.map((example, at) => {
      const button = element("button", { type: "button", title: `Example ${at + 1}`, ariaLabel: `Example ${at + 1}` }, face(example));
      button.addEventListener("click", () => chosen(example));
      return button;
    });
    this.view = element("section", { className: "examples", ariaLabel: "Recorded examples" }, heading, element("div", {}, ...this.buttons));
    this.view.hidden = golden?.length === 0;
    if (!golden) write(heading, `The recorded examples are too large to keep on this device: ${(files[GOLDEN].bytes / MB).toFixed(0)} MB.`);
  }

  /** Mark the one that is shown, or none. */
  mark(example) {
    this.buttons.forEach((button, at) => (button.ariaPressed = this.golden[at] === example ? "true" : null));
  }
}

/** What was recorded of the example that is shown, `view`. */
export class Recorded {
  constructor(description, textOf = null) {
    Object.assign(this, { description, textOf });
    this.line = element("summary");
    this.numbers = element("div");
    this.view = element("details", { className: "recorded", hidden: true }, this.line, this.numbers);
    this.view.setAttribute("aria-label", "Recorded answer");
  }

  /** Show recorded outputs; `now` are those of the network, null where they cannot be compared. `seen` is the size of a picture. */
  show(recorded, now, seen = null) {
    this.view.hidden = !recorded;
    this.numbers.replaceChildren();
    if (!recorded) return;
    const { outputs, generate } = this.description;
    const words = this.#words(recorded, seen);
    write(this.line, [`Recorded answer${words ? `: ${words}` : ""}`, now && difference(recorded, now)].filter(Boolean).join("; "));
    // An answer in steps has one row more than its output is declared with, whose labels are of no row.
    const shown = outputs.filter(({ name }) => Object.hasOwn(recorded, name));
    this.numbers.replaceChildren(...shown.map((spec) => output(generate ? { ...spec, labels: null } : spec, recorded[spec.name])));
  }

  #words(recorded, seen) {
    const { shows, outputs, recognition } = this.description;
    if (shows && seen) return sentence(found(shows, recorded, seen));
    if (this.textOf) return this.textOf(recorded);
    const [spec] = outputs;
    const { values, shape } = recorded[spec.name];
    const labels = recognition?.labels ?? spec.labels;
    if (shape.length !== 1 || !(recognition || areScores(spec)) || labels?.length !== values.length) return "";
    const best = largest(Array.from(values, Number));
    return `${labels[best]} ${recognition || spec.units === "probability" ? percent(values[best]) : numbersOf("float32")(Number(values[best]))}`;
  }
}

function difference(recorded, now) {
  let most = 0;
  for (const [name, { values, shape }] of Object.entries(recorded)) {
    const mine = now[name];
    if (String(mine.shape) !== String(shape)) return "the network's has another form";
    values.forEach((value, at) => {
      const apart = Math.abs(Number(value) - Number(mine.values[at]));
      // Written so that NaN is the largest.
      if (!(apart <= most)) most = apart;
    });
  }
  return most === 0 ? "the network's is the same" : `the network's differs by ${most.toPrecision(2)} at most`;
}

/** The first numbers of the first tensor, for a button. */
export function fewNumbers({ inputs: [spec] }, { inputs }) {
  const { values } = inputs[spec.name];
  const few = Array.from(values.slice(0, MOST_SHOWN), (value) => Number(Number(value).toPrecision(3)));
  return few.join(", ") + (values.length > MOST_SHOWN ? ", …" : "") || "no numbers";
}

/** The beginning of a text, for a button. */
export const beginning = (text) => (text.length > LONGEST_FACE ? `${text.slice(0, LONGEST_FACE)}…` : text || "(no text)");
