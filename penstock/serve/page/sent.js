// The chunks of a live stream since its beginning or a ticket, so that another connection can be sent them again. No sockets, no clock.

const MAX_BYTES = 16 << 20;

/**
 * Chunks in order. A stream that outgrows the memory for them goes on; it can be resumed from a ticket that covers what was dropped, and without one it cannot.
 * `maxBytes` is that memory.
 */
export class SentChunks {
  #chunks = [];
  #dropped = 0; // how many of the first ones are not there any more
  #next = 0; // the number of the next one to send on this connection
  #answered = 0;
  #bytes = 0;
  #forgets = false;
  #ticket = null; // the newest one: its text, and the number of the first chunk that it does not cover

  constructor(maxBytes = MAX_BYTES) {
    this.maxBytes = maxBytes;
  }

  /** Whether a chunk is not sent yet. */
  get areHeld() {
    return this.#next < this.#dropped + this.#chunks.length;
  }

  /** Whether another connection can go on with the stream. */
  get canResume() {
    return !this.#forgets && (this.#dropped === 0 || this.#usable !== null);
  }

  /** The text of the ticket with which another connection begins; null where it is sent everything. */
  get ticket() {
    return this.#usable?.text ?? null;
  }

  add(samples) {
    this.#chunks.push(samples);
    this.#bytes += samples.byteLength;
    this.#shrink();
  }

  /** Keeps from now on only what is not sent yet. */
  forget() {
    this.#forgets = true;
    this.#dropUntil(this.#next);
  }

  /** Takes a ticket, which covers all chunks up to a number. */
  takeTicket(text, number) {
    this.#ticket = { text, next: number + 1 };
    this.#shrink();
  }

  /** Forgets a ticket that a server refused; returns whether there was one, and the stream can be resumed without it. */
  refuseTicket() {
    const had = this.#usable !== null;
    this.#ticket = null;
    return had && this.canResume;
  }

  /** The number and the samples of the next chunk to send; call it where `areHeld` alone. */
  next() {
    const sent = [this.#next, this.#chunks[this.#next - this.#dropped]];
    this.#next++;
    if (this.#forgets) this.#dropUntil(this.#next);
    return sent;
  }

  /** Begins anew on another connection, after the newest ticket if there is one. */
  begin() {
    this.#next = this.#usable?.next ?? 0;
  }

  /** Whether the result of a number did not come before. */
  isNew(number) {
    if (number < this.#answered) return false;
    this.#answered = number + 1;
    return true;
  }

  get #usable() {
    return this.#ticket !== null && this.#dropped <= this.#ticket.next ? this.#ticket : null;
  }

  // What a ticket covers goes first. Where there has been one, the next may cover more; else the stream is forgotten.
  #shrink() {
    if (this.#forgets || this.#bytes <= this.maxBytes) return;
    if (this.#ticket === null) return this.forget();
    this.#dropUntil(Math.min(this.#next, this.#ticket.next));
    while (this.#bytes > this.maxBytes && this.#dropped < this.#next) this.#dropUntil(this.#dropped + 1);
  }

  #dropUntil(number) {
    for (const samples of this.#chunks.splice(0, Math.max(0, number - this.#dropped))) this.#bytes -= samples.byteLength;
    this.#dropped = Math.max(this.#dropped, number);
  }
}
