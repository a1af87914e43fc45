// Start the app of an installed pack: the camera for pictures, the microphone for sound.

import { byId, notice, write } from "./dom.js";
import { Engine } from "./engine.js";
import { Hearing } from "./hear.js";
import { Looking } from "./look.js";
import { openIndex } from "./search.js";

export async function run() {
  const description = await (await fetch("../pack.json")).json();
  write(byId("app-name"), description.name);
  write(byId("app-description"), description.description);
  write(byId("licence"), `Licence of the network: ${description.licence || "not stated"}.`);
  document.title = `${description.name} · Penstock`;
  navigator.storage?.persist?.();
  const reason = unsupported(description);
  if (reason) return notice(reason);
  const engine = new Engine(description);
  if (engine.threads > 1) write(byId("threads"), `${engine.threads} threads`);
  const opened = engine.open();
  opened.catch(() => null); // reported where it is awaited
  try {
    if (description.kind === "live") await new Hearing(description, engine).begin(opened);
    else await new Looking(description, engine, openIndex(description)).begin(opened);
  } catch (error) {
    notice(`The network does not run here: ${error.message}`);
  }
}

/** The reason that this app does not support a pack, or null. */
function unsupported({ kind, input, outputs }) {
  if (!outputs[0].labels?.length) return `This network's output "${outputs[0].name}" has no labels to show.`;
  if (kind === "live" && input.shape.length === 1 && ["int16", "float32"].includes(input.dtype)) return null;
  if (kind === "live") return `This network takes ${input.dtype} ${JSON.stringify(input.shape)}; the app supports one channel of sound.`;
  if (kind === "oneshot" && isPicture(input)) return null;
  return `This network takes ${input.dtype} ${JSON.stringify(input.shape)}; the app supports pictures and sound.`;
}

/** True for RGBA of any size, and for grey or RGB of a fixed size. */
function isPicture({ dtype, shape: [height, width, channels = 1, more] }) {
  if (dtype !== "uint8" || more !== undefined) return false;
  if (height === null) return width === null && channels === 4;
  return width > 1 && height > 1 && (channels === 1 || channels === 3);
}
