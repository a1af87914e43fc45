// Text panel: a text, or the inputs of a network as JSON by name; and its outputs by name, or step by step.

import { byId, element, milliseconds, write } from "./dom.js";
import { beginning, Examples, fewNumbers, Recorded } from "./examples.js";
import { goldenOf } from "./golden.js";
import { numbersOf, output } from "./show.js";
import { joined, overSignal } from "./signals.js";
import { LinesOfSteps, TextOfSteps } from "./steps.js";
import { describe, exactly, fromNumbers, toText } from "./tensors.js";
import { textOf, textsOf } from "./texts.js";

const MOST_FRAMES = 1_000_000;
const MOST_NUMBERS = 10_000; // of an example in the text box

export class Typing {
  #newest = 0; // number of the latest run
  #opened = false;
  #stopped = false;
  #texts = { given: null, made: null };
  #example = null; // in the text box, as `{ text, example }`

  constructor(description, engine) {
    Object.assign(this, { description, engine });
  }

  async begin(opened) {
    const { inputs } = this.description;
    this.#texts = await textsOf(this.description);
    const { given } = this.#texts;
    byId("type").hidden = false;
    if (this.description.generate) write(byId("type-per"), "a step");
    if (given) {
      write(byId("type-label"), "A text");
      Object.assign(byId("type-json"), { spellcheck: true, rows: 5 });
    }
    byId("type-inputs").replaceChildren(...inputs.map((spec) => element("li", {}, element("b", {}, spec.name), ` ${described(spec)}`)));
    byId("type-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#opened) this.run();
      else this.#say("The network is still loading.");
    });
    byId("type-stop").addEventListener("click", () => (this.#stopped = true));
    byId("type-json").addEventListener("keydown", ({ key, ctrlKey, metaKey }) => {
      if (key === "Enter" && (ctrlKey || metaKey)) byId("type-form").requestSubmit();
    });
    const golden = await goldenOf(this.description);
    this.#offer(golden);
    if (golden?.length) this.#fill(golden[0]);
    await opened;
    this.#opened = true;
    if (golden?.length) await this.run();
  }

  #offer(golden) {
    const { made } = this.#texts;
    this.recorded = new Recorded(this.description, made && ((outputs) => textOf(made(), outputs)));
    byId("type-outputs").after(this.recorded.view);
    const face = (example) => (this.#texts.given ? beginning(this.#texts.given.example(example.inputs)) : fewNumbers(this.description, example));
    this.examples = new Examples(this.description, golden, face, (example) => {
      this.#fill(example);
      byId("type-form").requestSubmit();
    });
    byId("type-form").after(this.examples.view);
  }

  /** Put an example into the text box; a long one is run as it is, and the box says so. */
  #fill(example) {
    const tensors = Object.values(example.inputs);
    const size = tensors.reduce((sum, { values }) => sum + values.length, 0);
    const text = this.#texts.given ? this.#texts.given.example(example.inputs) : size > MOST_NUMBERS ? "" : lines(this.description.inputs, example.inputs);
    this.#example = { text, example };
    Object.assign(byId("type-json"), { value: text, placeholder: text || !size ? "" : `An example of ${size.toLocaleString("en")} numbers` });
  }

  /** Run the network on the text, or on the example whose text it is; the reason is shown if it does not fit. */
  async run() {
    const mine = ++this.#newest;
    byId("type-outputs").setAttribute("aria-busy", "true");
    try {
      const typed = byId("type-json").value;
      const example = typed === this.#example?.text ? this.#example.example : null;
      this.examples.mark(example);
      this.recorded.show(null);
      const inputs = example ? bytesOf(example.inputs) : this.#texts.given ? this.#texts.given.inputs(typed) : parsed(typed);
      if (this.description.generate) return await this.#generate(inputs, example, mine);
      if (this.description.kind === "live") return await this.#signal(inputs, example, mine);
      const { outputs, ms } = await (example ? this.engine.tensors(inputs) : this.engine.json(inputs));
      if (mine !== this.#newest) return;
      this.recorded.show(example?.outputs, outputs);
      this.#say("");
      write(byId("type-ms"), milliseconds(ms));
      const { outputs: specs } = this.description;
      byId("type-outputs").replaceChildren(...specs.map((spec) => output(spec, outputs[spec.name])));
    } catch (error) {
      if (mine !== this.#newest) return;
      byId("type-outputs").replaceChildren();
      byId("type-stop").hidden = true;
      write(byId("type-ended"), "");
      write(byId("type-ms"), "–");
      this.#say(error.message);
    } finally {
      if (mine === this.#newest) byId("type-outputs").setAttribute("aria-busy", "false");
    }
  }

  /** Run a live network over a whole signal, chunk by chunk. */
  async #signal(inputs, example, mine) {
    const { inputs: [input], outputs: [spec] } = this.description;
    const signal = example ? example.inputs[input.name] : signalOf(input, inputs);
    const parts = [];
    let ms = 0;
    for await (const part of overSignal(this.engine, this.description, signal)) {
      if (mine !== this.#newest) return;
      // A copy, as the engine's memory may be used again.
      parts.push({ ...part, values: part.values.slice() });
      ms += part.ms;
    }
    this.#say("");
    write(byId("type-ms"), milliseconds(ms));
    const outputs = { [spec.name]: joined(spec, parts) };
    byId("type-outputs").replaceChildren(output(spec, outputs[spec.name]));
    this.recorded.show(example?.outputs, outputs);
  }

  /** Show the steps of an answer as they come, until it ends, is stopped, or another one is asked for. */
  async #generate(inputs, example, mine) {
    const { outputs: specs, generate } = this.description;
    const { made } = this.#texts;
    const shown = made ? new TextOfSteps(made()) : new LinesOfSteps(specs, numbersOf);
    let steps = 0;
    let reason = null;
    const all = [];
    this.#stopped = false;
    for await (const { outputs, ended, ms } of this.engine.generate(inputs, example ? "tensors" : "json")) {
      if (mine !== this.#newest) return;
      if (!steps++) {
        this.#say("");
        write(byId("type-ended"), "");
        byId("type-outputs").replaceChildren(shown.element);
        byId("type-stop").hidden = false;
      }
      shown.add(outputs);
      if (example) all.push(outputs);
      write(byId("type-ms"), milliseconds(ms));
      reason = ended;
      if (this.#stopped) break;
    }
    shown.end();
    byId("type-stop").hidden = true;
    write(byId("type-ended"), endOf(reason, steps, generate));
    this.recorded.show(example?.outputs, this.#stopped || !example ? null : stacked(example.outputs, all));
  }

  #say(sentence) {
    write(byId("type-state"), sentence);
  }
}

/** A sentence on the end of an answer. */
function endOf(reason, steps, { max_steps: most }) {
  const count = `${steps.toLocaleString("en")} ${steps === 1 ? "step" : "steps"}`;
  if (reason === null) return `Stopped after ${count}.`;
  if (reason === "end") return `The answer is whole, ${count}.`;
  return `Cut after ${count}${steps < most ? "" : ", the most that an answer has"}.`;
}

/** The frames of a signal of any length. */
function signalOf(spec, inputs) {
  const frames = { name: "frames", min: 1, max: MOST_FRAMES };
  return fromNumbers([{ ...spec, shape: [frames, ...spec.shape.slice(1)] }], inputs)[spec.name];
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
function lines(specs, inputs) {
  const each = specs.map(({ name, dtype }) => `  ${JSON.stringify(name)}: ${toText(inputs[name].values, inputs[name].shape, exactly(dtype))}`);
  return `{\n${each.join(",\n")}\n}`;
}

const bytesOf = (inputs) => Object.fromEntries(Object.entries(inputs).map(([name, { values, shape }]) => [name, { bytes: new Uint8Array(values.slice().buffer), shape }]));

/** The outputs of all steps, stacked as the recorded ones are; null where their sizes change from step to step. */
function stacked(recorded, steps) {
  const names = Object.keys(recorded);
  if (names.some((name) => steps.some((step) => String(step[name].shape) !== String(steps[0][name].shape)))) return null;
  return Object.fromEntries(names.map((name) => [name, { values: steps.flatMap((step) => Array.from(step[name].values)), shape: [steps.length, ...steps[0][name].shape] }]));
}
