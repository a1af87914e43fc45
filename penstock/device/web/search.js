// Search in place: which of the pictures of an index is most like what is seen, by exact cosine.
// The index is not of the pack's version: the page keeps the latest one whole, and uses the kept one without a host.

const TOP = 5;
const NAME = `penstock-index ${new URL("../", location).href}`; // of the cache
const ROOT = new URL("../index/", location).href;

/** The index beside the pack, or null where there is none. Throws where it cannot be read. */
export async function openIndex({ outputs }) {
  if (!outputs.some(({ name }) => name === "embedding")) return null;
  const cache = (await bring()) ?? (await kept());
  if (!cache) return null;
  const items = await (await cache.match(`${ROOT}items.json`)).json();
  const vectors = readNpy(await (await cache.match(`${ROOT}vectors.npy`)).arrayBuffer());
  return vectors.rows === items.length ? new Index(cache, items, vectors) : null;
}

class Index {
  #urls = new Map();

  constructor(cache, items, vectors) {
    Object.assign(this, { cache, items, vectors });
  }

  /** The items that are most like it, best first; of equals, the first: `[{ item, cosine }]`. */
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

/** The cache of the host's index, whole; null where the host is not there or has none. */
async function bring() {
  try {
    const responses = await Promise.all(["items.json", "vectors.npy"].map(fetched));
    const bytes = await Promise.all(responses.map((response) => response.clone().arrayBuffer()));
    const name = `${NAME} ${await hashOf(bytes)}`;
    const cache = await caches.open(name);
    const items = await responses[0].clone().json();
    for (const { thumbnail } of items) {
      if (!(await cache.match(ROOT + thumbnail))) await cache.put(ROOT + thumbnail, await fetched(thumbnail));
    }
    await cache.put(`${ROOT}vectors.npy`, responses[1]);
    await cache.put(`${ROOT}items.json`, responses[0]); // last: with it, all is here
    for (const other of await names()) if (other !== name) await caches.delete(other);
    return cache;
  } catch (error) {
    if (error instanceof TypeError || error instanceof NoIndex) return null;
    throw error;
  }
}

async function kept() {
  for (const name of await names()) {
    const cache = await caches.open(name);
    if (await cache.match(`${ROOT}items.json`)) return cache;
  }
  return null;
}

const names = async () => (await caches.keys()).filter((name) => name.startsWith(`${NAME} `));

class NoIndex extends Error {}

async function fetched(path) {
  const response = await fetch(ROOT + path, { cache: "no-cache" });
  if (!response.ok) throw new NoIndex(`${path}: ${response.status}`);
  return response;
}

async function hashOf(parts) {
  const whole = await new Blob(parts).arrayBuffer();
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", whole));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
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
