// Starts the app of a pack that is on this device: to look where it knows pictures, to listen where it knows sound.

import { byId, notice, write } from "./dom.js";
import { Engine } from "./engine.js";
import { Hearing } from "./hear.js";
import { Looking } from "./look.js";
import { openIndex } from "./search.js";

export async function run() {
  const description = await (await fetch("../pack.json")).json();
  write(byId("app-name"), description.name);
  write(byId("app-description"), description.description);
  write(byId("licence"), `Licence of the network: ${description.licence || "not said"}.`);
  document.title = `${description.name} · Penstock`;
  navigator.storage?.persist?.();
  const unknown = whyUnknown(description);
  if (unknown) return notice(unknown);
  const engine = new Engine(description);
  if (engine.threads > 1) write(byId("threads"), `${engine.threads} threads`);
  const opened = engine.open();
  try {
    if (description.kind === "live") await new Hearing(description, engine).begin(opened);
    else await new Looking(description, engine, openIndex(description)).begin(opened);
  } catch (error) {
    notice(`The network does not run here: ${error.message}`);
  }
}

/** Why this app has nothing to show for a pack, or null. */
function whyUnknown({ kind, input, outputs }) {
  if (!outputs[0].labels) return `This network's output "${outputs[0].name}" has no labels, and so there is nothing to show.`;
  if (kind === "live" && input.shape.length === 1 && ["int16", "float32"].includes(input.dtype)) return null;
  if (kind === "live") return `This network takes ${input.dtype} ${JSON.stringify(input.shape)}; the app hears one channel of sound.`;
  const [height, width, channels] = input.shape;
  if (input.dtype === "uint8" && height === null && width === null && channels === 4) return null;
  return `This network takes ${input.dtype} ${JSON.stringify(input.shape)}; the app shows it pictures of any size, or sound.`;
}
