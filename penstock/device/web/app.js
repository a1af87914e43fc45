// Start the app of an installed pack: the camera for pictures, the microphone for sound, a text box for other inputs.

import { byId, notice, write } from "./dom.js";
import { Engine } from "./engine.js";
import { Hearing } from "./hear.js";
import { Looking } from "./look.js";
import { openIndex } from "./search.js";
import { ARRAYS } from "./tensors.js";
import { Typing } from "./type.js";

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
    else if (!isPicture(description.inputs)) await new Typing(description, engine).begin(opened);
    else await new Looking(description, engine, openIndex(description)).begin(opened);
  } catch (error) {
    notice(`The network does not run here: ${error.message}`);
  }
}

/** The reason that this app does not support a pack, or null. */
function unsupported({ kind, inputs, outputs }) {
  const [input] = inputs;
  const takes = `This network takes ${input.dtype} ${JSON.stringify(input.shape)}`;
  if (kind !== "live" && !isPicture(inputs)) {
    if (input.max_shape) return `${takes}; of any size the app supports pictures alone.`;
    const foreign = [...inputs, ...outputs].find(({ dtype }) => !(dtype in ARRAYS));
    return foreign ? `This network has ${foreign.dtype} "${foreign.name}", which browsers do not have.` : null;
  }
  if (!outputs[0].labels?.length) return `This network's output "${outputs[0].name}" has no labels to show.`;
  if (kind !== "live") {
    const { name, shape } = outputs[0];
    return shape.length === 1 ? null : `This network's output "${name}" has a score for each label in several places; of pictures the app shows one.`;
  }
  const isSound = input.shape.length === 1 && ["int16", "float32"].includes(input.dtype);
  return isSound ? null : `${takes}; the app supports one channel of sound.`;
}

/** True for RGBA of any size, and for grey or RGB of a fixed size. */
function isPicture([{ dtype, shape, max_shape: largest }, ...others]) {
  const [height, width, channels = 1, more] = shape;
  if (others.length || dtype !== "uint8" || more !== undefined) return false;
  if (height === null || largest?.length) return height === null && width === null && channels === 4;
  return width > 1 && height > 1 && (channels === 1 || channels === 3);
}
