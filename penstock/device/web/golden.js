// The recorded examples of a pack, golden.safetensors: inputs, and the answers that were recorded of them.

import { ARRAYS, reframe, sizesOf } from "./tensors.js";

export const GOLDEN = "golden.safetensors";
const DTYPES = { BOOL: "bool", F32: "float32", F64: "float64", I8: "int8", I16: "int16", I32: "int32", I64: "int64", U8: "uint8", U16: "uint16", U32: "uint32", U64: "uint64" };
const HEAD_BYTES = 8;

/**
 * The examples `{ inputs, outputs }`, each `{ name: { values, shape } }` without padding, or null where the device does not
 * have them. Outputs of an answer that takes steps have its steps as their first dimension.
 */
export async function goldenOf(description) {
  const { files, inputs, outputs, answers, generate } = description;
  if (!files?.[GOLDEN]) return [];
  const response = await fetch(`../${GOLDEN}`);
  if (!response.ok) return null;
  const arrays = arraysOf(await response.arrayBuffer());
  const made = outputs.slice(0, answers ?? outputs.length);
  const count = Object.hasOwn(arrays, "raw.0") ? Object.keys(arrays).filter((name) => name.startsWith("raw.")).length : lengthOf(arrays);
  const steps = generate ? [{ name: "steps" }] : [];
  const whole = made.map((spec) => ({ ...spec, shape: [...steps, ...spec.shape] }));
  return Array.from({ length: count }, (_, at) => ({
    inputs: sideOf(arrays, "inputs", inputs, at),
    outputs: sideOf(arrays, "outputs", whole, at),
  }));
}

const lengthOf = (arrays) => Object.values(arrays)[0]?.shape[0] ?? 0;

/** The arrays of a safetensors file that a browser has types for, by name. */
function arraysOf(buffer) {
  const bytes = Number(new DataView(buffer).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, HEAD_BYTES, bytes)));
  const known = Object.entries(head).filter(([, { dtype }]) => dtype in DTYPES);
  return Object.fromEntries(
    known.map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
      const start = HEAD_BYTES + bytes;
      return [name, { values: new ARRAYS[DTYPES[dtype]](buffer.slice(start + from, start + to)), shape }];
    }),
  );
}

/** The tensors of one side of an example. */
function sideOf(arrays, side, specs, at) {
  if (side === "inputs" && Object.hasOwn(arrays, `raw.${at}`)) return { [specs[0].name]: arrays[`raw.${at}`] };
  if (Object.hasOwn(arrays, side)) return { [specs[0].name]: rowOf(arrays[side], at) };
  const dims = specs.flatMap(({ shape }) => shape.filter((size) => typeof size === "object"));
  const lengths = Object.fromEntries(dims.map(({ name }) => [name, Number(arrays[`${side}.${name}`].values[at])]));
  return Object.fromEntries(
    specs.map((spec) => {
      const { values, shape } = rowOf(arrays[`${side}.${spec.name}`], at);
      const sizes = sizesOf(spec, lengths);
      return [spec.name, { values: reframe(values, shape, sizes), shape: sizes }];
    }),
  );
}

function rowOf({ values, shape: [, ...shape] }, at) {
  const size = shape.reduce((product, extent) => product * extent, 1);
  return { values: values.slice(at * size, (at + 1) * size), shape };
}
