// Audio worklet: post the microphone's samples in pieces.

const PIECE = 1024; // samples

class Capture extends AudioWorkletProcessor {
  #piece = new Float32Array(PIECE);
  #filled = 0;
  #over = false;

  /** Any message from the page ends the capture: the remaining samples are posted, then null. */
  constructor() {
    super();
    this.port.onmessage = () => {
      if (this.#filled) this.#post();
      this.#over = true;
      this.port.postMessage(null);
    };
  }

  process([[samples]]) {
    // Undefined until a source is connected.
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
