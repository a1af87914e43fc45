// The page's side of the worker that runs the network.

const MOST_THREADS = 4;

export class Engine {
  #waiting = new Map();
  #next = 0;

  constructor(description) {
    this.description = description;
    // Threads need memory that is shared, which browsers give to isolated pages alone.
    this.threads = globalThis.crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency) : 1;
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data: { id, answer, problem } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (problem === undefined) resolve(answer);
      else reject(new Error(problem));
    };
    this.worker.onerror = (event) => this.#broken(event.message ?? "it did not start");
  }

  open() {
    return this.#ask({ ask: "open", description: this.description, threads: this.threads });
  }

  /** What the network says of an ImageBitmap, which goes to the worker: `{ outputs: { name: numbers }, ms }`. */
  picture(bitmap) {
    return this.#ask({ ask: "picture", bitmap }, [bitmap]);
  }

  /** The same of RGBA pixels, as `getImageData` gives them. */
  pixels({ data, width, height }) {
    return this.#ask({ ask: "pixels", data, width, height });
  }

  /** What the network says of the next chunk of a stream: `{ rows, values, ms }`. */
  sound(samples, length, last) {
    return this.#ask({ ask: "sound", samples, length, last });
  }

  /** The stream is over; another begins. */
  silence() {
    return this.#ask({ ask: "silence" });
  }

  close() {
    this.worker.terminate();
    this.#broken("it was closed");
  }

  #ask(message, transfer = []) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, ...message }, transfer);
    });
  }

  #broken(why) {
    for (const { reject } of this.#waiting.values()) reject(new Error(`The network's worker broke: ${why}.`));
    this.#waiting.clear();
  }
}
