// On the audio thread: what is heard, a piece at a time.

const PIECE = 1024; // samples

class Capture extends AudioWorkletProcessor {
  #piece = new Float32Array(PIECE);
  #filled = 0;
  #over = false;

  /** Any message from the page ends it: what is left goes out, and then null. */
  constructor() {
    super();
    this.port.onmessage = () => {
      if (this.#filled) this.#post();
      this.#over = true;
      this.port.postMessage(null);
    };
  }

  process([[samples]]) {
    // There are none where nothing is connected yet.
    for (const sample of this.#over ? [] : (samples ?? [])) {
      this.#piece[this.#filled++] = sample;
      if (this.#filled === PIECE) this.#post();
    }
    return !this.#over;
  }

  #post() {
    this.port.postMessage(this.#piece.slice(0, this.#filled));
    this.#filled = 0;
  }
}

registerProcessor("capture", Capture);
