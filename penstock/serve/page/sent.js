// The chunks of a live stream since its beginning, so that another connection can be sent them again. No sockets, no clock.

const MOST_BYTES = 16 << 20;

/** Chunks in order; a stream that outgrows the memory for them goes on, and cannot be sent again. */
export class SentChunks {
  #chunks = [];
  #dropped = 0; // how many of the first ones are not there any more
  #next = 0; // the number of the next one to send on this connection
  #answered = 0;
  #bytes = 0;
  #whole = true;

  /** Whether a chunk is not sent yet. */
  get areHeld() {
    return this.#next < this.#dropped + this.#chunks.length;
  }

  /** Whether all of them are here. */
  get areWhole() {
    return this.#whole;
  }

  add(samples) {
    this.#chunks.push(samples);
    this.#bytes += samples.byteLength;
    if (this.#bytes > MOST_BYTES) this.forget();
  }

  /** Keeps from now on only what is not sent yet. */
  forget() {
    this.#whole = false;
    this.#drop();
  }

  /** The number and the samples of the next chunk to send. */
  next() {
    const sent = [this.#next, this.#chunks[this.#next - this.#dropped]];
    this.#next++;
    if (!this.#whole) this.#drop();
    return sent;
  }

  /** Begins anew, on another connection. */
  begin() {
    this.#next = 0;
  }

  /** Whether the result of a number did not come before. */
  isNew(number) {
    if (number < this.#answered) return false;
    this.#answered = number + 1;
    return true;
  }

  #drop() {
    this.#chunks.splice(0, this.#next - this.#dropped);
    this.#dropped = this.#next;
  }
}
