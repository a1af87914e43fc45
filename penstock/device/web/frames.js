// A video's frames to the network: the latest one wins, one is on its way, and none waits in a queue.

const RATE_OVER_MS = 2000;

export class Frames {
  #over = false;
  #latest = null; // when the frame was taken that is shown now, unless it was looked at already
  #wake = null;
  #began = []; // when the answers of the last moments came
  #seen = 0;
  #asked = 0;

  /** Asks `engine` about the frames that `video` shows; `told(answer)` gets outputs, times in ms, and figures. */
  constructor(video, engine, told) {
    Object.assign(this, { video, engine, told });
  }

  /** Until `stop`; whatever breaks is thrown. */
  async run() {
    this.#listen();
    while (!this.#over) {
      const takenMs = await this.#next();
      if (this.#over) break;
      const bitmap = await createImageBitmap(this.video);
      this.#asked++;
      const { outputs, ms } = await this.engine.picture(bitmap);
      if (!this.#over) this.told({ outputs, takenMs, modelMs: ms, ...this.#figures(takenMs) });
    }
  }

  stop() {
    this.#over = true;
    this.#wake?.();
  }

  #listen() {
    this.video.requestVideoFrameCallback((nowMs, { captureTime }) => {
      if (this.#over) return;
      this.#seen++;
      this.#latest = captureTime ?? nowMs;
      this.#wake?.();
      this.#listen();
    });
  }

  async #next() {
    if (this.#latest === null && !this.#over) await new Promise((resolve) => (this.#wake = resolve));
    this.#wake = null;
    const takenMs = this.#latest;
    this.#latest = null;
    return takenMs;
  }

  #figures(takenMs) {
    const nowMs = performance.now();
    this.#began.push(nowMs);
    while (this.#began[0] < nowMs - RATE_OVER_MS) this.#began.shift();
    const overMs = nowMs - this.#began[0];
    const rate = overMs > 0 ? (1000 * (this.#began.length - 1)) / overMs : null;
    return { ageMs: nowMs - takenMs, rate, seen: this.#seen, asked: this.#asked };
  }
}
