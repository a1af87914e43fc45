// What the network says: a bar for each label and the answer big, or the reply as it came.

import { Bars } from "./bars.js";
import { BoxedPicture } from "./boxes.js";
import { element, milliseconds, sleep, write } from "./dom.js";
import { jsonTree } from "./json.js";
import { Recorded } from "./recorded.js";
import { hasLabels, inSteps } from "./server.js";
import { Steps } from "./steps.js";
import { NamedTensors } from "./tensors.js";

const MOST_TEXT = 4000; // a longer reply is folded
const ONE_LINE = 80;
const STILL_MS = 600; // an answer that stays this long is read out

export class Answer {
  #shown = 0;

  constructor(app) {
    this.app = app;
    this.labelled = hasLabels(app.output) && !inSteps(app);
    this.big = element("p", { className: "answer-big" });
    this.sure = element("p", { className: "answer-sure" });
    this.time = element("p", { className: "answer-time" });
    this.message = element("p", { className: "message", role: "status" });
    this.spoken = element("p", { className: "unseen", role: "status" });
    this.bars = this.labelled ? new Bars(app.output) : null;
    this.boxed = app.shows ? new BoxedPicture(app.shows) : null;
    this.tensors = this.labelled || inSteps(app) ? null : new NamedTensors(app.live ? app.outputs.map(ofWhole) : app.outputs);
    this.steps = inSteps(app) ? new Steps(app) : null;
    this.recorded = new Recorded(app);
    this.reply = element("pre", { className: "reply", tabIndex: 0 });
    this.tree = element("div", { className: "reply-tree" });
    this.view = element(
      "div",
      { className: "answer" },
      element("div", { className: "answer-head" }, this.big, element("div", {}, this.message, this.sure, this.time)),
      ...(this.boxed ? [this.boxed.view] : []),
      ...[this.bars, this.tensors, this.steps].filter(Boolean).map(({ view }) => view),
      this.reply,
      this.tree,
      this.recorded.view,
      this.spoken,
    );
    this.view.toggleAttribute("data-plain", !this.labelled);
    this.clear();
  }

  /** Shows what `ask` gave. */
  show({ values, reply, done, roundTripMs, body, outputs }) {
    this.say("");
    write(this.time, `round trip ${milliseconds(roundTripMs)}`);
    const [spec] = this.app.outputs;
    let now = null; // the tensors by name, where the reply is them
    if (this.labelled) {
      this.#showValues(values);
      now = { [spec.name]: values };
    } else if (done) this.#showReply(done.ended ? this.steps.end(done) : done.reply);
    else {
      const one = this.app.live ? framesOf(reply) : reply;
      const named = this.app.output ? { [spec.name]: one } : reply;
      if (this.tensors.show(named)) now = named;
      // A reply of the application's own is shown as it came.
      this.#showReply(now ? null : reply);
    }
    this.recorded.show(inSteps(this.app) ? null : outputs, now);
    this.boxed?.show(body, reply);
    this.#speakWhenStill();
  }

  /** Shows a step of an answer that goes on; the first one takes the place of what is shown. */
  step(step, isFirst) {
    if (isFirst) this.clear();
    write(this.time, "");
    this.steps.add(step);
  }

  #showReply(reply) {
    const isNone = reply === null || reply === undefined;
    const all = isNone ? "" : text(reply);
    write(this.reply, all.length <= MOST_TEXT ? all : "");
    this.tree.replaceChildren(...(all.length <= MOST_TEXT ? [] : [jsonTree(reply)]));
    for (const folded of this.tree.children) folded.open = true;
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
    this.tree.replaceChildren();
    this.tensors?.clear();
    this.steps?.clear();
    this.recorded.show(null, null);
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
    write(this.spoken, this.steps?.text.textContent ? "The answer is here." : this.labelled ? `${this.big.textContent}, ${this.sure.textContent}` : "The reply is here.");
  }
}

/** The spec of all frames of a live output. */
const ofWhole = (spec) => ({ ...spec, shape: [{ name: "frames" }, ...spec.shape.slice(1)] });

/** The frames of the events of a recording, where each event is the frames of a chunk; else the reply. */
function framesOf(reply) {
  const events = reply?.events?.filter((event) => event !== null);
  return events?.every(Array.isArray) ? events.flat() : reply;
}

function text(reply) {
  const line = JSON.stringify(reply);
  return line.length <= ONE_LINE ? line : JSON.stringify(reply, null, 1);
}
