// Words in the output frames of a live network.

import { largest } from "./recognition.js";

const BLANK = "-"; // where it is the first label, the frames are CTC's
const SPACE = " ";
const REST_ROWS = 20; // without a character; they end a word too: the last one of an utterance has no space behind it

/**
 * Repeated symbols count once and blanks not at all: Graves et al. 2006, "Connectionist Temporal Classification",
 * section 3.1. Without a blank, a word is returned when its label begins. Where the labels are characters, a word is
 * returned when it ends, with the geometric mean of their probabilities.
 */
export class Words {
  #before = 0;
  #characters = []; // of the word that is heard: { word, probability }
  #rest = 0;

  constructor(labels, isLog) {
    Object.assign(this, { labels, isLog });
    this.#before = this.blank = labels[0] === BLANK ? 0 : -1;
    this.isSpelled = this.blank === 0 && labels.includes(SPACE) && labels.every((label) => label.length === 1);
  }

  /** The words of `rows` frames of `values`; `last` says that the stream ends. */
  take(rows, values, last = false) {
    const found = this.#labelsOf(rows, values);
    return this.isSpelled ? this.#wordsOf(found, rows, last) : found;
  }

  /** Joins characters into words. */
  #wordsOf(found, rows, last) {
    const words = [];
    for (const each of found) {
      if (each.word === SPACE) this.#end(words);
      else this.#characters.push(each);
    }
    this.#rest = found.length ? 0 : this.#rest + rows;
    if (last || this.#rest >= REST_ROWS) this.#end(words);
    return words;
  }

  #end(words) {
    if (this.#characters.length) {
      const logs = this.#characters.reduce((sum, { probability }) => sum + Math.log(probability), 0);
      const word = this.#characters.map((each) => each.word).join("");
      words.push({ word, probability: Math.exp(logs / this.#characters.length) });
    }
    this.#characters = [];
  }

  #labelsOf(rows, values) {
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
    this.#characters = [];
    this.#rest = 0;
  }
}
