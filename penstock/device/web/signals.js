// A whole signal through a live network, chunk by chunk.

/** Yield `{ rows, values, ms }` of each chunk of `{ values, shape }`, frames first. */
export async function* overSignal(engine, { outputs: [spec], live }, { values, shape }) {
  const [frames, ...rest] = shape;
  const size = rest.reduce((product, extent) => product * extent, 1);
  await engine.reset();
  for (let from = 0; from === 0 || from < frames; from += live.chunk) {
    const length = Math.min(live.chunk, frames - from);
    const samples = new values.constructor(live.chunk * size);
    samples.set(values.subarray(from * size, (from + length) * size));
    const { rows, values: made, ms } = await engine.sound(samples, length, from + live.chunk >= frames);
    yield { rows, values: made.subarray(0, (rows * made.length) / spec.shape[0]), ms };
  }
}

/** The rows of all chunks as one tensor. */
export function joined({ dtype, shape: [, ...shape] }, parts) {
  const numbers = parts.flatMap(({ values }) => Array.from(values));
  const rows = parts.reduce((sum, part) => sum + part.rows, 0);
  const isWide = dtype === "int64" || dtype === "uint64";
  return { values: isWide ? BigInt64Array.from(numbers) : Float64Array.from(numbers), shape: [rows, ...shape] };
}
