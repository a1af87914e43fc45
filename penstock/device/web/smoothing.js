// Smooth a classifier's probabilities over the frames of a video; the shown group changes with hysteresis.
// The same as penstock/device/smoothing.py; shared examples test both.

import { largest } from "./recognition.js";

// A longer pause of the source counts as this.
const MAX_STEP_S = 1;

export class Smoothing {
  #timeS = null;
  #group = null; // index of the shown group; null while unsure

  constructor(recognition) {
    this.recognition = recognition;
    this.mean = new Float64Array(recognition.labels.length);
  }

  /** Add a frame captured at `timeS` on the source's clock; return the smoothed answer. */
  take(probabilities, timeS) {
    const { recognition, mean } = this;
    const stepS = Math.min(Math.max(timeS - (this.#timeS ?? timeS), 0), MAX_STEP_S);
    const weight = this.#timeS === null ? 1 : 1 - 2 ** (-stepS / recognition.halfLifeS);
    for (let index = 0; index < mean.length; index++) mean[index] += weight * (probabilities[index] - mean[index]);
    this.#timeS = timeS;
    const sums = recognition.sums(mean);
    const best = largest(sums);
    if (sums[best] >= recognition.enter) this.#group = best;
    else if (this.#group !== null && sums[this.#group] < recognition.leave) this.#group = null;
    return recognition.answerWithGroup(mean, sums, this.#group ?? best, this.#group !== null);
  }

  /** Reset for another source. */
  reset() {
    this.#timeS = this.#group = null;
    this.mean.fill(0);
  }
}
