// The half where one tries a live application: it listens to a microphone, or to a file in real time.

import { element, sleep, write } from "./dom.js";
import { exampleButtons, examplesOf } from "./examples.js";
import { Heard } from "./heard.js";
import { anotherKey, apiKey } from "./key.js";
import { Level } from "./level.js";
import { Gone, getJson } from "./server.js";
import { SoundProblem, openSound } from "./sound.js";
import { Stream, openSocket } from "./stream.js";

const UNTIL_ANOTHER_MS = 5000; // where a browser does not let the page see when the server wants to be asked again
const LEAST_CHUNK_S = 0.02;
const FAR_BEHIND_S = 1;

/** Whether an application is one to listen to: a stream of sound. */
export const listens = (app) => Boolean(app.live?.sound);

/** The panel of an application, and what ends whatever it does. `connection` says when a lost server is back. */
export function listenPanel(app, connection) {
  const panel = new Panel(app, connection);
  return { view: panel.view, leave: () => panel.leave() };
}

class Panel {
  #run = null;

  constructor(app, connection) {
    Object.assign(this, { app, connection });
    this.start = element("button", { type: "button", className: "lead" });
    this.state = element("p", { className: "stream-state" });
    this.clock = element("span", { className: "clock", aria: { hidden: true } });
    this.said = element("span", { role: "status" });
    this.state.append(this.said, this.clock);
    this.level = new Level();
    this.heard = new Heard();
    this.file = element("input", { type: "file", id: "sound-file", accept: "audio/*,video/*" });
    this.play = element("button", { type: "button", disabled: true }, "Play it");
    this.start.addEventListener("click", () => (this.#run ? this.#run.stop() : this.#begin(null)));
    this.play.addEventListener("click", () => this.#begin(this.file.files[0]));
    this.file.addEventListener("change", () => this.#offer());
    addEventListener("pagehide", this.hidden);
    const label = element("label", { htmlFor: "sound-file" }, "or a sound file, played and heard in real time");
    const input = element("div", {}, this.start, this.state, this.level.view, label, element("div", { className: "file" }, this.file, this.play));
    const known = wordsOf(app.output);
    if (known.length && !known.includes(" ")) input.append(element("details", { className: "known", open: known.length <= 40 }, element("summary", {}, `It knows ${known.length === 1 ? "one word" : `${known.length} words`}`), element("p", {}, known.join(", "))));
    this.view = element("div", { className: "try listen" }, input, this.heard.view, sameFromPython(app));
    this.#offerExamples(input);
    this.#offer();
    this.show("idle", "not listening");
  }

  // A page in the background goes on listening, and the browser shows that it does; one that is left does not.
  hidden = () => this.#run?.abandon();

  leave() {
    removeEventListener("pagehide", this.hidden);
    this.#run?.abandon();
  }

  /** Says where the stream is: a word for the style, and a sentence. */
  show(state, sentence, clock = "") {
    this.state.dataset.state = state;
    write(this.said, sentence);
    write(this.clock, clock);
  }

  #begin(file) {
    this.heard.clear();
    this.#run = new Run(this, file, () => {
      this.#run = null;
      this.level.clear();
      this.#offer();
    });
    this.#offer();
    this.#run.begin();
  }

  async #offerExamples(input) {
    const examples = await examplesOf(this.app);
    const play = ({ body }) => !this.#run && this.#begin(body);
    if (examples.length) input.append(exampleButtons(this.app, examples, play));
  }

  #offer() {
    write(this.start, this.#run ? "Stop" : "Start listening");
    this.file.disabled = this.#run !== null;
    this.play.disabled = this.#run !== null || this.file.files.length === 0;
  }
}

/** From a start to what ends it: the sound, and the stream that takes it. */
class Run {
  #sound = null;
  #stream = null;
  #over = false;
  #live = false;
  #stopping = false;
  #lostBy = null; // why the sound broke off
  #heardS = 0;
  #paused = false;

  constructor(panel, file, done) {
    Object.assign(this, { panel, file, done, app: panel.app });
    const { input, live } = this.app;
    this.chunkS = Math.max(LEAST_CHUNK_S, input.shape[0] / live.rate_hz);
  }

  async begin() {
    this.panel.show("waiting", this.file ? "reading the file" : "waiting for the microphone");
    try {
      const sound = await openSound(this.file, this.chunkS, this.#told());
      if (this.#over) sound.close();
      else this.#connect(sound);
    } catch (error) {
      if (!(error instanceof SoundProblem)) throw error;
      this.#finish("failed", error.message);
    }
  }

  /** The rest of what was heard is still answered. */
  async stop() {
    if (this.#stopping) return;
    if (!this.#stream || !this.#live) {
      this.#finish("idle", "not listening");
      return;
    }
    this.#stopping = true;
    this.panel.show("waiting", "waiting for the last answers");
    await this.#sound.end();
    this.#stream.end();
  }

  abandon() {
    this.#finish("idle", "not listening");
  }

  #told() {
    return {
      chunk: (samples) => this.#chunk(samples),
      level: (level) => this.panel.level.show(level),
      lost: (sentence) => this.#lost(sentence),
      paused: (whether) => this.#pause(whether),
      played: () => this.stop(),
    };
  }

  #connect(sound) {
    this.#sound = sound;
    this.#live = false;
    this.panel.show("waiting", "connecting");
    const key = apiKey();
    this.#stream = new Stream(() => openSocket(this.app, key), sound.rateHz, this.chunkS, {
      ready: () => this.#ready(),
      result: (event, latencyMs) => this.panel.heard.take(event, latencyMs),
      segment: (said) => this.panel.heard.segment(said),
      over: (end) => this.#ended(end, key),
    });
  }

  #ready() {
    this.#live = true;
    this.#sound.begin();
    this.#showLive();
  }

  #chunk(samples) {
    if (!this.#live) return;
    this.#heardS += samples.length / this.#sound.rateHz;
    this.#stream.send(samples);
    if (!this.#stopping) this.#showLive();
  }

  #pause(whether) {
    this.#paused = whether;
    if (this.#live && !this.#stopping) this.#showLive();
  }

  #showLive() {
    const { behindS, isLost } = this.#stream;
    if (this.#paused) this.panel.show("waiting", "the browser holds the sound back");
    else if (isLost) this.panel.show("waiting", "the connection is gone, opening another one", `; ${behindS.toFixed(0)} s wait`);
    else if (behindS > FAR_BEHIND_S) this.panel.show("late", "live, late", ` by ${behindS.toFixed(1)} s`);
    else this.panel.show("live", "live", ` for ${Math.floor(this.#heardS)} s`);
  }

  #lost(sentence) {
    this.#lostBy = sentence;
    this.stop();
  }

  async #ended(end, key) {
    if (this.#over) return;
    if (end.wantsKey) await this.#enterKey(key);
    else if (end.retryAfterMs !== undefined) await this.#retry(`refused: ${end.why}`, end.retryAfterMs);
    else if (!end.opened) await this.#unopened(end, key);
    else if (end.why) this.#finish("failed", `ended: ${end.why}`);
    else this.#finish("ended", `ended: ${this.#lostBy ?? "all that was heard is answered"}`);
  }

  async #enterKey(refused) {
    await anotherKey(refused);
    if (!this.#over) this.#connect(this.#sound);
  }

  // Where no WebSocket opened at all, a browser does not say why, so the server is asked for something else.
  async #unopened(end, key) {
    if (this.#stopping) return this.#finish("failed", end.why ? `ended: ${end.why}` : "ended: the connection broke off");
    if (end.why) return this.#finish("failed", `ended: ${end.why}`);
    let stats;
    try {
      stats = (await getJson("v1/stats")).models[this.app.name];
    } catch (error) {
      if (error instanceof Gone) this.panel.connection.lost();
      return this.#finish("failed", error instanceof Gone ? "ended: the server does not answer" : `ended: ${error.message}`);
    }
    if (this.#over) return;
    if (!stats) this.#finish("failed", `ended: the server has no ${this.app.name} any more`);
    else if (key !== apiKey()) this.#connect(this.#sound);
    else await this.#retry(`refused: the server opens no stream now${stats.streams ? `; ${stats.streams.open} are open` : ""}.`, UNTIL_ANOTHER_MS);
  }

  async #retry(sentence, afterMs) {
    // Who stops wants no other stream, and a file is not begun anew in its middle.
    if (this.#stopping || (this.file && this.#heardS)) return this.#finish("failed", sentence);
    this.#live = false;
    for (let leftS = Math.ceil(afterMs / 1000); leftS > 0; leftS--) {
      this.panel.show("refused", sentence, ` Asking again in ${leftS} s.`);
      await sleep(1000);
      if (this.#over) return;
    }
    this.#connect(this.#sound);
  }

  #finish(state, sentence) {
    if (this.#over) return;
    this.#over = true;
    this.#stream?.abandon();
    this.#sound?.close();
    this.panel.show(state, sentence);
    this.done();
  }
}

/** The labels without CTC's blank; characters, with a space, where the network spells. */
const wordsOf = ({ labels }) => (labels[0] === "-" ? labels.slice(1) : labels);

function sameFromPython(app) {
  const url = document.baseURI.replace(/\/$/, "");
  const key = apiKey() === null ? "" : ', api_key="…"';
  const code = [
    `with penstock.Client("${url}"${key}) as client:`,
    `    with client.stream("${app.name}") as stream:`,
    `        stream.send(samples)  # int16 at ${app.live.rate_hz} Hz`,
    "        for result in stream.end():",
    `            print(${app.segments ? "result" : "result.event"})`,
  ].join("\n");
  const summary = element("summary", {}, "The same from Python");
  return element("details", { className: "shell" }, summary, element("code", { tabIndex: 0 }, code));
}
