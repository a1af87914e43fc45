// What a live application has heard: its words, or its events as they come, and how long after the sound they came; of a chain also what its later parts answer.

import { element, milliseconds, write } from "./dom.js";

const MOST_WORDS = 200;
const MOST_LINES = 100;
const MOST_SPOKEN = 20; // of the words that a screen reader is told
const MOST_LATENCIES = 500;

export class Heard {
  #latencies = [];
  #open = []; // the words of the utterance that has not ended
  #answers = new Map(); // the lines that are still growing, by segment and part

  constructor() {
    this.word = element("p", { className: "answer-big" });
    this.sure = element("p", { className: "answer-sure" });
    this.time = element("p", { className: "answer-time" });
    this.words = element("ol", { className: "words", tabIndex: 0, aria: { label: "Words, the latest last" } });
    this.lines = element("ol", { className: "reply", tabIndex: 0, aria: { label: "Events, the latest last" } });
    this.spoken = element("div", { className: "unseen", role: "log" });
    this.p50 = element("b");
    this.p98 = element("b");
    const figure = (name, number) => element("span", { className: "figure" }, `${name} `, number);
    this.figures = element("p", { className: "figures" }, "chunks answered in", figure("p50", this.p50), figure("p98", this.p98));
    this.view = element(
      "div",
      { className: "answer" },
      element("div", { className: "answer-head" }, this.word, element("div", {}, this.sure, this.time)),
      this.figures,
      this.words,
      this.lines,
      this.spoken,
    );
    this.clear();
  }

  /** Takes what came of a chunk, and how long after its last sample; null is nothing. */
  take(event, latencyMs) {
    if (latencyMs !== null) this.#latencies.push(latencyMs);
    if (this.#latencies.length > MOST_LATENCIES) this.#latencies.shift();
    this.#showLatencies();
    if (!Array.isArray(event?.words)) {
      if (event !== null) this.#showLine(event, latencyMs);
      return;
    }
    for (const word of event.words) this.#open.push(this.#showWord(word, latencyMs));
    this.#open.splice(0, Math.max(0, this.#open.length - MOST_WORDS));
    if (event.final !== true) return;
    // Decoded again at its end, it may have other words.
    if (Array.isArray(event.utterance?.words)) this.#replaceOpen(event.utterance.words, latencyMs);
    this.#open = [];
  }

  #replaceOpen(words, latencyMs) {
    const same = words.length === this.#open.length && words.every(({ word }, at) => word === this.#open[at].firstChild.textContent);
    if (same) return;
    for (const item of this.#open) item.remove();
    for (const word of words) this.#showWord(word, latencyMs);
  }

  /** Takes a message of a segment: each part's answer is a line, which is replaced as it comes step by step. */
  segment(said) {
    const key = `${said.segment} ${said.part}`;
    let line = this.#answers.get(key);
    if (!line) {
      line = element("li");
      this.#answers.set(key, line);
      append(this.lines, line, MOST_LINES);
    }
    if (said.type !== "step") this.#answers.delete(key);
    line.toggleAttribute("data-failed", said.type === "error");
    const value = said.type === "step" ? (said.output.reply ?? said.output) : said.reply;
    const text = said.type === "error" ? said.error : typeof value === "string" ? value : JSON.stringify(value);
    line.replaceChildren(element("b", {}, `${said.segment + 1} ${said.part}`), ` ${text}`);
    if (said.type === "error" || said.last) append(this.spoken, element("p", {}, text), MOST_SPOKEN);
  }

  clear() {
    this.#latencies = [];
    this.#open = [];
    this.#answers.clear();
    for (const list of [this.words, this.lines, this.spoken]) list.replaceChildren();
    this.words.hidden = this.lines.hidden = true;
    write(this.word, "");
    write(this.sure, "");
    write(this.time, "What is heard comes here.");
    this.#showLatencies();
  }

  #showLatencies() {
    const sorted = this.#latencies.toSorted((a, b) => a - b);
    const quantile = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? null;
    write(this.p50, milliseconds(quantile(0.5)));
    write(this.p98, milliseconds(quantile(0.98)));
  }

  #showWord(said, latencyMs) {
    const word = String(said.word ?? said);
    const sure = typeof said.probability === "number" ? `${Math.round(100 * said.probability)} %` : "";
    const late = milliseconds(latencyMs);
    write(this.word, word);
    this.word.toggleAttribute("data-long", word.length > 6);
    write(this.sure, sure);
    write(this.time, `${late} after the sound`);
    const meta = element("small", {}, [sure, late].filter(Boolean).join(" · "));
    const item = element("li", {}, element("b", {}, word), " ", meta);
    append(this.words, item, MOST_WORDS);
    append(this.spoken, element("p", {}, word), MOST_SPOKEN);
    return item;
  }

  #showLine(event, latencyMs) {
    write(this.time, `the latest ${milliseconds(latencyMs)} after the sound`);
    append(this.lines, element("li", {}, JSON.stringify(event)), MOST_LINES);
  }
}

function append(list, item, most) {
  list.hidden = false;
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 8;
  list.append(item);
  if (list.children.length > most) list.firstChild.remove();
  // Who has scrolled back to read is left there.
  if (atEnd) list.scrollTop = list.scrollHeight;
}
