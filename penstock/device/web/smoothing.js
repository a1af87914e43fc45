// What is shown over the frames of a video: probabilities are smoothed, and what is shown changes with hysteresis.
// The same as penstock/device/smoothing.py; shared examples hold both to it.

import { largest } from "./recognition.js";

// Of a source that paused longer, the past counts no less than after this.
const LONGEST_STEP_S = 1;

export class Smoothing {
  #timeS = null;
  #group = null; // the number of the class that is shown; null while unsure

  constructor(recognition) {
    this.recognition = recognition;
    this.mean = new Float64Array(recognition.labels.length);
  }

  /** One frame more, taken at `timeS` on the source's clock: what is shown now. */
  take(probabilities, timeS) {
    const { recognition, mean } = this;
    const stepS = Math.min(Math.max(timeS - (this.#timeS ?? timeS), 0), LONGEST_STEP_S);
    const weight = this.#timeS === null ? 1 : 1 - 2 ** (-stepS / recognition.halfLifeS);
    for (let index = 0; index < mean.length; index++) mean[index] += weight * (probabilities[index] - mean[index]);
    this.#timeS = timeS;
    const sums = recognition.sums(mean);
    const best = largest(sums);
    if (sums[best] >= recognition.enter) this.#group = best;
    else if (this.#group !== null && sums[this.#group] < recognition.leave) this.#group = null;
    return recognition.said(mean, sums, this.#group ?? best, this.#group !== null);
  }

  /** Another source begins. */
  forget() {
    this.#timeS = this.#group = null;
    this.mean.fill(0);
  }
}
