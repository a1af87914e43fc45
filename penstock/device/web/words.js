// Words in the output frames of a live network.

import { largest } from "./recognition.js";

const BLANK = "-"; // where it is the first label, the frames are CTC's

/**
 * Repeated symbols count once and blanks not at all: Graves et al. 2006, "Connectionist Temporal Classification",
 * section 3.1. Without a blank, a word is returned when its label begins.
 */
export class Words {
  #before = 0;

  constructor(labels, isLog) {
    Object.assign(this, { labels, isLog });
    this.#before = this.blank = labels[0] === BLANK ? 0 : -1;
  }

  /** The words that begin in `rows` frames of `values`. */
  take(rows, values) {
    const words = [];
    const size = this.labels.length;
    for (let row = 0; row < rows; row++) {
      const scores = values.subarray(row * size, (row + 1) * size);
      const symbol = largest(scores);
      if (symbol !== this.#before && symbol !== this.blank) {
        words.push({ word: this.labels[symbol], probability: this.isLog ? Math.exp(scores[symbol]) : scores[symbol] });
      }
      this.#before = symbol;
    }
    return words;
  }

  reset() {
    this.#before = this.blank;
  }
}
