// Penstock's page: what the server's applications say, tried by hand, and how the server does meanwhile.

import { byId, element, shown, sleep, write } from "./dom.js";
import { listenPanel, listens } from "./listen.js";
import { showStats } from "./live.js";
import { Gone, Refusal, getJson } from "./server.js";
import { tryPanel } from "./try.js";

const POLL_MS = 500;
const RETRY_MS = 1000;

/** Whether the server answers, and who waits for it to do so again. */
class Connection {
  #waiting = [];
  state = "waiting";

  /** The server answered. */
  works() {
    this.#set("works", "connected", "");
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  /** It did not. */
  lost() {
    const sentence = `The server at ${location.host} does not answer. Trying again every second.`;
    this.#set("lost", "no answer", sentence);
  }

  /** It answers, but serves nothing yet; the sentence is its own. */
  notReady(sentence) {
    this.#set("waiting", "not ready", sentence);
  }

  /** Resolves when it answers again. */
  back() {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  #set(state, word, sentence) {
    this.state = state;
    const sign = byId("connection");
    sign.dataset.state = state;
    write(sign, word);
    write(byId("notice"), sentence);
    byId("notice").hidden = sentence === "";
    byId("live").toggleAttribute("data-stale", state !== "works");
  }
}

const connection = new Connection();
let offered = "";
let shownApp = null; // its name
let leave = () => {}; // ends what the panel that is shown does

/** Shows the applications, unless they are shown already. */
async function showApps() {
  const { apps } = await getJson("v1/apps");
  if (apps.length === 0) throw new Refusal("No model is loaded here.", 503, RETRY_MS);
  if (JSON.stringify(apps) === offered) return;
  offered = JSON.stringify(apps);
  const choice = byId("apps");
  choice.replaceChildren(...apps.map((app) => element("option", { value: app.name }, app.name)));
  choice.hidden = choice.labels[0].hidden = apps.length < 2;
  byId("app-name").classList.toggle("unseen", apps.length > 1);
  choice.onchange = () => showApp(apps.find((app) => app.name === choice.value));
  showApp(apps[0]);
}

function showApp(app) {
  write(byId("app-name"), app.name);
  write(byId("app-description"), app.description);
  document.title = `${app.name} · Penstock`;
  write(byId("bundle"), origin(app));
  leave();
  shownApp = app.name;
  const panel = listens(app) ? listenPanel(app, connection) : { view: tryPanel(app, connection), leave() {} };
  leave = panel.leave;
  byId("try").replaceChildren(panel.view);
}

function origin({ bundle, metrics }) {
  const found = Object.entries(metrics ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${value.toPrecision(3)}`);
  return [...(bundle ? [`bundle ${bundle.slice(0, 12)}`] : []), ...found].join(" · ");
}

async function poll() {
  if (connection.state !== "works") {
    await getJson("v2/health/ready");
    await showApps();
  }
  const stats = await getJson("v1/stats");
  const shownStats = stats.models[shownApp] ?? stats;
  showStats(shownApp, shownStats);
  showFallbacks(shownStats);
  connection.works();
}

/** Says why the network runs in a slower way than there is. */
function showFallbacks({ engines = [] }) {
  const fallbacks = [...new Set(engines.map(({ fallback }) => fallback).filter(Boolean))];
  write(byId("fallback"), fallbacks.join(" "));
  byId("fallback").hidden = fallbacks.length === 0;
}

for (;;) {
  await shown();
  const start = performance.now();
  try {
    await poll();
  } catch (error) {
    if (!(error instanceof Gone || error instanceof Refusal)) throw error;
    if (error instanceof Refusal) connection.notReady(error.message);
    else connection.lost();
  }
  const every = connection.state === "works" ? POLL_MS : RETRY_MS;
  await sleep(Math.max(50, every - (performance.now() - start)));
}
