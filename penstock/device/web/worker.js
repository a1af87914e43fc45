// Runs the network, apart from the page: frames and chunks of sound in, what it says out.

import * as ort from "./vendor/ort.wasm.min.mjs";

let pack = null;
let session = null;
let states = null; // of a live network, what it has heard so far
let context = null; // of the one canvas whose pixels are read

const asks = { open, picture, pixels, sound, silence };

self.onmessage = async ({ data: { id, ask, ...rest } }) => {
  try {
    self.postMessage({ id, answer: await asks[ask](rest) });
  } catch (error) {
    self.postMessage({ id, problem: error.message ?? String(error) });
  }
};

/** Loads the network of a pack. */
async function open({ description, threads }) {
  pack = description;
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
  const response = await fetch(`../${pack.models.fp32.file}`);
  if (!response.ok) throw new Error(`The network is not there (${response.status}).`);
  session = await ort.InferenceSession.create(new Uint8Array(await response.arrayBuffer()), {
    executionProviders: ["wasm"],
    graphOptimizationLevel: "all",
  });
  return {};
}

/** What the network says of an ImageBitmap, which is closed. */
async function picture({ bitmap }) {
  const { width, height } = bitmap;
  if (context?.canvas.width !== width || context?.canvas.height !== height) {
    context = new OffscreenCanvas(width, height).getContext("2d", { alpha: false, willReadFrequently: true });
  }
  // What shows through is black, as where the server decodes a picture.
  context.clearRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  return pixels({ data, width, height });
}

/** What the network says of RGBA pixels, row by row. */
async function pixels({ data, width, height }) {
  const input = new ort.Tensor("uint8", new Uint8Array(data.buffer), [height, width, 4]);
  const began = performance.now();
  const outputs = await session.run({ [pack.input.name]: input });
  return { outputs: read(outputs), ms: performance.now() - began };
}

/** What the network says of a chunk of sound: the rows of its first output that are new. */
async function sound({ samples, length, last }) {
  const { live } = pack;
  states ??= live.states.map(silent);
  const feeds = {
    [pack.input.name]: new ort.Tensor(pack.input.dtype, samples, [1, samples.length]),
    [live.length]: new ort.Tensor("int64", BigInt64Array.of(BigInt(length)), [1]),
    [live.last]: new ort.Tensor("bool", Uint8Array.of(last ? 1 : 0), [1]),
  };
  live.states.forEach(({ input }, index) => (feeds[input] = states[index]));
  const began = performance.now();
  const outputs = await session.run(feeds);
  const ms = performance.now() - began;
  states.forEach((state) => state.dispose());
  states = last ? null : live.states.map(({ output }) => outputs[output]);
  const rows = Number(outputs[live.output_length].data[0]);
  return { rows, values: outputs[pack.outputs[0].name].data, ms };
}

/** Another stream begins. */
async function silence() {
  states?.forEach((state) => state.dispose());
  states = null;
  return {};
}

function read(outputs) {
  const values = Object.fromEntries(pack.outputs.map(({ name }) => [name, outputs[name].data]));
  for (const tensor of Object.values(outputs)) tensor.dispose();
  return values;
}

const ARRAYS = {
  bool: Uint8Array,
  float32: Float32Array,
  float64: Float64Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
};

/** What a leaf of the state is before a stream's first chunk. */
function silent({ dtype, shape, initial }) {
  const values = new ARRAYS[dtype](shape.reduce((size, extent) => size * extent, 1));
  return new ort.Tensor(dtype, values.fill(dtype === "int64" ? BigInt(initial ?? 0) : (initial ?? 0)), shape);
}
