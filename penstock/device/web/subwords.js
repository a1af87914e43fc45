// Subword tokens by byte-pair encoding. The same as in penstock/core/subwords.py, which has the method in words.

const BYTES = 256;
const MAX_PIECE = 64;
const SURROGATES = /[\uD800-\uDFFF]/u;
// White space as Python has it; that of JavaScript is another one.
const WHITE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u;
const LETTER = /^[\p{L}\p{M}]$/u;

export class Subwords {
  #texts; // UTF-8 of each token that has a text
  #numbers; // token of each character
  #pairs = new Map(); // token of each pair of tokens

  constructor({ special, characters, merges }) {
    if (!Number.isSafeInteger(special) || special < 0 || typeof characters !== "string" || !Array.isArray(merges)) {
      throw new Error("The vocabulary lacks special, characters or merges; export the bundle again.");
    }
    this.special = special;
    const single = [...characters];
    const joined = merges.map((line) => line.split("\t"));
    const encoder = new TextEncoder();
    const bytes = Array.from({ length: BYTES }, (_, byte) => Uint8Array.of(byte));
    this.#texts = [...bytes, ...[...single, ...joined.map((pair) => pair.join(""))].map((text) => encoder.encode(text))];
    this.#numbers = new Map(single.map((character, place) => [character, special + BYTES + place]));
    const known = new Map(this.#numbers);
    joined.forEach(([one, other], place) => {
      const number = special + BYTES + single.length + place;
      this.#pairs.set(this.#key(known.get(one), known.get(other)), number);
      if (!known.has(one + other)) known.set(one + other, number);
    });
  }

  /** The tokens of a text, without special ones. */
  encode(text) {
    return pieces(text).flatMap((piece) => this.#merged(piece));
  }

  /** The text of tokens; special ones are left out. */
  decode(tokens) {
    const parts = this.parts();
    return `${tokens.map((token) => parts.next(token)).join("")}${parts.end()}`;
  }

  /** Texts of tokens as they come: `next(token)`, and `end()` for the rest. */
  parts() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    let isFirst = true;
    const next = (token) => {
      const bytes = this.#texts[token - this.special] ?? new Uint8Array();
      const text = decoder.decode(bytes, { stream: true });
      const part = isFirst && text.startsWith(" ") ? text.slice(1) : text;
      isFirst &&= !text;
      return part;
    };
    return { next, end: () => decoder.decode() };
  }

  #key(one, other) {
    return one * (this.special + this.#texts.length) + other;
  }

  #merged(piece) {
    const tokens = [];
    for (const character of piece) {
      const number = this.#numbers.get(character);
      if (number !== undefined) tokens.push(number);
      else tokens.push(...Array.from(new TextEncoder().encode(character), (byte) => this.special + byte));
    }
    while (tokens.length > 1) {
      const joined = tokens.slice(1).map((token, place) => this.#pairs.get(this.#key(tokens[place], token)) ?? Infinity);
      const first = Math.min(...joined);
      if (first === Infinity) break;
      tokens.splice(joined.indexOf(first), 2, first);
    }
    return tokens;
  }
}

/** The tokens of a text; throws if there are none or too many. */
export function toTokens(text, { max_tokens: most }, subwords) {
  if (SURROGATES.test(text)) throw new Error("The text holds half of a surrogate pair; send whole characters.");
  const tokens = subwords.encode(text);
  if (!tokens.length) throw new Error("The text is empty; send at least one word.");
  if (tokens.length > most) {
    const [size, limit] = [tokens.length, most].map((count) => count.toLocaleString("en"));
    throw new Error(`The text has ${size} tokens; send at most ${limit}. Split it.`);
  }
  return tokens;
}

/** The tokens of the best beam of a search, from those of each step; the same as in penstock/core/beams.py. */
export function bestBeam(steps) {
  let beam = 0;
  const found = steps.toReversed().map(({ tokens, parents }) => {
    const token = Number(tokens[beam]);
    beam = Number(parents[beam]);
    return token;
  });
  return found.reverse();
}

/** The pieces of a text that tokens do not cross. */
function pieces(text) {
  const words = text.normalize("NFC").split(WHITE).filter(Boolean);
  const characters = [...` ${words.join(" ")}`];
  const isLetter = characters.map((character) => LETTER.test(character));
  const found = [];
  let begin = 0;
  characters.forEach((character, place) => {
    const isSpaceAlone = place - begin === 1 && characters[begin] === " ";
    if (place === begin || (character !== " " && isSpaceAlone)) return;
    if (isLetter[place] && isLetter[place - 1] && place - begin < MAX_PIECE) return;
    found.push(characters.slice(begin, place));
    begin = place;
  });
  return words.length ? [...found, characters.slice(begin)] : [];
}
