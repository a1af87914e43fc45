// Golden examples of the bundle: inputs to try, each with what was recorded of it.

import { element } from "./dom.js";
import { Gone, Refusal, getJson } from "./server.js";
import { inputOf, pictureOf, sparkline } from "./values.js";

const LONGEST_LINE = 60;
const MOST_SHOWN = 3; // numbers of a button

/** The examples of an application: `{ body, type, numbers, text, outputs }`; none if the server offers none. */
export async function examplesOf(app) {
  try {
    const { examples } = await getJson(`v1/apps/${encodeURIComponent(app.name)}/examples`);
    return examples.map((example) => decoded(app, example));
  } catch (error) {
    if (error instanceof Gone || error instanceof Refusal) return [];
    throw error;
  }
}

/** A list of buttons, one for each example; `chosen` gets the example. */
export function exampleButtons(app, examples, chosen) {
  const list = element("ol", { className: "examples" });
  examples.forEach((example, index) => {
    const label = `Example ${index + 1}`;
    const button = element("button", { type: "button", title: label, aria: { label } }, face(app, example));
    button.addEventListener("click", () => {
      for (const other of list.querySelectorAll("[aria-pressed]")) other.removeAttribute("aria-pressed");
      button.setAttribute("aria-pressed", "true");
      chosen(example);
    });
    list.append(element("li", {}, button));
  });
  return element("div", { className: "example-list" }, element("p", {}, "Recorded examples"), list);
}

function decoded(app, { content_type: type, body: base64, outputs }) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const body = new Blob([bytes], { type });
  const text = type.startsWith("text/") || type === "application/json" ? new TextDecoder().decode(bytes) : null;
  return { body, type, text, outputs, numbers: inputOf(app, type, bytes, text) };
}

function face(app, { body, type, text, numbers }) {
  if (type.startsWith("image/")) {
    const image = element("img", { alt: "", src: URL.createObjectURL(body) });
    image.onload = () => URL.revokeObjectURL(image.src);
    return image;
  }
  if (type.startsWith("text/")) return text.length > LONGEST_LINE ? `${text.slice(0, LONGEST_LINE)}…` : text || "(no text)";
  const shown = app.inputs.map((spec) => faceOf(spec, numbers?.[spec.name])).find(Boolean);
  return shown ?? "numbers";
}

function faceOf(spec, value) {
  if (value === undefined) return null;
  const drawn = pictureOf(spec, value) ?? sparkline(spec, value);
  if (drawn) return drawn;
  const flat = Array.isArray(value) ? value.flat(Infinity) : [value];
  const few = flat.slice(0, Math.max(MOST_SHOWN, spec.labels.length ? 4 : 0)).map((number) => Number(Number(number).toPrecision(3)));
  return few.join(", ") + (flat.length > few.length ? ", …" : "");
}
