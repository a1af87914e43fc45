// The page's interface to the worker that runs the network.

const MAX_THREADS = 4;

export class Engine {
  #waiting = new Map();
  #next = 0;

  constructor(description) {
    this.description = description;
    // Threads need shared memory, which browsers allow only in isolated pages.
    const threads = Math.min(MAX_THREADS, navigator.hardwareConcurrency);
    this.threads = globalThis.crossOriginIsolated ? threads : 1;
    this.lackedThreads = threads - this.threads; // for want of isolation
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data: { id, answer, problem } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (problem === undefined) resolve(answer);
      else reject(new Error(problem));
    };
    this.worker.onerror = (event) => this.#fail(event.message ?? "it did not start");
  }

  open() {
    return this.#request({ method: "open", description: this.description, threads: this.threads });
  }

  /**
   * Run the network on an ImageBitmap, which is transferred: `{ outputs: { name: numbers }, ms, seen }`. `seen` is the size at
   * which the network saw it. Where outputs are boxes, or vary in length, each is `{ values, shape }`.
   */
  picture(bitmap) {
    return this.#request({ method: "picture", bitmap }, [bitmap]);
  }

  /** Run the network on RGBA pixels from `getImageData`. */
  pixels({ data, width, height }) {
    return this.#request({ method: "pixels", data, width, height });
  }

  /** Run the network on the bytes of an array of its input's type, of a shape as the graph has it. */
  array(bytes, shape) {
    return this.#request({ method: "array", bytes, shape });
  }

  /** Run the network on `{ name: { bytes, shape } }`, without a batch dimension: `{ outputs: { name: { values, shape } }, ms }`. */
  tensors(inputs) {
    return this.#request({ method: "tensors", inputs });
  }

  /** Run the network on nested lists of numbers by name; the outputs are as those of `tensors`. */
  json(inputs) {
    return this.#request({ method: "json", inputs });
  }

  /**
   * Yield each step of an answer: `{ outputs, ended, ms }`, outputs as those of `tensors`. Leaving the loop stops the
   * answer. `form` is that of the inputs, "json" or "tensors".
   */
  async *generate(inputs, form = "json") {
    const { run, ms } = await this.#request({ method: form, inputs });
    let begin = ms; // counts to the first step
    for (let ended = null; ended === null; ) {
      const step = await this.#request({ method: "step", run });
      ended = step.ended;
      yield { ...step, ms: step.ms + begin };
      begin = 0;
    }
  }

  /** Run the network on the next chunk of a stream: `{ rows, values, ms }`. */
  sound(samples, length, last) {
    return this.#request({ method: "sound", samples, length, last });
  }

  /** Reset the state for a new stream. */
  reset() {
    return this.#request({ method: "reset" });
  }

  close() {
    this.worker.terminate();
    this.#fail("it was closed");
  }

  #request(message, transfer = []) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, ...message }, transfer);
    });
  }

  #fail(why) {
    for (const { reject } of this.#waiting.values()) reject(new Error(`The network's worker broke: ${why}.`));
    this.#waiting.clear();
  }
}
