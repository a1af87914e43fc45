// Web worker that runs the network: frames and chunks of sound in, outputs out.

import { Generation } from "./generation.js";
import { ARRAYS, checkNumbers, fromNumbers, lengthsOf, reframe, roomOf, sizesOf } from "./tensors.js";
import * as ort from "./vendor/ort.wasm.min.mjs";

let pack = null;
let session = null;
let stepSession = null; // of a network whose answer takes steps
let answer = null; // in progress: `{ run, generation }`
let states = null; // state of a live network's stream
let context = null; // of the canvas whose pixels are read

const methods = { open, picture, pixels, array, tensors, json, step, sound, reset };

self.onmessage = async ({ data: { id, method, ...rest } }) => {
  try {
    self.postMessage({ id, answer: await methods[method](rest) });
  } catch (error) {
    self.postMessage({ id, problem: error.message ?? String(error) });
  }
};

/** Load the network of a pack. */
async function open({ description, threads }) {
  pack = description;
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
  const { file, step: stepFile } = pack.models.fp32;
  session = await opened(file);
  if (stepFile) stepSession = await opened(stepFile);
  return {};
}

async function opened(file) {
  const response = await fetch(`../${file}`);
  if (!response.ok) throw new Error(`The network is not there (${response.status}).`);
  return ort.InferenceSession.create(new Uint8Array(await response.arrayBuffer()), {
    executionProviders: ["wasm"],
    graphOptimizationLevel: "all",
  });
}

/** Run the network on an ImageBitmap, and close it. */
async function picture({ bitmap }) {
  const { width, height, crop } = fit(bitmap);
  if (context?.canvas.width !== width || context?.canvas.height !== height) {
    context = new OffscreenCanvas(width, height).getContext("2d", { alpha: false, willReadFrequently: true });
    context.imageSmoothingQuality = "high";
  }
  // Transparent parts become black, as in the server's decoder.
  context.clearRect(0, 0, width, height);
  context.drawImage(bitmap, ...crop, 0, 0, width, height);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  return { ...(await pixels({ data, width, height })), seen: { width, height } };
}

/** Size and crop of the network's input: the whole picture, downscaled if too large; for a fixed size, its centre. */
function fit(bitmap) {
  const { shape, max_shape: largest } = pack.inputs[0];
  if (shape[0] === null) {
    const scale = Math.min(1, largest[0] / bitmap.height, largest[1] / bitmap.width);
    const [width, height] = [bitmap.width, bitmap.height].map((extent) => Math.max(1, Math.floor(scale * extent)));
    return { width, height, crop: [0, 0, bitmap.width, bitmap.height] };
  }
  const [height, width] = shape;
  const scale = Math.min(bitmap.width / width, bitmap.height / height);
  const size = [scale * width, scale * height];
  return { width, height, crop: [(bitmap.width - size[0]) / 2, (bitmap.height - size[1]) / 2, ...size] };
}

/** Run the network on RGBA pixels, row by row; outputs of varying length are as those of `tensors`. */
async function pixels({ data, width, height }) {
  if (!isNamed(pack)) return run(tensorOf(data, width, height));
  const [{ name }] = pack.inputs;
  return runNamed({ [name]: { values: new Uint8Array(data.buffer), shape: [height, width, 4] } });
}

/** Run the network on the bytes of an array of its input's type. */
async function array({ bytes, shape }) {
  const { dtype } = pack.inputs[0];
  return run(new ort.Tensor(dtype, new ARRAYS[dtype](bytes.buffer), shape));
}

/** Run the network on its inputs by name, as the bytes and shape of each, without a batch dimension. */
async function tensors({ inputs }) {
  const named = pack.inputs.map(({ name, dtype }) => {
    const { bytes, shape } = inputs[name];
    return [name, { values: new ARRAYS[dtype](bytes.buffer), shape }];
  });
  return runNamed(Object.fromEntries(named));
}

/** Run the network on nested lists of numbers by name. */
async function json({ inputs }) {
  return runNamed(fromNumbers(pack.inputs, inputs));
}

/**
 * Run the network on `{ name: { values, shape } }`; the outputs are of the same form, without padding. Where answers take
 * steps, begin one: `{ run, ms }`.
 */
async function runNamed(inputs) {
  const shapes = Object.fromEntries(Object.entries(inputs).map(([name, { shape }]) => [name, shape]));
  const specs = pack.inputs.filter((spec) => !isRaw(spec));
  const lengths = lengthsOf(specs, shapes);
  const room = roomOf(specs, lengths);
  const feeds = Object.create(null);
  for (const { name, dtype } of pack.inputs.filter(isRaw)) {
    feeds[name] = new ort.Tensor(dtype, inputs[name].values, shapes[name]);
  }
  for (const spec of specs) {
    const { values, shape } = inputs[spec.name];
    checkNumbers(spec, values);
    const sizes = sizesOf(spec, room);
    feeds[spec.name] = new ort.Tensor(spec.dtype, reframe(values, shape, sizes), [1, ...sizes]);
  }
  for (const [name, length] of Object.entries(lengths)) feeds[name] = new ort.Tensor("int64", BigInt64Array.of(BigInt(length)), [1]);
  const began = performance.now();
  if (pack.generate) {
    answer = { run: (answer?.run ?? 0) + 1, generation: new Generation(pack, { begin: session, step: stepSession }, ort.Tensor) };
    const { run, generation } = answer;
    await generation.begin(feeds);
    return { run, ms: performance.now() - began };
  }
  const outputs = await session.run(feeds);
  const ms = performance.now() - began;
  // Dimensions that no input has are outputs of their own.
  const found = Object.fromEntries(Object.entries(outputs).map(([name, { data }]) => [name, Number(data[0])]));
  const named = pack.outputs.map((spec) => {
    const { data, dims } = outputs[spec.name];
    const shape = sizesOf(spec, { ...found, ...lengths });
    return [spec.name, { values: reframe(data, dims.slice(1), shape), shape }];
  });
  for (const tensor of Object.values(outputs)) tensor.dispose();
  return { outputs: Object.fromEntries(named), ms };
}

/** True where outputs are boxes or have lengths that vary, so that each is given with its shape. */
const isNamed = ({ shows, outputs }) => Boolean(shows) || outputs.some(({ shape }) => shape.some((size) => typeof size === "object"));

/** Take the next step of the answer that was begun as `run`: `{ outputs, ended, ms }`. */
async function step({ run }) {
  if (answer?.run !== run) throw new Error("Another answer was begun; begin this one again.");
  const began = performance.now();
  return { ...(await answer.generation.step()), ms: performance.now() - began };
}

/** True for an array of any size, which has no batch dimension. */
const isRaw = ({ max_shape: largest }) => Boolean(largest?.length);

async function run(input) {
  const began = performance.now();
  const outputs = await session.run({ [pack.inputs[0].name]: input });
  return { outputs: read(outputs), ms: performance.now() - began };
}

function tensorOf(data, width, height) {
  const { shape } = pack.inputs[0];
  const [anyHeight, , channels = 1] = shape;
  if (anyHeight === null) return new ort.Tensor("uint8", new Uint8Array(data.buffer), [height, width, 4]);
  const values = new Uint8Array(width * height * channels);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const rgb = data.subarray(4 * pixel, 4 * pixel + 3);
    if (channels === 3) values.set(rgb, 3 * pixel);
    else values[pixel] = Math.round(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]);
  }
  return new ort.Tensor("uint8", values, [1, ...shape]);
}

/** Run the network on a chunk of sound; return the new rows of its first output. */
async function sound({ samples, length, last }) {
  const {
    live,
    inputs: [input],
  } = pack;
  states ??= live.states.map(initialState);
  const feeds = {
    [input.name]: new ort.Tensor(input.dtype, samples, [1, ...input.shape]),
    [live.length]: new ort.Tensor("int64", BigInt64Array.of(BigInt(length)), [1]),
    [live.last]: new ort.Tensor("bool", Uint8Array.of(last ? 1 : 0), [1]),
  };
  live.states.forEach((state, index) => (feeds[state.input] = states[index]));
  const began = performance.now();
  const outputs = await session.run(feeds);
  const ms = performance.now() - began;
  states.forEach((state) => state.dispose());
  states = last ? null : live.states.map(({ output }) => outputs[output]);
  const rows = Number(outputs[live.output_length].data[0]);
  return { rows, values: outputs[pack.outputs[0].name].data, ms };
}

/** Reset the state for a new stream. */
async function reset() {
  states?.forEach((state) => state.dispose());
  states = null;
  return {};
}

function read(outputs) {
  const values = Object.fromEntries(pack.outputs.map(({ name }) => [name, outputs[name].data]));
  for (const tensor of Object.values(outputs)) tensor.dispose();
  return values;
}

/** A state tensor before a stream's first chunk. */
function initialState({ dtype, shape, initial }) {
  const values = new ARRAYS[dtype](shape.reduce((size, extent) => size * extent, 1));
  return new ort.Tensor(dtype, values.fill(dtype === "int64" ? BigInt(initial ?? 0) : (initial ?? 0)), shape);
}
