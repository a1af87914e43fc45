// Named tensors of a pack: JSON to typed arrays, lengths, padding.
// The checks and their sentences are those of penstock/core/record.py and penstock/core/spec.py.

export const ARRAYS = {
  bool: Uint8Array,
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
};

// Exporters take a length of 1 for a constant, so that shorter tensors are padded to this.
const SHORTEST_ROOM = 2;

const varies = (size) => typeof size === "object";
const dimsOf = (specs) => specs.flatMap(({ shape }) => shape.filter(varies));
const product = (sizes) => sizes.reduce((size, extent) => size * extent, 1);
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 20 });
const listed = (names) => names.map((name) => `'${name}'`).join(", ");
const hasDefault = (spec) => typeof spec.default === "number";
const list = (sizes) => `[${sizes.map((size) => size ?? "any").join(", ")}]`;

/** Required names, and those that may be left out. */
function wanted(names, optional) {
  const [required, options] = [names.filter((name) => !optional.includes(name)), optional].map(listed);
  return required && options ? `${required} and, optionally, ${options}` : required || options;
}

/** The tensor of an input that is left out, of a fixed size. */
function filled({ dtype, shape, default: number }) {
  const values = new ARRAYS[dtype](product(shape));
  return { values: values.fill(values instanceof BigInt64Array || values instanceof BigUint64Array ? BigInt(number) : number), shape };
}

/** `int64[tokens<=512]`. */
export function describe({ dtype, shape }) {
  return `${dtype}${list(shape.map((size) => (varies(size) ? `${size.name}<=${size.max}` : size)))}`;
}

/** Make the inputs `{ name: { values, shape } }` of nested lists of numbers by name. */
export function fromNumbers(specs, given) {
  const names = specs.map(({ name }) => name);
  const optional = specs.filter(hasDefault).map(({ name }) => name);
  if (typeof given !== "object" || given === null || Array.isArray(given)) {
    throw new Error(`The input is ${kind(given)}; it must have ${wanted(names, optional)} by name.`);
  }
  const unknown = Object.keys(given).find((name) => !names.includes(name));
  if (unknown !== undefined) throw new Error(`There is no input '${unknown.slice(0, 80)}'; there is ${listed(names)}.`);
  const missing = names.find((name) => !Object.hasOwn(given, name) && !optional.includes(name));
  if (missing !== undefined) throw new Error(`The input '${missing}' is missing; send ${wanted(names, optional)}.`);
  const present = specs.filter(({ name }) => Object.hasOwn(given, name));
  const odd = present.find(({ name, shape }) => shape.length && ["null", "a string", "an object"].includes(kind(given[name])));
  if (odd) throw new Error(`${odd.name} is ${kind(given[odd.name])}; it must be ${describe(odd)}.`);
  const shapes = Object.fromEntries(present.map((spec) => [spec.name, nestedShape(given[spec.name], spec)]));
  const lengths = lengthsOf(present, shapes);
  return Object.fromEntries(
    specs.map((spec) => {
      if (!present.includes(spec)) return [spec.name, filled(spec)];
      const shape = sizesOf(spec, lengths);
      return [spec.name, { values: typed({ ...spec, shape }, flat({ ...spec, shape }, given[spec.name])), shape }];
    }),
  );
}

/**
 * The length of each dimension that varies, by name; throws if a shape does not fit, or two tensors disagree.
 * A size of null is unknown: other tensors tell it, else it is the smallest.
 */
export function lengthsOf(specs, shapes) {
  // Without a prototype, because any identifier can be a name, such as "constructor".
  const lengths = Object.create(null);
  const first = Object.create(null);
  for (const spec of specs) {
    const { name } = spec;
    const shape = shapes[name];
    if (shape.length !== spec.shape.length) {
      const dimensions = `${shape.length} dimension${shape.length === 1 ? "" : "s"}`;
      throw new Error(`${name} has ${dimensions}, ${list(shape)}; it must be ${describe(spec)}.`);
    }
    spec.shape.forEach((expected, axis) => {
      const size = shape[axis];
      if (!varies(expected)) {
        if (size !== expected) throw new Error(`${name} has shape ${list(shape)}; it must be ${describe(spec)}.`);
        return;
      }
      if (size === null) return;
      const dim = expected.name;
      if (size < expected.min || size > expected.max) {
        throw new Error(`${name} has ${number(size)} ${dim}; it must have from ${number(expected.min)} to ${number(expected.max)}.`);
      }
      first[dim] ??= name;
      lengths[dim] ??= size;
      if (lengths[dim] !== size) {
        throw new Error(`${name} has ${number(size)} ${dim} and ${first[dim]} has ${number(lengths[dim])}; send both equally long.`);
      }
    });
  }
  for (const { name, min } of dimsOf(specs)) lengths[name] ??= min;
  return lengths;
}

/** Throw if a number is NaN or infinite, or beyond the limits of its spec. */
export function checkNumbers({ name, dtype, limits }, values) {
  if (dtype.startsWith("float") && !values.every(Number.isFinite)) {
    throw new Error(`${name} holds NaN or infinity; every number must be finite.`);
  }
  if (!limits) return;
  const [low, high] = limits;
  const beyond = values.find((value) => value < low || value > high);
  if (beyond !== undefined) {
    throw new Error(`${name} holds ${beyond}; it must be from ${number(low)} to ${number(high)}.`);
  }
}

/** The shape of a tensor at some lengths. */
export function sizesOf({ shape }, lengths) {
  return shape.map((size) => (varies(size) ? lengths[size.name] : size));
}

/** The lengths at which a graph is run, by name. */
export function roomOf(specs, lengths) {
  return Object.fromEntries(dimsOf(specs).map(({ name, max }) => [name, Math.min(max, Math.max(SHORTEST_ROOM, lengths[name]))]));
}

/** Copy an array of one shape to another shape of as many dimensions: cut, or padded with zeros. */
export function reframe(values, from, to) {
  if (from.every((size, axis) => size === to[axis])) return values;
  const made = new values.constructor(product(to));
  const copy = (axis, source, target) => {
    const common = Math.min(from[axis], to[axis]);
    if (axis === from.length - 1) return made.set(values.subarray(source, source + common), target);
    for (let at = 0; at < common; at++) {
      copy(axis + 1, source + at * product(from.slice(axis + 1)), target + at * product(to.slice(axis + 1)));
    }
  };
  copy(0, 0, 0);
  return made;
}

/** Nested lists of the numbers of a tensor as text, whole numbers of 64 bits exactly. */
export function toText(values, shape, write = String) {
  if (!shape.length) return write(values[0]);
  const [rows, ...rest] = shape;
  const size = product(rest);
  const items = rest.length
    ? Array.from({ length: rows }, (_, row) => toText(values.subarray(row * size, (row + 1) * size), rest, write))
    : Array.from(values, (value) => write(value));
  return `[${items.join(",")}]`;
}

/** The function that writes a number of a dtype in the fewest digits that are read as the same number. */
export function exactly(dtype) {
  if (dtype !== "float32") return String;
  return (value) => {
    const few = [6, 7, 8].map((digits) => Number(value.toPrecision(digits))).find((number) => Math.fround(number) === value);
    return String(few ?? value);
  };
}

function nestedShape(given, spec) {
  const shape = [];
  for (let level = given; Array.isArray(level); level = level[0]) {
    shape.push(level.length);
    if (!level.length || shape.length > spec.shape.length) break;
  }
  // An empty list has no inner sizes to look at.
  const inner = shape.at(-1) === 0 ? spec.shape.slice(shape.length).map((size) => (varies(size) ? null : size)) : [];
  return [...shape, ...inner];
}

function flat(spec, given) {
  const wanted = spec.shape.length ? `nested lists of shape ${list(spec.shape)}` : "one number";
  const wrong = (item, belongs) => {
    const found = Array.isArray(item) ? `a list of ${number(item.length)}` : kind(item);
    throw new Error(`${spec.name} has ${found} where ${belongs}; it must be ${wanted}.`);
  };
  let level = [given];
  for (const size of spec.shape) {
    const at = level.findIndex((item) => !Array.isArray(item) || item.length !== size);
    if (at >= 0) wrong(level[at], `a list of ${number(size)} belongs`);
    level = level.flat();
  }
  const deeper = level.find(Array.isArray);
  if (deeper) wrong(deeper, "a number belongs");
  const taken = spec.dtype === "bool" ? ["number", "boolean"] : ["number"];
  const others = new Set(level.filter((item) => !taken.includes(typeof item)).map(kind));
  if (others.size) {
    throw new Error(`${spec.name} holds ${[...others].sort().join(", ")}, not only numbers; it must be ${describe(spec)}.`);
  }
  return level.map(Number);
}

function typed(spec, numbers) {
  const { name, dtype } = spec;
  const Kind = ARRAYS[dtype];
  const fits = fitting(dtype);
  const wrong = numbers.findIndex((value) => !fits(value));
  if (wrong >= 0) throw new Error(`${name} holds ${shown(numbers[wrong])}; it must be ${taken(spec)}.`);
  const isWide = Kind === BigInt64Array || Kind === BigUint64Array;
  if (isWide && !numbers.every(Number.isSafeInteger)) {
    const most = number(Number.MAX_SAFE_INTEGER);
    throw new Error(`${name} holds a number beyond ${most}, which a browser cannot read exactly; run the pack in Python for it.`);
  }
  const values = Kind.from(isWide ? numbers.map(BigInt) : numbers);
  checkNumbers(spec, values);
  return values;
}

/** A function that tells whether a dtype can hold a number as it is (floats may round). */
function fitting(dtype) {
  if (dtype === "bool") return (value) => value === 0 || value === 1;
  if (dtype === "float32") return (value) => Number.isFinite(Math.fround(value));
  if (dtype === "float64") return Number.isFinite;
  const bits = Number(dtype.match(/\d+$/)[0]);
  const [low, high] = dtype.startsWith("u") ? [0, 2 ** bits - 1] : [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1];
  return (value) => Number.isInteger(value) && value >= low && value <= high;
}

function taken({ dtype, limits }) {
  if (dtype === "bool") return "0 or 1";
  if (dtype.startsWith("float")) return `a finite number${dtype === "float32" ? " up to 3.4e+38" : ""}`;
  const bits = BigInt(dtype.match(/\d+$/)[0]);
  const [low, high] = limits ?? (dtype.startsWith("u") ? [0n, 2n ** bits - 1n] : [-(2n ** (bits - 1n)), 2n ** (bits - 1n) - 1n]);
  return `a whole number from ${number(low)} to ${number(high)}`;
}

/** A number as `shown_number` of Python writes it. */
function shown(value) {
  const size = Math.abs(value);
  if (Number.isNaN(value)) return "nan";
  if (size === Infinity) return value > 0 ? "inf" : "-inf";
  if (value === 0 || (size >= 1e-4 && size < 1e15)) return String(value);
  return value.toExponential(3).replace(/e([+-])(\d)$/, "e$10$2");
}

/** The name of a JSON value's type, as Python has it. */
function kind(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  if (typeof value === "number") return Number.isInteger(value) ? "an integer" : "a float";
  return { string: "a string", boolean: "a bool", object: "an object" }[typeof value];
}
