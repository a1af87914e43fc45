// An answer that takes steps, as it comes: server-sent events, a line for each step, and the whole reply at the end.

import { element, write } from "./dom.js";
import { areScores, digits, scoreText } from "./values.js";

const MOST_LINES = 1000;

/** Events `{ name, data }` of a response. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value.replaceAll("\r\n", "\n")).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const of = (field) => lines.filter((line) => line.startsWith(`${field}:`)).map((line) => line.slice(field.length + 1).trimStart());
      if (of("data").length) yield { name: of("event")[0] ?? "message", data: JSON.parse(of("data").join("\n")) };
    }
  }
}

/** The steps so far. */
export class Steps {
  #count = 0;

  constructor(app) {
    this.app = app;
    this.text = element("p", { className: "generated", aria: { live: "polite" } });
    this.list = element("ol", { className: "steps", tabIndex: 0, aria: { label: "Steps" } });
    this.ended = element("p", { className: "answer-time" });
    this.view = element("div", {}, this.text, this.ended, this.list);
    this.clear();
  }

  clear() {
    this.#count = 0;
    this.list.replaceChildren();
    write(this.text, "");
    write(this.ended, "");
    this.view.hidden = true;
  }

  add(step) {
    this.view.hidden = false;
    write(this.ended, `${(++this.#count).toLocaleString("en")} steps so far`);
    if (typeof step.reply === "string") write(this.text, step.reply);
    if (this.list.children.length >= MOST_LINES) return;
    const words = this.app.outputs.map((spec) => inWords(spec, step[spec.name]));
    this.list.append(element("li", {}, words.join(" · ")));
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** Shows the end; returns the reply unless it is a text, which is shown here. */
  end({ ended, steps, reply }) {
    this.view.hidden = false;
    write(this.ended, `${steps.toLocaleString("en")} steps, ${ended === "end" ? "whole" : "cut at the most that an answer has"}`);
    const text = typeof reply === "string" ? reply : reply?.text;
    if (typeof text !== "string") return reply;
    write(this.text, text);
    // What else there is in a reply is shown too.
    return typeof reply === "string" || Object.keys(reply).every((key) => key === "text" || key === "ended") ? null : reply;
  }
}

function inWords(spec, value) {
  if (areScores(spec) && Array.isArray(value) && !Array.isArray(value[0])) {
    const best = value.indexOf(Math.max(...value));
    return `${spec.labels[best]} ${scoreText(spec, value[best])}`;
  }
  const flat = [value].flat(Infinity);
  const shown = flat.slice(0, 8).map(digits).join(", ") + (flat.length > 8 ? ", …" : "");
  return `${spec.name} ${shown}`;
}
