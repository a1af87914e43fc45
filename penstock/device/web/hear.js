// Microphone panel: words recognised in live sound.

import { byId, element, milliseconds, percent, write } from "./dom.js";
import { Examples, Recorded } from "./examples.js";
import { goldenOf } from "./golden.js";
import { Resampler } from "./resample.js";
import { areScores, output } from "./show.js";
import { joined, overSignal } from "./signals.js";
import { Words } from "./words.js";

const MOST_WORDS = 200;
const MOST_WAITING_S = 5; // of unprocessed sound, after which the device is too slow for the network
const LOWEST_DB = -60;
const FLUSH_MS = 500; // limit for the last samples; a browser may have paused its audio thread

export class Hearing {
  #sound = null;
  #opened = false;

  constructor(description, engine) {
    Object.assign(this, { description, engine });
    this.rateHz = description.live.rate_hz;
    this.chunkFrames = description.live.chunk;
    const [heard] = description.outputs;
    const hasWords = areScores(heard) && heard.shape.length === 2;
    this.output = heard;
    this.words = hasWords ? new Words(heard.labels, /log/i.test(`${heard.units} ${heard.meaning}`)) : null;
    this.isProbability = /probability/i.test(`${heard.units} ${heard.meaning}`);
  }

  async begin(opened) {
    byId("hear").hidden = false;
    if (this.words) {
      const known = this.words.labels.slice(this.words.blank + 1);
      const list = `It knows ${known.length === 1 ? "one word" : `${known.length} words`}: ${known.join(", ")}.`;
      write(byId("known"), this.words.isSpelled ? "It writes down what it hears." : list);
    }
    write(byId("chunk-length"), milliseconds((1000 * this.chunkFrames) / this.rateHz));
    byId("listen").addEventListener("click", () => (this.#sound ? this.stop() : this.start()));
    addEventListener("pagehide", () => this.stop());
    this.recorded = new Recorded(this.description, this.words && ((outputs) => this.#wordsOf(outputs)));
    byId("heard-numbers").after(this.recorded.view);
    this.examples = new Examples(this.description, await goldenOf(this.description), (example) => this.#length(example), (example) => this.example(example));
    byId("hear").querySelector(".figures").before(this.examples.view);
    await opened;
    this.#opened = true;
    const allowed = await navigator.permissions?.query({ name: "microphone" }).catch(() => null);
    if (allowed?.state === "granted") await this.start();
  }

  /** Run the network over a recorded sound, as fast as the device can. */
  async example(example) {
    if (!this.#opened) return this.#say("The network is still loading.");
    await this.stop();
    byId("listen").disabled = true;
    this.words?.reset();
    byId("words").replaceChildren();
    write(byId("word-big"), "");
    const parts = [];
    try {
      for await (const part of overSignal(this.engine, this.description, example.inputs[this.description.inputs[0].name])) {
        parts.push({ ...part, values: part.values.slice() });
        this.#answer(part);
      }
      if (this.words) for (const word of this.words.take(0, new Float32Array(0), true)) showWord(word, this.isProbability);
      this.examples.mark(example);
      this.recorded.show(example.outputs, { [this.output.name]: joined(this.output, parts) });
      this.#say("a recorded example");
    } catch (error) {
      this.#fail(`The network does not run: ${error.message}`);
    } finally {
      byId("listen").disabled = false;
    }
  }

  /** The words of recorded outputs. */
  #wordsOf(outputs) {
    const { values, shape: [rows] } = outputs[this.output.name];
    const words = new Words(this.output.labels, this.words.isLog);
    return words.take(rows, values, true).map(({ word }) => word).join(" ") || "no words";
  }

  #length({ inputs }) {
    const { shape: [samples] } = inputs[this.description.inputs[0].name];
    return `${(samples / this.rateHz).toFixed(1)} s`;
  }

  async start() {
    this.#say("opening the microphone");
    byId("listen").disabled = true;
    try {
      this.examples.mark(null);
      this.recorded.show(null);
      await this.engine.reset();
      const sound = await openMicrophone();
      this.#prepare(sound.rateHz);
      this.#sound = sound;
      sound.begin((piece) => this.#take(piece), () => this.#fail("The microphone is gone."));
      write(byId("listen"), "Stop");
      this.#say("listening");
    } catch (error) {
      this.#fail(REASONS[error.name] ?? `The microphone cannot be heard: ${error.message}`);
    } finally {
      byId("listen").disabled = false;
    }
  }

  #prepare(rateHz) {
    this.words?.reset();
    this.resampler = new Resampler(rateHz, this.rateHz);
    this.chunk = new Int16Array(this.chunkFrames);
    this.filled = 0;
    this.waiting = [];
    this.busy = null;
  }

  /** Stop after the words heard so far are shown. */
  async stop() {
    const sound = this.#sound;
    if (!sound) return;
    this.#sound = null;
    await sound.end();
    this.#fill(this.resampler.take(new Float32Array(0), true));
    this.#queue(this.filled, true);
    await this.busy;
    this.#idle("not listening");
  }

  #take(piece) {
    showLevel(piece);
    this.#fill(this.resampler.take(piece));
  }

  #fill(samples) {
    for (const sample of samples) {
      this.chunk[this.filled++] = Math.max(-32768, Math.min(32767, Math.round(32768 * sample)));
      if (this.filled === this.chunk.length) this.#queue(this.filled, false);
    }
  }

  #queue(length, last) {
    this.waiting.push({ samples: this.#inDtype(), length, last });
    this.chunk.fill(0);
    this.filled = 0;
    if ((this.waiting.length * this.chunkFrames) / this.rateHz > MOST_WAITING_S) {
      return this.#fail("This device is too slow for this network: it has fallen behind by five seconds.");
    }
    this.busy ??= this.#work();
  }

  /** The chunk in the network's dtype: int16, or floats relative to full scale. */
  #inDtype() {
    if (this.description.inputs[0].dtype === "int16") return this.chunk.slice();
    return Float32Array.from(this.chunk, (sample) => sample / 32768);
  }

  async #work() {
    try {
      while (this.waiting.length) {
        const { samples, length, last } = this.waiting.shift();
        this.#answer(await this.engine.sound(samples, length, last), last);
      }
    } catch (error) {
      this.#fail(`The network does not run: ${error.message}`);
    } finally {
      this.busy = null;
    }
  }

  #answer({ rows, values, ms }, last = false) {
    write(byId("chunk-ms"), milliseconds(ms));
    if (this.words) for (const word of this.words.take(rows, values, last)) showWord(word, this.isProbability);
    else if (rows) this.#showNumbers(rows, values);
  }

  /** The frames of the latest chunk, of an output without words. */
  #showNumbers(rows, values) {
    const shape = [rows, ...this.output.shape.slice(1)];
    const size = shape.reduce((product, extent) => product * extent, 1);
    byId("heard-numbers").replaceChildren(output(this.output, { values: values.subarray(0, size), shape }));
  }

  #fail(sentence) {
    this.#sound?.close();
    this.#sound = null;
    this.waiting = [];
    this.#idle(sentence);
    byId("listen-state").toggleAttribute("data-failed", true);
  }

  #idle(sentence) {
    write(byId("listen"), "Start listening");
    byId("level").style.transform = "scaleX(0)";
    this.#say(sentence);
  }

  #say(sentence) {
    byId("listen-state").toggleAttribute("data-failed", false);
    write(byId("listen-state"), sentence);
  }
}

/** Open the microphone. From `begin` on, `taken` gets its samples in pieces; `lost` is called if it is unplugged. */
async function openMicrophone() {
  // Without the browser's processing for telephony, which training data did not have.
  const audio = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  if (!navigator.mediaDevices) throw new Error("this browser lets pages have no microphone.");
  const media = await navigator.mediaDevices.getUserMedia({ audio });
  const context = new AudioContext({ latencyHint: "interactive" });
  const close = () => {
    for (const track of media.getTracks()) track.stop();
    if (context.state !== "closed") context.close();
  };
  try {
    await context.audioWorklet.addModule(new URL("capture.js", import.meta.url));
    const mono = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    const capture = new AudioWorkletNode(context, "capture", mono);
    context.createMediaStreamSource(media).connect(capture);
    await context.resume();
    return new Microphone(context.sampleRate, media, capture, close);
  } catch (error) {
    close();
    throw error;
  }
}

class Microphone {
  #over = null;

  constructor(rateHz, media, capture, close) {
    Object.assign(this, { rateHz, media, capture, release: close });
  }

  begin(taken, lost) {
    this.capture.port.onmessage = ({ data }) => (data ? taken(data) : this.#over?.());
    this.media.getAudioTracks()[0].onended = lost;
  }

  /** Resolve when the last samples have been delivered. */
  async end() {
    const over = new Promise((resolve) => (this.#over = resolve));
    this.capture.port.postMessage("end");
    await Promise.race([over, new Promise((resolve) => setTimeout(resolve, FLUSH_MS))]);
    this.close();
  }

  /** Release the microphone at once. */
  close() {
    this.capture.port.onmessage = null;
    this.release();
  }
}

const REASONS = {
  NotAllowedError: "The browser may not use the microphone. Allow it beside the address of this page, and start again.",
  NotFoundError: "There is no microphone. Plug one in, and start again.",
  NotReadableError: "The microphone gives no sound; another program may be using it.",
};

function showLevel(piece) {
  const rms = Math.sqrt(piece.reduce((sum, sample) => sum + sample * sample, 0) / piece.length);
  const share = Math.min(1, Math.max(0, 1 - (20 * Math.log10(rms)) / LOWEST_DB));
  byId("level").style.transform = `scaleX(${share})`;
}

function showWord({ word, probability }, isProbability) {
  write(byId("word-big"), word);
  const words = byId("words");
  words.append(element("li", {}, element("b", {}, word), element("small", {}, isProbability ? percent(probability) : probability.toPrecision(3))));
  if (words.children.length > MOST_WORDS) words.firstChild.remove();
  words.scrollTop = words.scrollHeight;
}
