// The declared texts of a pack: a text box's text to inputs, and tokens to the text of an answer.

import { bestBeam, Subwords, toTokens } from "./subwords.js";
import { fromBytes, toBytes } from "./text.js";

/**
 * `given` makes inputs of a text, and a text of an example's tensors; `made()` starts the text of an answer, see `textOfSteps`.
 * Each is null where the pack declares none.
 */
export async function textsOf({ text, reply }) {
  const subwords = reply && (await read(reply));
  return { given: text ? await givenText(text) : null, made: reply ? () => textOfSteps(reply, subwords) : null };
}

/** The text that each step's outputs add, `add(outputs)`, and the rest, `end()`; of a beam search all of it at the end. */
export function textOfSteps({ tensor, parent }, subwords) {
  if (!parent) {
    const parts = subwords.parts();
    return { add: (outputs) => parts.next(Number(outputs[tensor].values[0])), end: parts.end };
  }
  const steps = [];
  const add = (outputs) => {
    steps.push({ tokens: outputs[tensor].values, parents: outputs[parent].values });
    return "";
  };
  return { add, end: () => subwords.decode(bestBeam(steps)) };
}

/** The text of all steps of a whole answer, by `textOfSteps`. */
export function textOf(steps, outputs) {
  const [{ shape: [count] }] = Object.values(outputs);
  const parts = Array.from({ length: count }, (_, at) => steps.add(stepOf(outputs, at)));
  return parts.join("") + steps.end();
}

function stepOf(outputs, at) {
  const rows = Object.entries(outputs).map(([name, { values, shape: [count, ...shape] }]) => {
    const size = values.length / count;
    return [name, { values: values.slice(at * size, (at + 1) * size), shape }];
  });
  return Object.fromEntries(rows);
}

async function givenText(text) {
  const { tensor } = text;
  if (!text.vocabulary) {
    return { inputs: (typed) => ({ [tensor]: Array.from(toBytes(typed, text)) }), example: (inputs) => fromBytes(inputs[tensor].values) };
  }
  const subwords = await read(text);
  return { inputs: (typed) => ({ [tensor]: toTokens(typed, text, subwords) }), example: (inputs) => subwords.decode(Array.from(inputs[tensor].values, Number)) };
}

async function read({ vocabulary }) {
  const response = await fetch(`../${vocabulary}`);
  if (!response.ok) throw new Error(`The host has no ${vocabulary} here: it says ${response.status}.`);
  return new Subwords(await response.json());
}
