// What the page says to the server, and what it makes of the answers.

import { anotherKey, apiKey } from "./key.js";

const POLL_PATIENCE_MS = 4000;
const PATIENCE_MS = 60_000;

/** The server does not answer at all. */
export class Gone extends Error {}

/** The server answered with an error; the message is its own sentence. */
export class Refusal extends Error {
  constructor(sentence, status, retryAfterMs) {
    super(sentence);
    this.status = status;
    this.retryAfterMs = retryAfterMs;
  }
}

async function request(path, patienceMs, options = {}) {
  const key = apiKey();
  const headers = key === null ? options.headers : { ...options.headers, Authorization: `Bearer ${key}` };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patienceMs), ...options, headers });
    if (response.ok) return [response, await response.arrayBuffer()];
  } catch (error) {
    throw new Gone(error.message);
  }
  if (response.status !== 401) throw await refusal(response);
  await anotherKey(key);
  return request(path, patienceMs, options);
}

async function refusal(response) {
  const retryAfterMs = 1000 * Number(response.headers.get("Retry-After") ?? 1);
  try {
    return new Refusal((await response.json()).error, response.status, retryAfterMs);
  } catch {
    return new Refusal(`The server answered with status ${response.status}.`, response.status, retryAfterMs);
  }
}

/** The JSON of a route, such as `v1/stats`. Throws `Gone` or `Refusal`. */
export async function getJson(path) {
  const [, body] = await request(path, POLL_PATIENCE_MS);
  return JSON.parse(new TextDecoder().decode(body));
}

/**
 * One request to an application. Throws `Gone` or `Refusal`.
 * Where the output has labels, its numbers are asked for as they are; otherwise the application's own reply.
 */
export async function ask(app, body, contentType) {
  const labelled = hasLabels(app.output);
  const headers = { "Content-Type": contentType, Accept: labelled ? "application/octet-stream" : "application/json" };
  const start = performance.now();
  const [, answer] = await request(`v1/apps/${app.name}`, PATIENCE_MS, { method: "POST", headers, body });
  const roundTripMs = performance.now() - start;
  if (labelled) return { values: numbers(app.output.dtype, answer), roundTripMs };
  return { reply: JSON.parse(new TextDecoder().decode(answer)), roundTripMs };
}

/** Whether the one output is one number for each of its labels, and of a dtype that a browser can read. */
export function hasLabels(spec) {
  return spec !== null && spec.labels.length > 0 && spec.shape.length === 1 && spec.dtype in READERS;
}

const READERS = {
  bool: ["getUint8", 1],
  uint8: ["getUint8", 1],
  int8: ["getInt8", 1],
  uint16: ["getUint16", 2],
  int16: ["getInt16", 2],
  uint32: ["getUint32", 4],
  int32: ["getInt32", 4],
  float32: ["getFloat32", 4],
  float64: ["getFloat64", 8],
};

function numbers(dtype, buffer) {
  const [read, size] = READERS[dtype];
  const view = new DataView(buffer);
  return Array.from({ length: buffer.byteLength / size }, (_, index) => view[read](index * size, true));
}
