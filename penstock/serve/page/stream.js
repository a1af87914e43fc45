// A live stream's conversation with the server: a start, numbered chunks of samples, their results, an end. It goes on over another connection where its own is gone.

import { SentChunks } from "./sent.js";

const READY_MS = 10_000;
const END_MS = 10_000;
const MOST_BEHIND_S = 10;
const MOST_BUFFERED_S = 0.5; // more waits here, where one can see how much it is
const UNTIL_ANOTHER_MS = 5000; // where the server does not say when to come back
const SILENT_MS = 1000; // a connection that does not answer for so long counts as gone; twice as long each time that it was not
const LOOK_MS = 100;
const [FIRST_PAUSE_MS, LONGEST_PAUSE_MS] = [50, 1000];
const AGAIN_MS = 30_000; // how long another connection is tried; END_MS where no more sound comes
const [DONE, AWAY, BROKEN, RESTART, TRY_LATER, WANTS_KEY, INVALID_TICKET] = [1000, 1001, 1006, 1012, 1013, 4401, 4412];
const GONE = [AWAY, BROKEN, RESTART];

/** The WebSocket of an application, with the key as the only thing that a browser lets it carry. */
export function openSocket(app, key) {
  const url = new URL(`v1/apps/${encodeURIComponent(app.name)}/stream`, document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const escaped = (letter) => `%${letter.charCodeAt(0).toString(16)}`;
  const carried = key === null ? [] : [`key.${encodeURIComponent(key).replace(/[()]/g, escaped)}`];
  return new WebSocket(url, ["penstock", ...carried]);
}

/**
 * A stream on a socket that `open` returns; it is called again for another one where a connection that answered before is gone. All that was sent is sent again
 * there, or what came after the newest ticket of a server that gives some; results that came before are dropped, so that each comes once.
 * `told` gets `ready()`, `result(event, latencyMs)` for every chunk and once more for what the end releases, `segment(said)` for each message of a segment in the
 * later parts of a chain, and at last, once, `over(end)`; `end` has `why`, a
 * sentence that is empty where all was well, `opened`, `retryAfterMs` where the server asks to come back later, and `wantsKey` where it wants another key.
 */
export class Stream {
  #state = "starting";
  #connected = false;
  #chunks = new SentChunks();
  #since = []; // when each chunk came that is not answered yet
  #opened = false;
  #ended = false;
  #endSent = false;
  #timer;
  #looking;
  #heardMs = 0; // when the last message came
  #silentMs = SILENT_MS;
  #lostBy = null; // what ended the connection that is replaced, and until when
  #pauseMs = 0;
  #allowedS = 0; // how far answers may be behind beyond the rule, after a connection was replaced

  constructor(open, rateHz, chunkS, told) {
    Object.assign(this, { open, rateHz, chunkS, told });
    this.mostBuffered = 2 * rateHz * MOST_BUFFERED_S;
    this.#connect();
    this.#looking = setInterval(() => this.#look(), LOOK_MS);
  }

  /** Seconds of sound that came and are not answered yet. */
  get behindS() {
    return this.#since.length * this.chunkS;
  }

  /** Whether the connection is gone, and another one is being opened. */
  get isLost() {
    return this.#lostBy !== null;
  }

  /** Takes a chunk; what comes before the stream is ready is not kept. */
  send(samples) {
    if (this.#state !== "flowing") return;
    this.#since.push(performance.now());
    this.#chunks.add(samples);
    this.#sendHeld();
    if (!this.isLost && this.behindS > MOST_BEHIND_S + this.#allowedS) this.#leave(`Answers are ${MOST_BEHIND_S} s behind: the network or the server is too slow.`);
  }

  /** No more sound comes; what is still to be answered will be. */
  end() {
    if (this.#state === "starting") this.#leave("");
    if (this.#state !== "flowing") return;
    this.#state = "ending";
    this.#since.push(performance.now()); // what the network held back is answered too
    this.#sendHeld();
    if (this.isLost) this.#lostBy.untilMs = Math.min(this.#lostBy.untilMs, performance.now() + END_MS);
    else this.#awaitEnd();
  }

  /** Nobody listens any more. */
  abandon() {
    this.told = { ready() {}, result() {}, segment() {}, over() {} };
    this.#leave("");
  }

  #connect() {
    const socket = this.open();
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    // A socket that was left for another one may still speak.
    const here = (take) => (event) => this.socket === socket && this.#state !== "over" && take(event);
    socket.onopen = here(() => {
      this.#opened = true;
      const { ticket } = this.#chunks;
      const goesOn = this.isLost && ticket !== null ? { ticket } : {};
      socket.send(JSON.stringify({ type: "start", rate_hz: this.rateHz, encoding: "pcm_s16le", events: "json", tickets: true, ...goesOn }));
    });
    socket.onmessage = here(({ data }) => this.#received(JSON.parse(data)));
    socket.onclose = here((close) => this.#closed(close));
    this.#after(READY_MS, () => this.#unready());
  }

  #unready() {
    if (this.isLost) this.#closed({ code: BROKEN, reason: "" });
    else this.#leave("The server did not say that it is ready.");
  }

  #received(said) {
    this.#heardMs = performance.now();
    if (said.type === "ready") this.#ready();
    else if (said.type === "result") this.#result(said);
    else if (said.type === "ticket") this.#chunks.takeTicket(said.ticket, said.seq);
    else if (said.segment !== undefined) this.#segment(said);
    else this.#ended = true;
  }

  #ready() {
    clearTimeout(this.#timer);
    this.#connected = true;
    if (this.isLost) {
      this.#lostBy = null;
      this.#allowedS = this.behindS;
      this.#sendHeld();
      if (this.#state === "ending") this.#awaitEnd();
      return;
    }
    this.#state = "flowing";
    this.told.ready();
  }

  #result({ seq, event }) {
    if (this.#chunks.isNew(seq)) {
      const since = this.#since.shift();
      // Where the server ends a stream by itself, what it held back answers no chunk.
      this.told.result(event, since === undefined ? null : performance.now() - since);
      if (this.behindS <= MOST_BEHIND_S) this.#allowedS = 0;
    }
    this.#sendHeld();
  }

  #segment(said) {
    // Which of a segment's messages came before is not known.
    this.#chunks.forget();
    if (this.#endSent) this.#awaitEnd();
    this.told.segment(said);
  }

  #awaitEnd() {
    this.#after(END_MS, () => this.#leave("The server did not answer the end of the stream."));
  }

  #sendHeld() {
    const { socket } = this;
    if (!this.#connected) return;
    while (this.#chunks.areHeld && socket.bufferedAmount < this.mostBuffered) socket.send(message(...this.#chunks.next()));
    if (this.#state !== "ending" || this.#endSent || this.#chunks.areHeld) return;
    this.#endSent = true;
    socket.send(JSON.stringify({ type: "end" }));
  }

  #look() {
    if (!this.#connected || !this.#since.length || !this.#chunks.canResume) return;
    this.#sendHeld();
    if (performance.now() - Math.max(this.#heardMs, this.#since[0]) < this.#silentMs) return;
    this.#silentMs *= 2;
    this.#closed({ code: BROKEN, reason: "" });
  }

  /** The connection is gone, or an attempt to open another one failed. */
  #closed(close) {
    const end = ending(close, this.#opened, this.#ended);
    const isGone = this.#connected && !this.#ended && GONE.includes(close.code) && this.#chunks.canResume;
    if (isGone) this.#lostBy = { end, untilMs: performance.now() + (this.#state === "ending" ? END_MS : AGAIN_MS) };
    else if (!this.isLost || !this.#mayTryAgain(close.code)) return this.#over(end);
    this.#connected = this.#endSent = false;
    this.#pauseMs = isGone ? 0 : Math.min(LONGEST_PAUSE_MS, 2 * this.#pauseMs || FIRST_PAUSE_MS);
    const pauseMs = Math.max(this.#pauseMs, close.code === TRY_LATER ? end.retryAfterMs : 0);
    if (performance.now() + pauseMs > this.#lostBy.untilMs) return this.#over(this.#lostBy.end);
    const left = this.socket;
    this.socket = null;
    left.close(DONE);
    // Before the pause: chunks that come during it must not push out those that are sent again.
    this.#chunks.begin();
    this.#after(pauseMs, () => this.#connect());
  }

  /** Whether another attempt may succeed after one that ended with this code. */
  #mayTryAgain(code) {
    return [...GONE, TRY_LATER].includes(code) || (code === INVALID_TICKET && this.#chunks.refuseTicket());
  }

  #after(ms, then) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(then, ms);
  }

  #leave(why) {
    this.socket?.close(DONE);
    this.#over({ why, opened: this.#opened });
  }

  #over(end) {
    if (this.#state === "over") return;
    this.#state = "over";
    clearTimeout(this.#timer);
    clearInterval(this.#looking);
    this.told.over(end);
  }
}

function message(number, samples) {
  const bytes = new Uint8Array(4 + samples.byteLength);
  new DataView(bytes.buffer).setUint32(0, number, true);
  bytes.set(new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength), 4);
  return bytes;
}

function ending({ code, reason }, opened, ended) {
  if (ended || !opened) return { why: "", opened };
  const why = reason || `The connection broke off (code ${code}).`;
  if (code === WANTS_KEY) return { why, opened, wantsKey: true };
  if (code !== TRY_LATER && code !== RESTART) return { why, opened };
  const seconds = /Retry after ([\d.]+) s/.exec(reason);
  return { why: why.replace(/ ?Retry after [\d.]+ s\.?/, ""), opened, retryAfterMs: seconds ? 1000 * seconds[1] : UNTIL_ANOTHER_MS };
}
