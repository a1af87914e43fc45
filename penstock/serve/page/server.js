// What the page says to the server, and what it makes of the answers.

import { anotherKey, apiKey } from "./key.js";
import { eventsOf } from "./steps.js";
import { areScores, isReadable, numbersOf } from "./values.js";

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

async function request(path, patienceMs, options = {}, read = (response) => response.arrayBuffer()) {
  const key = apiKey();
  const headers = key === null ? options.headers : { ...options.headers, Authorization: `Bearer ${key}` };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patienceMs), ...options, headers });
    if (response.ok) return [response, await read(response)];
  } catch (error) {
    throw error instanceof Refusal ? error : new Gone(error.message);
  }
  if (response.status !== 401) throw await refusal(response);
  await anotherKey(key);
  return request(path, patienceMs, options, read);
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
export async function ask(app, body, contentType, onStep) {
  if (inSteps(app)) return askForSteps(app, body, contentType, onStep);
  const labelled = hasLabels(app.output);
  const headers = { ...typed(contentType), Accept: labelled ? "application/octet-stream" : "application/json" };
  const start = performance.now();
  const [, answer] = await request(`v1/apps/${app.name}`, PATIENCE_MS, { method: "POST", headers, body });
  const roundTripMs = performance.now() - start;
  if (labelled) return { values: numbersOf(app.output.dtype, answer), roundTripMs };
  return { reply: JSON.parse(new TextDecoder().decode(answer)), roundTripMs };
}

// A browser itself writes the type of a form, with its boundary.
const typed = (contentType) => (contentType === null ? {} : { "Content-Type": contentType });

/** The map of one tile, RGB bytes, of a dense network; other requests go first. Throws `Gone` or `Refusal`. */
export async function askTile(app, pixels) {
  const headers = { "Content-Type": "application/octet-stream", Accept: "application/octet-stream", "Penstock-Priority": "background" };
  const [, answer] = await request(`v1/apps/${app.name}`, PATIENCE_MS, { method: "POST", headers, body: pixels });
  return numbersOf(app.output.dtype, answer);
}

/** As `ask`, of an answer that takes steps: `onStep` gets each as it comes. */
async function askForSteps(app, body, contentType, onStep) {
  const headers = { ...typed(contentType), Accept: "text/event-stream" };
  const start = performance.now();
  const path = `v1/apps/${app.name}`;
  const [, done] = await request(path, PATIENCE_MS, { method: "POST", headers, body }, async (response) => {
    if (!response.headers.get("Content-Type").startsWith("text/event-stream")) return { reply: await response.json() };
    for await (const { name, data } of eventsOf(response)) {
      if (name === "error") throw new Refusal(data.error, 500, 0);
      if (name === "done") return data;
      onStep(data);
    }
    throw new Error("the connection broke off");
  });
  return { done, roundTripMs: performance.now() - start };
}

/** Whether the answer comes step by step: of an application that generates, or of a chain whose last part does. */
export const inSteps = (app) => Boolean(app.generate || app.stepped);

/** Whether the one output is a score for each of its labels, and of a dtype that a browser can read. */
export function hasLabels(spec) {
  return spec !== null && areScores(spec) && spec.shape.length === 1 && isReadable(spec.dtype);
}
