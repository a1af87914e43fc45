// What the network says: a bar for each label and the answer big, or the reply as it came.

import { Bars } from "./bars.js";
import { BoxedPicture } from "./boxes.js";
import { element, milliseconds, sleep, write } from "./dom.js";
import { hasLabels } from "./server.js";
import { NamedTensors } from "./tensors.js";

const MOST_TEXT = 4000;
const ONE_LINE = 80;
const STILL_MS = 600; // an answer that stays this long is read out

export class Answer {
  #shown = 0;

  constructor(app) {
    this.labelled = hasLabels(app.output);
    this.big = element("p", { className: "answer-big" });
    this.sure = element("p", { className: "answer-sure" });
    this.time = element("p", { className: "answer-time" });
    this.message = element("p", { className: "message", role: "status" });
    this.spoken = element("p", { className: "unseen", role: "status" });
    this.bars = this.labelled ? new Bars(app.output) : null;
    this.boxed = app.shows ? new BoxedPicture(app.shows) : null;
    this.tensors = app.output === null ? new NamedTensors(app.outputs) : null;
    this.reply = element("pre", { className: "reply", tabIndex: 0 });
    this.details = this.bars?.view ?? this.reply;
    this.view = element(
      "div",
      { className: "answer" },
      element("div", { className: "answer-head" }, this.big, element("div", {}, this.message, this.sure, this.time)),
      ...(this.boxed ? [this.boxed.view] : []),
      ...(this.tensors ? [this.tensors.view] : []),
      this.details,
      this.spoken,
    );
    this.clear();
  }

  /** Shows what `ask` gave. */
  show({ values, reply, roundTripMs, body }) {
    this.say("");
    write(this.time, `round trip ${milliseconds(roundTripMs)}`);
    if (this.labelled) this.#showValues(values);
    // A reply of the application's own is shown as it came.
    else write(this.reply, this.tensors?.show(reply) ? "" : text(reply));
    this.boxed?.show(body, reply);
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
    write(this.reply, "");
    this.bars?.clear();
    this.tensors?.clear();
    this.boxed?.clear();
  }

  #showValues(values) {
    const { label, value } = this.bars.show(values);
    write(this.big, label);
    this.big.toggleAttribute("data-long", this.big.textContent.length > 3);
    write(this.sure, value);
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
