// The half where one tries an application: something to give it, by its input's spec, and what it answers.

import { Answer } from "./answer.js";
import { element, sleep } from "./dom.js";
import { Drawing } from "./draw.js";
import { apiKey } from "./key.js";
import { Gone, ask } from "./server.js";
import { describe, exampleOf } from "./tensors.js";

const LARGEST_PREVIEW = 64;
const LARGEST_EXAMPLE = 256;
const TEXT = "text/plain";
const LONGEST_WAIT_MS = 5000;

/** The panel of an application. `connection` says when a lost server is back. */
export function tryPanel(app, connection) {
  const answer = new Answer(app);
  const sender = new Sender(app, connection, answer);
  const isImage = app.input?.shape.length === 2 && app.input.dtype === "uint8";
  const isText = app.accepts.includes(TEXT);
  const input = isImage ? drawingInput(app, sender) : isText ? textInput(app, sender) : otherInput(app, sender);
  return element("div", { className: "try" }, element("div", {}, ...input), answer.view, sameFromAShell(app, isImage));
}

/** Sends at most one request at a time; of those that come meanwhile, only the latest is sent. */
class Sender {
  #wanted = null;
  #busy = false;
  #obstacle = ""; // why the request whose turn it is has to wait

  constructor(app, connection, answer) {
    Object.assign(this, { app, connection, answer });
  }

  /** `make` gives the body and its content type when it is this request's turn. */
  async send(make) {
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
      const { body, type } = await make();
      const answer = await ask(this.app, body, type);
      if (forgotten !== this.forgotten) return;
      this.answer.show({ ...answer, body });
    } catch (error) {
      if (forgotten === this.forgotten) await this.#explain(error, make, forgotten);
    }
  }

  async #explain(error, make, forgotten) {
    if (error instanceof Gone) {
      this.connection.lost();
      await this.#wait("No answer; asking again when the server is back.", this.connection.back());
    } else if (error.status === 503) {
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
  const drawing = new Drawing(canvas, [height, width], () => {
    for (const button of [clear, undo]) button.disabled = drawing.empty;
    hint.hidden = !drawing.empty;
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
  return [
    element("div", { className: "draw" }, canvas, hint),
    element("p", { id: "draw-help", className: "draw-help" }, help),
    element("div", { className: "draw-tools" }, clear, undo, seen),
  ];
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
  text.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  return [...app.inputs.map((spec) => element("p", { className: "spec" }, describe(spec))), form];
}

function otherInput(app, sender) {
  const files = app.accepts.filter((type) => type !== "application/json");
  const json = element("textarea", { id: "json", rows: 6, spellcheck: false, value: example(app) });
  const send = element("button", { type: "submit" }, "Send");
  const label = app.input ? "or the numbers as JSON" : `${files.length ? "or the" : "The"} inputs as JSON, by name`;
  const form = element("form", {}, element("label", { htmlFor: "json" }, label), json, send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sender.send(() => ({ body: json.value, type: "application/json" }));
  });
  json.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  const specs = app.inputs.map((spec) => element("p", { className: "spec" }, describe(spec)));
  return [...specs, ...(files.length ? fileInput(app, sender, files) : []), form];
}

function fileInput(app, sender, files) {
  const file = element("input", { type: "file", id: "file", accept: files.filter((type) => !type.startsWith("application/")).join() });
  file.addEventListener("change", () => file.files.length && sendFile(app, sender, file.files[0]));
  return [element("label", { htmlFor: "file" }, "A file"), file];
}

function example(app) {
  if (!app.input) return exampleOf(app.inputs);
  const size = app.input.shape.reduce((product, length) => product * length, 1);
  return size <= LARGEST_EXAMPLE ? zeros(app.input.shape) : "";
}

function sendFile(app, sender, file) {
  if (file.size > app.max_body_bytes) {
    const most = app.max_body_bytes.toLocaleString("en");
    sender.forget();
    sender.answer.say(`The file has ${file.size.toLocaleString("en")} bytes; at most ${most} are taken.`);
    return;
  }
  const known = app.accepts.includes(file.type);
  sender.send(() => ({ body: file, type: known ? file.type : "application/octet-stream" }));
}

const zeros = (shape) =>
  shape.length === 0 ? "0" : `[${Array.from({ length: shape[0] }, () => zeros(shape.slice(1))).join(", ")}]`;

function sameFromAShell(app, isImage) {
  const type = app.accepts[0];
  const url = new URL(`v1/apps/${app.name}`, document.baseURI);
  const extension = type === "application/octet-stream" ? "bin" : type.split("/").pop();
  const key = apiKey() === null ? "" : ' -H "Authorization: Bearer $API_KEY"';
  const command = `curl --data-binary @${isImage ? "drawing" : "input"}.${extension} -H 'Content-Type: ${type}'${key} ${url}`;
  return element(
    "details",
    { className: "shell" },
    element("summary", {}, "The same from a shell"),
    element("code", { tabIndex: 0 }, command),
  );
}
