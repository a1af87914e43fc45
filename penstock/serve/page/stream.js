// A live stream's conversation with the server: a start, numbered chunks of samples, their results, an end.

const READY_MS = 10_000;
const END_MS = 10_000;
const MOST_BEHIND_S = 10;
const MOST_BUFFERED_S = 0.5; // more waits here, where one can see how much it is
const UNTIL_ANOTHER_MS = 5000; // where the server does not say when to come back
const [DONE, RESTART, TRY_LATER, WANTS_KEY] = [1000, 1012, 1013, 4401];

/** The WebSocket of an application, with the key as the only thing that a browser lets it carry. */
export function openSocket(app, key) {
  const url = new URL(`v1/apps/${encodeURIComponent(app.name)}/stream`, document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const escaped = (letter) => `%${letter.charCodeAt(0).toString(16)}`;
  const carried = key === null ? [] : [`key.${encodeURIComponent(key).replace(/[()]/g, escaped)}`];
  return new WebSocket(url, ["penstock", ...carried]);
}

/**
 * A stream on a socket that is being opened.
 * `told` gets `ready()`, `result(event, latencyMs)` for every chunk and once more for what the end releases, `segment(said)` for each message of a segment in the
 * later parts of a chain, and at last, once, `over(end)`; `end` has `why`, a
 * sentence that is empty where all was well, `opened`, `retryAfterMs` where the server asks to come back later, and `wantsKey` where it wants another key.
 */
export class Stream {
  #state = "starting";
  #number = 0;
  #held = []; // chunks that the network has no room for yet
  #since = []; // when each chunk came that is not answered yet
  #opened = false;
  #ended = false;
  #timer;

  constructor(socket, rateHz, chunkS, told) {
    Object.assign(this, { socket, chunkS, told });
    this.mostBuffered = 2 * rateHz * MOST_BUFFERED_S;
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      this.#opened = true;
      socket.send(JSON.stringify({ type: "start", rate_hz: rateHz, encoding: "pcm_s16le", events: "json" }));
    };
    socket.onmessage = ({ data }) => this.#received(JSON.parse(data));
    socket.onclose = (close) => this.#over(ending(close, this.#opened, this.#ended));
    this.#leaveAfter(READY_MS, "The server did not say that it is ready.");
  }

  /** Seconds of sound that came and are not answered yet. */
  get behindS() {
    return this.#since.length * this.chunkS;
  }

  /** Takes a chunk; what comes before the stream is ready is not kept. */
  send(samples) {
    if (this.#state !== "flowing") return;
    this.#since.push(performance.now());
    this.#held.push(samples);
    this.#sendHeld();
    if (this.behindS > MOST_BEHIND_S) this.#leave(`Answers are ${MOST_BEHIND_S} s behind: the network or the server is too slow.`);
  }

  /** No more sound comes; what is still to be answered will be. */
  end() {
    if (this.#state === "starting") this.#leave("");
    if (this.#state !== "flowing") return;
    this.#state = "ending";
    this.#since.push(performance.now()); // what the network held back is answered too
    this.#sendHeld();
    this.#awaitEnd();
  }

  /** Nobody listens any more. */
  abandon() {
    this.told = { ready() {}, result() {}, segment() {}, over() {} };
    this.#leave("");
  }

  #received(said) {
    if (said.type === "ready") this.#ready();
    else if (said.type === "result") this.#result(said.event);
    else if (said.segment !== undefined) this.#segment(said);
    else this.#ended = true;
  }

  #ready() {
    clearTimeout(this.#timer);
    this.#state = "flowing";
    this.told.ready();
  }

  #result(event) {
    const since = this.#since.shift();
    // Where the server ends a stream by itself, what it held back answers no chunk.
    this.told.result(event, since === undefined ? null : performance.now() - since);
    this.#sendHeld();
  }

  #segment(said) {
    if (this.#state === "ended") this.#awaitEnd();
    this.told.segment(said);
  }

  #awaitEnd() {
    this.#leaveAfter(END_MS, "The server did not answer the end of the stream.");
  }

  #sendHeld() {
    const { socket } = this;
    while (this.#held.length && socket.bufferedAmount < this.mostBuffered) {
      socket.send(message(this.#number++, this.#held.shift()));
    }
    if (this.#state !== "ending" || this.#held.length) return;
    this.#state = "ended";
    socket.send(JSON.stringify({ type: "end" }));
  }

  #leaveAfter(ms, why) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#leave(why), ms);
  }

  #leave(why) {
    this.socket.close(DONE);
    this.#over({ why, opened: this.#opened });
  }

  #over(end) {
    if (this.#state === "over") return;
    this.#state = "over";
    clearTimeout(this.#timer);
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
