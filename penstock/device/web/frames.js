// Feed a video's frames to the network: one in flight, and only the latest of the others.

const RATE_OVER_MS = 2000;

export class Frames {
  #stopped = false;
  #latest = null; // capture time of the current frame, unless it was processed already
  #wake = null;
  #answeredMs = []; // times of recent answers
  #presented = 0;
  #processed = 0;

  /** Run the function `run` on the frames of `video`; `onAnswer` gets what it returns, times in ms, and figures. */
  constructor(video, run, onAnswer) {
    Object.assign(this, { video, runPicture: run, onAnswer });
  }

  /** Run until `stop`; errors are thrown. */
  async run() {
    this.#listen();
    while (!this.#stopped) {
      const capturedMs = await this.#next();
      if (this.#stopped) break;
      const bitmap = await createImageBitmap(this.video);
      this.#processed++;
      const result = await this.runPicture(bitmap);
      if (this.#stopped) result.picture?.close();
      else this.onAnswer({ ...result, capturedMs, ...this.#figures(capturedMs) });
    }
  }

  stop() {
    this.#stopped = true;
    this.#wake?.();
  }

  #listen() {
    this.video.requestVideoFrameCallback((nowMs, { captureTime }) => {
      if (this.#stopped) return;
      this.#presented++;
      this.#latest = captureTime ?? nowMs;
      this.#wake?.();
      this.#listen();
    });
  }

  async #next() {
    if (this.#latest === null && !this.#stopped) await new Promise((resolve) => (this.#wake = resolve));
    this.#wake = null;
    const capturedMs = this.#latest;
    this.#latest = null;
    return capturedMs;
  }

  #figures(capturedMs) {
    const nowMs = performance.now();
    this.#answeredMs.push(nowMs);
    while (this.#answeredMs[0] < nowMs - RATE_OVER_MS) this.#answeredMs.shift();
    const overMs = nowMs - this.#answeredMs[0];
    const rate = overMs > 0 ? (1000 * (this.#answeredMs.length - 1)) / overMs : null;
    return { ageMs: nowMs - capturedMs, rate, presented: this.#presented, processed: this.#processed };
  }
}
