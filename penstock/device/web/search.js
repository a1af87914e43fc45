// Search the index for the most similar pictures, by exact cosine.
// The index is versioned apart from the pack: the page caches the latest one, and uses the cached one offline.

import { sha256 } from "./hash.js";

const TOP = 5;
const NAME = `penstock-index ${new URL("../", location).href}`; // of the cache
const ROOT = new URL("../index/", location).href;

/** Open the index beside the pack; null if there is none. Throws if another network made it. */
export async function openIndex({ outputs, models, files }) {
  if (!outputs.some(({ name }) => name === "embedding")) return null;
  const model = files[models.fp32.file].sha256;
  const cache = (await download(model)) ?? (await kept(model));
  if (!cache) return null;
  const items = await (await cache.match(`${ROOT}items.json`)).json();
  const vectors = readNpy(await (await cache.match(`${ROOT}vectors.npy`)).arrayBuffer());
  if (vectors.rows !== items.length) throw new Error("it does not hold a vector for each picture; make it again.");
  return new Index(cache, items, vectors);
}

class Index {
  #urls = new Map();

  constructor(cache, items, vectors) {
    Object.assign(this, { cache, items, vectors });
  }

  /** The most similar items, best first; equals in order: `[{ item, cosine }]`. */
  search(embedding) {
    const { values, rows, columns } = this.vectors;
    const length = Math.hypot(...embedding) || 1;
    const cosines = new Float64Array(rows);
    for (let row = 0; row < rows; row++) {
      let sum = 0;
      for (let column = 0; column < columns; column++) sum += values[row * columns + column] * embedding[column];
      cosines[row] = sum / length;
    }
    const order = Array.from(cosines.keys()).sort((a, b) => cosines[b] - cosines[a] || a - b);
    return order.slice(0, TOP).map((row) => ({ item: this.items[row], cosine: cosines[row] }));
  }

  async thumbnail(item) {
    if (!this.#urls.has(item)) {
      const blob = await (await this.cache.match(ROOT + item.thumbnail)).blob();
      this.#urls.set(item, URL.createObjectURL(blob));
    }
    return this.#urls.get(item);
  }
}

/** Download the host's index into a cache; null if the host is unreachable or has none. */
async function download(model) {
  try {
    const about = await fetched("index.json");
    const name = `${NAME} ${await sha256(await about.clone().arrayBuffer())}`;
    const cache = await caches.open(name);
    if (await cache.match(`${ROOT}index.json`)) return cache;
    const { model: made, sha256: hashes } = await about.clone().json();
    if (made !== model) throw new Error("it was made by another network; make it again with this pack.");
    for (const file of ["items.json", "vectors.npy"]) await keep(cache, file, hashes[file]);
    const items = await (await cache.match(`${ROOT}items.json`)).json();
    for (const { thumbnail } of items) await keep(cache, thumbnail);
    await cache.put(`${ROOT}index.json`, about); // last, because it marks the index as complete
    for (const other of await names()) if (other !== name) await caches.delete(other);
    return cache;
  } catch (error) {
    if (error instanceof NotThere) return null;
    throw error;
  }
}

async function keep(cache, path, hash = null) {
  if (hash === null && (await cache.match(ROOT + path))) return;
  const response = await fetched(path);
  if (hash !== null && (await sha256(await response.clone().arrayBuffer())) !== hash) {
    throw new Error(`index/${path} does not match index.json: its hash differs.`);
  }
  await cache.put(ROOT + path, response);
}

/** The cache of a complete index of this network; null if there is none. */
async function kept(model) {
  for (const name of await names()) {
    const cache = await caches.open(name);
    const about = await cache.match(`${ROOT}index.json`);
    if (about && (await about.json()).model === model) return cache;
  }
  return null;
}

const names = async () => (await caches.keys()).filter((name) => name.startsWith(`${NAME} `));

/** The host is unreachable, or has no such file. */
class NotThere extends Error {}

async function fetched(path) {
  const response = await fetch(ROOT + path, { cache: "no-cache" }).catch(() => null);
  if (!response?.ok) throw new NotThere();
  return response;
}

/** A NumPy file of float32, `[rows, columns]` in C order, version 1 or 2. */
export function readNpy(buffer) {
  const view = new DataView(buffer);
  const wide = view.getUint8(6) >= 2;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const begin = (wide ? 12 : 10) + length;
  const header = new TextDecoder("latin1").decode(buffer.slice(wide ? 12 : 10, begin));
  const shape = header.match(/'shape': \((\d+), (\d+)\)/);
  if (!shape || !header.includes("'<f4'") || !header.includes("'fortran_order': False")) {
    throw new Error("index/vectors.npy is not float32 [pictures, features]; make the index again.");
  }
  const [rows, columns] = [Number(shape[1]), Number(shape[2])];
  return { values: new Float32Array(buffer, begin, rows * columns), rows, columns };
}
