// The half where one tries an application: something to give it, by its input's spec, and what it answers.

import { Answer } from "./answer.js";
import { densePanel } from "./dense.js";
import { element, sleep } from "./dom.js";
import { Drawing } from "./draw.js";
import { exampleButtons, examplesOf } from "./examples.js";
import { apiKey } from "./key.js";
import { Gone, ask } from "./server.js";
import { describe, exampleOf } from "./tensors.js";
import { bytesOf, drawingOf, fewDigits, inputOf, isReadable, pictureOf, shapeOf } from "./values.js";

const LARGEST_PREVIEW = 64;
const LARGEST_EXAMPLE = 256;
const MOST_JSON = 1 << 16; // of an example in the text box
const MOST_FIELDS = 16;
const TEXT = "text/plain";
const LONGEST_WAIT_MS = 5000;

/** The panel of an application. `connection` says when a lost server is back. */
export function tryPanel(app, connection) {
  if (app.dense && isReadable(app.output.dtype)) return densePanel(app, connection);
  const answer = new Answer(app);
  const sender = new Sender(app, connection, answer);
  const isImage = app.input?.shape.length === 2 && app.input.dtype === "uint8";
  const isText = app.accepts.includes(TEXT);
  const input = isImage ? drawingInput(app, sender) : isText ? textInput(app, sender) : otherInput(app, sender);
  const side = element("div", {}, ...input.parts);
  offerExamples(app, sender, side, input.take);
  return element("div", { className: "try" }, side, answer.view, sameFromAShell(app, isImage));
}

/** Puts the recorded examples below the input, and begins with the first one. */
async function offerExamples(app, sender, side, take) {
  const typed = side.querySelector("textarea");
  const before = typed?.value;
  const examples = await examplesOf(app);
  if (!examples.length) return;
  side.append(exampleButtons(app, examples, (example) => take(example)));
  // Who is in the text box is about to type there, and what was sent stays beside its answer.
  const isUntouched = typed?.value === before && document.activeElement !== typed && !sender.used;
  if (isUntouched) take(examples[0], false);
}

/** Sends at most one request at a time; of those that come meanwhile, only the latest is sent. */
class Sender {
  used = false; // whether anything was ever sent
  #wanted = null;
  #busy = false;
  #obstacle = ""; // why the request whose turn it is has to wait

  constructor(app, connection, answer) {
    Object.assign(this, { app, connection, answer });
  }

  /** `make` gives the body and its content type when it is this request's turn. */
  async send(make) {
    this.used = true;
    this.#wanted = make;
    if (this.#obstacle) this.answer.say(this.#obstacle);
    if (this.#busy) return;
    this.#busy = true;
    while (this.#wanted) {
      const turn = this.#wanted;
      this.#wanted = null;
      await this.#sendOne(turn);
    }
    this.#busy = false;
  }

  /** Nothing is to be answered any more. */
  forget() {
    this.#wanted = null;
    this.forgotten = (this.forgotten ?? 0) + 1;
    this.answer.clear();
  }

  async #sendOne(make) {
    const forgotten = this.forgotten;
    try {
      const { body, type, outputs } = await make();
      let steps = 0;
      const onStep = (step) => forgotten === this.forgotten && this.answer.step(step, steps++ === 0);
      const answer = await ask(this.app, body, type, onStep);
      if (forgotten !== this.forgotten) return;
      this.answer.show({ ...answer, body, outputs });
    } catch (error) {
      if (forgotten === this.forgotten) await this.#explain(error, make, forgotten);
    }
  }

  async #explain(error, make, forgotten) {
    if (error instanceof Gone) {
      this.connection.lost();
      await this.#wait("No answer; asking again when the server is back.", this.connection.back());
    } else if (error.status === 503 && error.retryAfterMs) {
      await this.#wait(`Refused: ${error.message} Asking again.`, sleep(Math.min(error.retryAfterMs, LONGEST_WAIT_MS)));
    } else {
      this.answer.clear();
      this.answer.say(error.message);
      return;
    }
    if (forgotten === this.forgotten) this.#wanted ??= make;
  }

  async #wait(sentence, over) {
    this.#obstacle = sentence;
    this.answer.say(sentence);
    await over;
    this.#obstacle = "";
  }
}

function drawingInput(app, sender) {
  const [height, width] = app.input.shape;
  const label = `Drawing area for the ${app.input.name}: ${app.input.meaning}`;
  const canvas = element("canvas", { tabIndex: 0, role: "application", aria: { label, describedby: "draw-help" } });
  const hint = element("p", { className: "draw-hint", aria: { hidden: true } }, "draw here");
  const preview = element("canvas", { width, height, className: "preview", aria: { hidden: true } });
  const clear = element("button", { type: "button" }, "Clear");
  const undo = element("button", { type: "button" }, "Undo");
  const showTools = () => {
    for (const button of [clear, undo]) button.disabled = drawing.empty;
    hint.hidden = !drawing.empty;
  };
  const drawing = new Drawing(canvas, [height, width], () => {
    showTools();
    showPixels(preview, drawing);
    if (drawing.empty) sender.forget();
    else sender.send(() => drawn(app, drawing));
  });
  clear.disabled = undo.disabled = true;
  clear.addEventListener("click", () => drawing.clear());
  undo.addEventListener("click", () => drawing.undo());
  const seen = element("p", { className: "seen" }, `${width} × ${height}, as the network gets it`, preview);
  seen.hidden = Math.max(height, width) > LARGEST_PREVIEW;
  showPixels(preview, drawing);
  const help = "Arrow keys move the pen, Shift makes longer steps, Space puts it down or lifts it, " +
    "Delete clears, Control and Z undo the last stroke.";
  // An example is what was recorded, so that it is sent as it is, not drawn.
  const take = (example, isSent = true) => {
    if (!isSent) return;
    // Not told: it would forget the example with the drawing.
    drawing.clear(false);
    showTools();
    sender.forget();
    const [given] = Object.values(example.numbers ?? {});
    if (given) preview.getContext("2d").drawImage(pictureOf(app.input, given) ?? preview, 0, 0);
    sender.send(() => example);
  };
  const parts = [
    element("div", { className: "draw" }, canvas, hint),
    element("p", { id: "draw-help", className: "draw-help" }, help),
    element("div", { className: "draw-tools" }, clear, undo, seen),
  ];
  return { take, parts };
}

async function drawn(app, drawing) {
  if (app.accepts.includes("image/png")) return { body: await drawing.png(), type: "image/png" };
  return { body: drawing.pixels(), type: "application/octet-stream" };
}

function showPixels(preview, drawing) {
  const rgba = Uint8ClampedArray.from({ length: 4 * drawing.height * drawing.width }, () => 255);
  drawing.pixels().forEach((value, index) => rgba.fill(value, 4 * index, 4 * index + 3));
  preview.getContext("2d").putImageData(new ImageData(rgba, drawing.width, drawing.height), 0, 0);
}

function textInput(app, sender) {
  const text = element("textarea", { id: "text", rows: 6, value: "" });
  const send = element("button", { type: "submit" }, "Send");
  const form = element("form", {}, element("label", { htmlFor: "text" }, "A text"), text, send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sender.send(() => ({ body: text.value, type: TEXT }));
  });
  submitByKey(text, form);
  const take = (example, isSent = true) => {
    // What is in the box is sent as a text, so that tensors are not written there.
    const isTyped = example.type === TEXT;
    text.value = isTyped ? example.text : "";
    text.placeholder = isTyped || !isSent ? "" : "The example is sent as tensors, as it was recorded.";
    if (isSent) sender.send(() => example);
  };
  return { take, parts: [...specsOf(app), form] };
}

const specsOf = (app) => app.inputs.map((spec) => element("p", { className: "spec" }, describe(spec)));

function submitByKey(text, form) {
  text.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
}

function otherInput(app, sender) {
  const files = app.accepts.filter((type) => type !== "application/json");
  const shown = element("div", { className: "input-preview" });
  const json = element("textarea", { id: "json", rows: 6, spellcheck: false, value: example(app) });
  const send = element("button", { type: "submit" }, "Send");
  const label = app.live ? "or the frames as JSON" : app.input ? "or the numbers as JSON" : `${files.length ? "or the" : "The"} inputs as JSON, by name`;
  const form = element("form", {}, element("label", { htmlFor: "json" }, label), json, send);
  let beside = null; // the picture's file that is sent beside the other inputs
  const forgetFile = () => {
    beside = null;
    if (app.picture) chooser[1].value = ""; // so that the same file can be chosen again
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!beside) showNumbers(shown, app, parsed(app, json.value));
    sender.send(() => (beside ? formOf(app, beside, json.value) : requestOf(app, json.value)));
  });
  json.addEventListener("input", () => {
    const named = parsed(app, json.value);
    if (beside && hasPicture(app, named)) forgetFile();
    if (!beside) showNumbers(shown, app, named);
  });
  submitByKey(json, form);
  const fields = quantityFields(app, json, () => showNumbers(shown, app, parsed(app, json.value)));
  const take = (given, isSent = true) => {
    forgetFile();
    json.value = given.numbers ? shortJson(app, given.numbers) : "";
    json.placeholder = json.value ? "" : "The example is sent as raw bytes.";
    fields.read();
    if (given.type.startsWith("image/")) showPicture(shown, given.body);
    else showNumbers(shown, app, given.numbers);
    if (isSent) sender.send(() => given);
  };
  const chosenFile = (file) => {
    showPicture(shown, file);
    if (app.picture) {
      beside = file;
      const named = parsed(app, json.value);
      if (hasPicture(app, named)) json.value = JSON.stringify({ ...named, [app.picture]: undefined });
    }
    sendFile(app, sender, file, beside && (() => formOf(app, file, json.value)));
  };
  const chooser = files.length ? fileInput(files, chosenFile) : [];
  if (app.picture && !json.value) json.value = exampleOf(app.inputs.filter(({ name }) => name !== app.picture));
  return { take, parts: [...specsOf(app), ...chooser, shown, ...fields.parts, form] };
}

/** Whether what was typed gives the picture as numbers; it may be any JSON. */
const hasPicture = (app, named) => Object.hasOwn(Object(named), app.picture);

/** A form of a picture's file and the other inputs, from their JSON by name. */
function formOf(app, file, text) {
  const form = new FormData();
  // Without a type, the part would be sent as the raw bytes of a tensor.
  const type = file.type || app.accepts.find((accepted) => accepted.startsWith("image/"));
  form.append(app.picture, new Blob([file], { type }), file.name);
  let others;
  try {
    others = JSON.parse(text.trim() || "{}");
  } catch {
    throw new Error("The other inputs are not JSON; give an object by name.");
  }
  for (const [name, value] of Object.entries(others)) if (name !== app.picture) form.append(name, JSON.stringify(value));
  return { body: form, type: null };
}

/** Of a live application, frames as raw bytes; else the JSON as it is. */
function requestOf(app, text) {
  if (!app.live) return { body: text, type: "application/json" };
  const frames = parsed(app, text)?.[app.input.name];
  if (!Array.isArray(frames)) throw new Error(`The frames are not JSON; give a list, ${describe(app.input)}.`);
  return { body: bytesOf(app.input.dtype, frames.flat(Infinity)), type: "application/octet-stream" };
}

/** The tensors of a text by name, or null if it is no JSON. */
const parsed = (app, text) => inputOf(app, "application/json", null, text);

/** A field for each number of one small input, beside its JSON. */
function quantityFields(app, json, changed) {
  const spec = app.input;
  const none = { parts: [], read() {} };
  if (!spec || app.live || spec.shape.length > 1 || (spec.shape[0] ?? 1) > MOST_FIELDS) return none;
  const names = spec.labels.length ? spec.labels : Array.from({ length: spec.shape[0] ?? 1 }, (_, at) => (spec.shape.length ? `${spec.name} ${at}` : spec.name));
  const inputs = names.map(() => element("input", { type: "number", step: "any" }));
  const read = () => {
    const values = parsed(app, json.value)?.[spec.name];
    inputs.forEach((input, at) => (input.value = (Array.isArray(values) ? values[at] : values) ?? ""));
  };
  inputs.forEach((input) =>
    input.addEventListener("input", () => {
      const values = inputs.map(({ valueAsNumber }) => (Number.isNaN(valueAsNumber) ? null : valueAsNumber));
      json.value = JSON.stringify(spec.shape.length ? values : values[0]);
      changed();
    }),
  );
  json.addEventListener("input", read);
  read();
  const fields = names.map((name, at) => element("label", {}, name, inputs[at]));
  return { parts: [element("div", { className: "fields" }, ...fields)], read };
}

function showPicture(shown, file) {
  shown.replaceChildren();
  if (!file.type.startsWith("image/")) return;
  const image = element("img", { alt: "The picture that is sent", src: URL.createObjectURL(file) });
  image.onload = () => URL.revokeObjectURL(image.src);
  image.onerror = () => shown.replaceChildren();
  shown.append(image);
}

/** Pictures and signals among the inputs. */
function showNumbers(shown, app, named) {
  const drawn = app.inputs.map((spec) => {
    const value = named?.[spec.name];
    if (value === undefined || !isNested(value)) return null;
    return drawingOf(spec, value);
  });
  shown.replaceChildren(...drawn.filter(Boolean));
}

/** Whether lists are nested as those of a tensor, with numbers at the end: what is typed may be anything. */
function isNested(value, shape = shapeOf(value)) {
  if (!shape.length) return typeof value === "number" || typeof value === "boolean";
  return Array.isArray(value) && value.length === shape[0] && value.every((item) => isNested(item, shape.slice(1)));
}

function shortJson(app, named) {
  const dtypes = Object.fromEntries(app.inputs.map(({ name, dtype }) => [name, dtype]));
  const short = Object.fromEntries(Object.entries(named).map(([name, value]) => [name, dtypes[name] === "float32" ? fewDigits(value) : value]));
  const text = JSON.stringify(app.input ? short[app.input.name] : short);
  return text.length <= MOST_JSON ? text : "";
}

function fileInput(files, chosen) {
  const file = element("input", { type: "file", id: "file", accept: files.filter((type) => !type.startsWith("application/")).join() });
  file.addEventListener("change", () => file.files.length && chosen(file.files[0]));
  const raw = files.every((type) => type === "application/octet-stream");
  return [element("label", { htmlFor: "file" }, raw ? "A file of the raw bytes" : "A file"), file];
}

function example(app) {
  if (!app.input) return exampleOf(app.inputs);
  const size = app.input.shape.reduce((product, length) => product * length, 1);
  return size <= LARGEST_EXAMPLE && !app.live ? zeros(app.input.shape) : "";
}

function sendFile(app, sender, file, make) {
  if (file.size > app.max_body_bytes) {
    const most = app.max_body_bytes.toLocaleString("en");
    sender.forget();
    sender.answer.say(`The file has ${file.size.toLocaleString("en")} bytes; at most ${most} are taken.`);
    return;
  }
  if (make) return sender.send(make);
  const known = app.accepts.includes(file.type);
  sender.send(() => ({ body: file, type: known ? file.type : "application/octet-stream" }));
}

const zeros = (shape) =>
  shape.length === 0 ? "0" : `[${Array.from({ length: shape[0] }, () => zeros(shape.slice(1))).join(", ")}]`;

function sameFromAShell(app, isImage) {
  const type = app.accepts[0];
  const url = new URL(`v1/apps/${app.name}`, document.baseURI);
  const extension = { "application/octet-stream": "bin", [TEXT]: "txt" }[type] ?? type.split("/").pop();
  const key = apiKey() === null ? "" : ' -H "Authorization: Bearer $API_KEY"';
  const file = `@${isImage ? "drawing" : "input"}.${extension}`;
  const others = app.inputs.filter(({ name }) => name !== app.picture).map(({ name }) => ` -F '${name}=...'`);
  const body = app.picture ? `-F '${app.picture}=${file};type=${type}'${others.join("")}` : `--data-binary ${file} -H 'Content-Type: ${type}'`;
  const command = `curl ${body}${key} ${url}`;
  return element(
    "details",
    { className: "shell" },
    element("summary", {}, "The same from a shell"),
    element("code", { tabIndex: 0 }, command),
  );
}
