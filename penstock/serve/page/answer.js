// What the network says: a bar for each label and the answer big, or the reply as it came.

import { element, milliseconds, sleep, write } from "./dom.js";
import { hasLabels } from "./server.js";

const MOST_BARS = 12; // of more labels the likeliest are shown
const MOST_TEXT = 4000;
const ONE_LINE = 80;
const STILL_MS = 600; // an answer that stays this long is read out

export class Answer {
  #shown = 0;

  constructor(spec) {
    this.spec = spec;
    this.labelled = hasLabels(spec);
    this.big = element("p", { className: "answer-big" });
    this.sure = element("p", { className: "answer-sure" });
    this.time = element("p", { className: "answer-time" });
    this.message = element("p", { className: "message", role: "status" });
    this.spoken = element("p", { className: "unseen", role: "status" });
    this.details = this.labelled ? this.#bars() : element("pre", { className: "reply", tabIndex: 0 });
    this.view = element(
      "div",
      { className: "answer" },
      element("div", { className: "answer-head" }, this.big, element("div", {}, this.message, this.sure, this.time)),
      this.details,
      this.spoken,
    );
    this.clear();
  }

  /** Shows what `ask` gave. */
  show({ values, reply, roundTripMs }) {
    this.say("");
    write(this.time, `round trip ${milliseconds(roundTripMs)}`);
    if (this.labelled) this.#showValues(values);
    else write(this.details, text(reply));
    this.#speakWhenStill();
  }

  /** Says why there is no answer to what was given last; what is shown is that of an earlier one. */
  say(sentence) {
    write(this.message, sentence);
    this.view.toggleAttribute("data-stale", sentence !== "");
  }

  clear() {
    this.#shown++;
    this.say("");
    write(this.big, "");
    write(this.sure, "");
    write(this.time, "The answer comes here.");
    write(this.spoken, "");
    if (!this.labelled) write(this.details, "");
    else for (const row of this.rows) this.#setRow(row, row.label, null, 0, false);
  }

  #bars() {
    const labels = this.spec.labels.slice(0, MOST_BARS);
    this.rows = labels.map((label) => {
      const row = { label, name: element("span"), fill: element("i"), number: element("b") };
      row.view = element("li", {}, row.name, element("span", { className: "track" }, row.fill), row.number);
      return row;
    });
    return element("ol", { className: "bars", aria: { label: this.spec.meaning } }, ...this.rows.map((row) => row.view));
  }

  #showValues(values) {
    const ranked = values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
    const shares = values.every((value) => value >= 0 && value <= 1);
    const [lowest, highest] = [Math.min(0, ...values), Math.max(...values)];
    const all = values.length <= MOST_BARS;
    this.rows.forEach((row, place) => {
      const index = all ? place : ranked[place];
      const value = values[index];
      const length = shares ? value : (value - lowest) / (highest - lowest || 1);
      this.#setRow(row, this.spec.labels[index], number(value, shares), length, index === ranked[0]);
    });
    write(this.big, this.spec.labels[ranked[0]]);
    this.big.toggleAttribute("data-long", this.big.textContent.length > 3);
    write(this.sure, number(values[ranked[0]], shares));
  }

  #setRow(row, label, text, length, largest) {
    write(row.name, label);
    write(row.number, text ?? "");
    row.fill.style.transform = `scaleX(${length})`;
    row.view.toggleAttribute("data-largest", largest);
  }

  async #speakWhenStill() {
    const mine = ++this.#shown;
    await sleep(STILL_MS);
    if (mine !== this.#shown) return;
    write(this.spoken, this.labelled ? `${this.big.textContent}, ${this.sure.textContent}` : "The reply is here.");
  }
}

function text(reply) {
  const line = JSON.stringify(reply);
  return line.length <= ONE_LINE ? line : JSON.stringify(reply, null, 1).slice(0, MOST_TEXT);
}

function number(value, isShare) {
  if (!isShare) return value.toPrecision(3);
  return `${(100 * value).toFixed(1)} %`;
}
