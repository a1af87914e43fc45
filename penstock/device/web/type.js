// Text panel: a text, or the inputs of a network as JSON by name; and its outputs by name.

import { byId, element, milliseconds, percent, write } from "./dom.js";
import { largest, likeliest } from "./recognition.js";
import { describe, toText } from "./tensors.js";
import { fromBytes, toBytes } from "./text.js";

const BARS = 5;
const MOST_ROWS = 200;
const MOST_TEXT = 4000;
const DIGITS = 6; // shown of a float32
const EXAMPLE = "web/example.json";

export class Typing {
  #newest = 0; // number of the latest run
  #opened = false;

  constructor(description, engine) {
    Object.assign(this, { description, engine });
  }

  async begin(opened) {
    const { inputs, files, text } = this.description;
    byId("type").hidden = false;
    if (text) {
      write(byId("type-label"), "A text");
      Object.assign(byId("type-json"), { spellcheck: true, rows: 5 });
    }
    byId("type-inputs").replaceChildren(...inputs.map((spec) => element("li", {}, element("b", {}, spec.name), ` ${described(spec)}`)));
    byId("type-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#opened) this.run();
      else this.#say("The network is still loading.");
    });
    byId("type-json").addEventListener("keydown", ({ key, ctrlKey, metaKey }) => {
      if (key === "Enter" && (ctrlKey || metaKey)) byId("type-form").requestSubmit();
    });
    if (files?.[EXAMPLE]) {
      const example = await (await fetch(`../${EXAMPLE}`)).json();
      byId("type-json").value = text ? fromBytes(example[text.tensor]) : lines(example);
    }
    await opened;
    this.#opened = true;
    if (byId("type-json").value) await this.run();
  }

  /** Run the network on the text; the reason is shown if it does not fit. */
  async run() {
    const mine = ++this.#newest;
    try {
      const { text } = this.description;
      const typed = byId("type-json").value;
      const given = text ? { [text.tensor]: Array.from(toBytes(typed, text)) } : parsed(typed);
      const { outputs, ms } = await this.engine.json(given);
      if (mine !== this.#newest) return;
      this.#say("");
      write(byId("type-ms"), milliseconds(ms));
      const { outputs: specs } = this.description;
      byId("type-outputs").replaceChildren(...specs.map((spec) => output(spec, outputs[spec.name])));
    } catch (error) {
      if (mine !== this.#newest) return;
      byId("type-outputs").replaceChildren();
      write(byId("type-ms"), "–");
      this.#say(error.message);
    }
  }

  #say(sentence) {
    write(byId("type-state"), sentence);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The text is not JSON (${error.message}); write {"name": numbers}.`);
  }
}

function described(spec) {
  return `${describe(spec)}, ${spec.meaning}${spec.units ? ` (${spec.units})` : ""}`;
}

/** JSON with one line for each input. */
function lines(example) {
  const each = Object.entries(example).map(([name, numbers]) => `  ${JSON.stringify(name)}: ${JSON.stringify(numbers)}`);
  return `{\n${each.join(",\n")}\n}`;
}

function output(spec, { values, shape }) {
  const heading = element("h2", {}, `${spec.name} `, element("small", {}, `${spec.dtype}[${shape.join(", ")}]`));
  const section = element("section", { className: "output" }, heading, content(spec, values, shape));
  section.setAttribute("aria-label", spec.name);
  return section;
}

function content({ dtype, labels, units }, values, shape) {
  if (!labels?.length) {
    const text = toText(values, shape, dtype === "float32" ? (value) => String(Number(value.toPrecision(DIGITS))) : String);
    return element("pre", { tabIndex: 0 }, text.length > MOST_TEXT ? `${text.slice(0, MOST_TEXT)}…` : text);
  }
  const numbers = Array.from(values, Number);
  const isShare = units === "probability" || numbers.every((value) => value >= 0 && value <= 1);
  const score = (value) => (isShare ? percent(value) : value.toPrecision(3));
  if (shape.length === 1) return bars(labels, numbers, score, isShare);
  const rows = Math.min(numbers.length / labels.length, MOST_ROWS);
  const best = Array.from({ length: rows }, (_, row) => {
    const scores = numbers.slice(row * labels.length, (row + 1) * labels.length);
    const index = largest(scores);
    return element("li", {}, element("b", {}, labels[index]), element("small", {}, score(scores[index])));
  });
  return element("ol", { className: "words" }, ...best);
}

function bars(labels, numbers, score, isShare) {
  const [lowest, highest] = [Math.min(0, ...numbers), Math.max(...numbers)];
  const rows = likeliest(numbers, BARS).map((index) => {
    const share = isShare ? numbers[index] : (numbers[index] - lowest) / (highest - lowest || 1);
    const fill = element("i");
    fill.style.transform = `scaleX(${share})`;
    const track = element("span", { className: "track" }, fill);
    return element("li", {}, element("span", {}, labels[index]), track, element("b", {}, score(numbers[index])));
  });
  return element("ol", { className: "bars" }, ...rows);
}
