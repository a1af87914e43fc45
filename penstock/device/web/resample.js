// Resample sound piece by piece, with a Kaiser-windowed sinc filter.

const ZEROS = 24; // zero crossings of the sinc on each side
const KAISER_BETA = 9; // about 90 dB of stopband attenuation
const PASSED = 0.92; // passband, relative to the lower Nyquist frequency
const STEPS = 512; // filter table entries between two zero crossings

export class Resampler {
  #held = new Float32Array(0); // input samples that later outputs need
  #first = 0; // index of the first of them in the signal
  #next = 0; // index of the next output sample
  #over = false;

  constructor(fromHz, toHz) {
    this.ratio = fromHz / toHz; // input samples per output sample
    this.same = fromHz === toHz;
    this.cut = (PASSED * Math.min(1, toHz / fromHz)); // cutoff relative to the input's Nyquist frequency
    this.reach = Math.ceil(ZEROS / this.cut);
    this.table = lowPass();
  }

  /** Return the output samples that are complete; with `last`, all that remain. */
  take(samples, last = false) {
    if (this.same) return samples;
    this.#hold(samples);
    const end = this.#first + this.#held.length;
    this.#over = last;
    const made = [];
    for (; ; this.#next++) {
      const at = this.#next * this.ratio;
      if (last ? at >= end : at + this.reach >= end) break;
      made.push(this.#at(at));
    }
    this.#drop();
    return Float32Array.from(made);
  }

  #at(time) {
    const from = Math.max(this.#first, Math.ceil(time - this.reach));
    const to = Math.min(this.#first + this.#held.length - 1, Math.floor(time + this.reach));
    let sum = 0;
    for (let index = from; index <= to; index++) {
      const where = Math.abs(time - index) * this.cut * STEPS;
      const step = Math.floor(where);
      const weight = this.table[step] + (where - step) * (this.table[step + 1] - this.table[step]);
      sum += weight * this.#held[index - this.#first];
    }
    return sum * this.cut;
  }

  #hold(samples) {
    const held = new Float32Array(this.#held.length + samples.length);
    held.set(this.#held);
    held.set(samples, this.#held.length);
    this.#held = held;
  }

  #drop() {
    const needed = Math.max(this.#first, Math.ceil(this.#next * this.ratio) - this.reach);
    const gone = Math.min(needed - this.#first, this.#held.length);
    this.#held = this.#held.slice(gone);
    this.#first += gone;
  }
}

/** One side of the filter, STEPS entries per zero crossing, padded with zeros. */
function lowPass() {
  const table = new Float64Array(ZEROS * STEPS + 2 * STEPS);
  for (let index = 0; index < ZEROS * STEPS; index++) {
    const x = index / STEPS;
    const window = bessel(KAISER_BETA * Math.sqrt(1 - (x / ZEROS) ** 2)) / bessel(KAISER_BETA);
    table[index] = window * (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
  }
  return table;
}

/** Modified Bessel function of order 0, by its series. */
function bessel(x) {
  let [sum, term] = [1, 1];
  for (let k = 1; term > 1e-17 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}
