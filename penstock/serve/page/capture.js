// On the audio thread: what is heard as 16-bit samples, a chunk at a time, and how loud it is.

const LEVEL_S = 0.05; // a level for every so many seconds

class Capture extends AudioWorkletProcessor {
  #over = false;
  #filled = 0;
  #heard = 0; // samples of the level that is being measured, with its peak and the sum of their squares
  #peak = 0;
  #squares = 0;

  /** `chunkFrames` samples make a chunk. Any message from the page ends it: what is left goes out, and then null. */
  constructor({ processorOptions: { chunkFrames } }) {
    super();
    this.chunk = new Int16Array(chunkFrames);
    this.levelFrames = Math.round(LEVEL_S * sampleRate);
    this.port.onmessage = () => this.#finish();
  }

  process([[samples]]) {
    // There are none where nothing is connected, or plays, yet.
    for (const sample of samples ?? []) this.#take(sample);
    return !this.#over;
  }

  #take(sample) {
    if (this.#over) return;
    this.chunk[this.#filled++] = Math.max(-32768, Math.min(32767, Math.round(32768 * sample)));
    if (this.#filled === this.chunk.length) this.#post();
    this.#peak = Math.max(this.#peak, Math.abs(sample));
    this.#squares += sample * sample;
    if (++this.#heard === this.levelFrames) this.#postLevel();
  }

  #post() {
    this.port.postMessage({ samples: this.chunk.slice(0, this.#filled) });
    this.#filled = 0;
  }

  #postLevel() {
    this.port.postMessage({ level: { peak: this.#peak, rms: Math.sqrt(this.#squares / this.#heard) } });
    this.#heard = this.#peak = this.#squares = 0;
  }

  #finish() {
    if (this.#over) return;
    this.#over = true;
    if (this.#filled) this.#post();
    this.port.postMessage({ over: true });
  }
}

registerProcessor("capture", Capture);
