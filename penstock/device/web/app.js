// Start the app of an installed pack: the camera for pictures, the microphone for sound, a text box for other inputs.

import { byId, notice, write } from "./dom.js";
import { Engine } from "./engine.js";
import { Hearing } from "./hear.js";
import { Looking } from "./look.js";
import { openIndex } from "./search.js";
import { Tiling } from "./slide.js";
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
  byId("slower").hidden = !engine.lackedThreads;
  const opened = engine.open();
  opened.catch(() => null); // reported where it is awaited
  const panel = panelOf(description, engine);
  try {
    await panel.begin(opened);
  } catch (error) {
    notice(`The network does not run here: ${error.message}`);
  }
}

function panelOf(description, engine) {
  const { kind, inputs, generate, dense } = description;
  if (dense) return new Tiling(description, engine);
  if (kind === "live" && isSound(inputs)) return new Hearing(description, engine);
  if (kind === "live" || generate || !isPicture(inputs)) return new Typing(description, engine);
  return new Looking(description, engine, openIndex(description));
}

/** The reason that this app does not support a pack, or null. */
function unsupported({ kind, inputs, outputs, generate }) {
  const [input] = inputs;
  const takes = `This network takes ${input.dtype} ${JSON.stringify(input.shape)}`;
  if (generate && isPicture(inputs)) return `${takes} and answers in steps, which the app shows of other inputs alone; run it in Python.`;
  if (kind === "live" ? !isSound(inputs) : !isPicture(inputs)) {
    if (input.max_shape) return `${takes}; of any size the app supports pictures alone.`;
    const states = generate ? Object.values(generate.state) : [];
    const foreign = [...inputs, ...outputs, ...states].find(({ dtype }) => !(dtype in ARRAYS));
    return foreign ? `This network has ${foreign.dtype} "${foreign.name}", which browsers do not have.` : null;
  }
  return null;
}

/** True for RGBA of any size, and for grey or RGB of a fixed size. */
function isPicture([{ dtype, shape, max_shape: largest }, ...others]) {
  const [height, width, channels = 1, more] = shape;
  if (others.length || dtype !== "uint8" || more !== undefined) return false;
  if (height === null || largest?.length) return height === null && width === null && channels === 4;
  return width > 1 && height > 1 && (channels === 1 || channels === 3);
}

/** True for one channel of sound. */
function isSound([{ dtype, shape }]) {
  return shape.length === 1 && ["int16", "float32"].includes(dtype);
}
