// Text as the bytes of its UTF-8. The same as in penstock/core/texts/text.py.

const CONTINUES = 0x80;
const CONTINUES_MASK = 0xc0;
const SURROGATES = /[\uD800-\uDFFF]/u;

/** The bytes of a text in Unicode's composed form; throws if there are none or too many. */
export function toBytes(text, { max_bytes: most, cut }) {
  if (SURROGATES.test(text)) throw new Error("The text holds half of a surrogate pair; send whole characters.");
  const bytes = new TextEncoder().encode(text.normalize("NFC"));
  if (!bytes.length) throw new Error("The text is empty; send at least one character.");
  if (bytes.length <= most) return bytes;
  if (!cut) {
    const [size, limit] = [bytes.length, most].map((count) => count.toLocaleString("en"));
    throw new Error(`The text has ${size} bytes; at most ${limit} are taken. Split it.`);
  }
  let size = most;
  while (size && (bytes[size] & CONTINUES_MASK) === CONTINUES) size--;
  return bytes.subarray(0, size);
}

/** The text of an example's bytes. */
export function fromBytes(bytes) {
  return new TextDecoder().decode(Uint8Array.from(bytes));
}
