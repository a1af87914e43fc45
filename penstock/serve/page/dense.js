// A dense network: a picture of any size is cut into tiles, the server is asked for each, and the finds are marked.

import { element, sleep, write } from "./dom.js";
import { exampleButtons, examplesOf } from "./examples.js";
import { addCells, findsOf, isEmpty, tilesOf } from "./finds.js";
import { Overview, bitmapOf, noPicture, tileCutter } from "./overview.js";
import { Gone, Refusal, askTile } from "./server.js";
import { describe } from "./tensors.js";

const AT_ONCE = 4; // requests
const LONGEST_WAIT_MS = 5000;

/** The panel of an application with a dense network. */
export function densePanel(app, connection) {
  const marked = new MarkedPicture();
  const run = new TileRun(app, connection, marked);
  const file = element("input", { type: "file", id: "file", accept: "image/*" });
  file.addEventListener("change", () => file.files.length && run.file(file.files[0]));
  const specs = app.inputs.map((spec) => element("p", { className: "spec" }, describe(spec)));
  const side = element("div", {}, ...specs, element("label", { htmlFor: "file" }, "A picture of any size, which is cut into tiles"), file);
  examplesOf(app).then((examples) => examples.length && side.append(exampleButtons(app, examples, (example) => run.tile(example))));
  const command = `penstock tiles ${new URL(".", document.baseURI).href.replace(/\/$/, "")} slide.svs --overview finds.png`;
  const shell = element("details", { className: "shell" }, element("summary", {}, "A slide from a shell"), element("code", { tabIndex: 0 }, command));
  return element("div", { className: "try" }, side, marked.view, shell);
}

/** The overview with a circle around each find, and the list of them. */
class MarkedPicture {
  constructor() {
    this.message = element("p", { className: "message", role: "status" });
    this.time = element("p", { className: "answer-time" }, "The answer comes here.");
    const canvas = element("canvas", { className: "boxed", role: "img", hidden: true });
    const list = element("ol", { className: "finds", tabIndex: 0, aria: { label: "Finds" } });
    this.overview = new Overview(canvas, list);
    this.view = element("div", { className: "answer" }, this.message, this.time, canvas, list);
  }

  /** Begins with a picture; `bitmap` may be a canvas. */
  begin(bitmap) {
    this.overview.begin(bitmap);
    this.say("");
  }

  show(finds) {
    this.overview.show(finds);
  }

  say(sentence) {
    write(this.message, sentence);
  }
}

/** Runs one picture at a time; another one ends it. */
class TileRun {
  #turn = 0;

  constructor(app, connection, marked) {
    Object.assign(this, { app, connection, marked });
    this.tileSize = app.input.shape.slice(0, 2);
  }

  /** A file that the browser decodes. */
  async file(file) {
    const mine = ++this.#turn;
    const bitmap = await bitmapOf(file);
    if (mine !== this.#turn) return bitmap?.close();
    if (bitmap === null) return this.marked.say(noPicture(file));
    this.marked.begin(bitmap);
    const { width, height } = bitmap;
    const { margin } = this.app.dense;
    const places = tilesOf(width, height, this.tileSize, margin);
    await this.#run(mine, places, tileCutter(bitmap, this.tileSize, margin), width, height);
    bitmap.close();
  }

  /** A recorded tile, as it is. */
  async tile({ numbers }) {
    const mine = ++this.#turn;
    const [height, width] = this.tileSize;
    const pixels = Uint8Array.from(numbers[this.app.input.name].flat(Infinity));
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext("2d").putImageData(new ImageData(rgbaOf(pixels), width, height), 0, 0);
    this.marked.begin(canvas);
    const { margin } = this.app.dense;
    await this.#run(mine, [{ left: margin, top: margin }], () => pixels, width, height);
  }

  async #run(mine, places, pixelsAt, width, height) {
    const { app, marked } = this;
    const start = performance.now();
    const cells = [];
    let [next, done, empty] = [0, 0, 0];
    const work = async () => {
      while (mine === this.#turn && next < places.length) {
        const place = places[next++];
        const pixels = pixelsAt(place);
        if (isEmpty(app.dense, pixels, this.tileSize)) empty++;
        else addCells(cells, app.dense, await this.#ask(mine, pixels), app.output.shape[1], place.left, place.top);
        if (mine === this.#turn) write(marked.time, `${(++done).toLocaleString("en")} of ${places.length.toLocaleString("en")} tiles`);
      }
    };
    try {
      await Promise.all(Array.from({ length: AT_ONCE }, work));
    } catch (error) {
      if (mine !== this.#turn) return;
      this.#turn++; // the other requests of this picture are of no use any more
      marked.say(error.message);
      return;
    }
    if (mine !== this.#turn) return;
    const seconds = ((performance.now() - start) / 1000).toFixed(1);
    const tiles = `${places.length.toLocaleString("en")} ${places.length === 1 ? "tile" : "tiles"}`;
    write(marked.time, `${tiles}, ${empty.toLocaleString("en")} of them empty, ${seconds} s`);
    marked.show(findsOf(app.dense, cells.filter(({ x, y }) => x < width && y < height)));
  }

  /** The map of a tile; asks again while the server is gone or refuses for now. */
  async #ask(mine, pixels) {
    for (;;) {
      try {
        const map = await askTile(this.app, pixels);
        if (mine === this.#turn) this.marked.say("");
        return map;
      } catch (error) {
        if (mine !== this.#turn) return [];
        if (error instanceof Gone) {
          this.connection.lost();
          this.marked.say("No answer; asking again when the server is back.");
          await this.connection.back();
        } else if (error instanceof Refusal && error.status === 503) {
          this.marked.say(`Refused: ${error.message} Asking again.`);
          await sleep(Math.min(error.retryAfterMs || 1000, LONGEST_WAIT_MS));
        } else throw error;
      }
    }
  }
}

function rgbaOf(rgb) {
  const rgba = new Uint8ClampedArray((rgb.length / 3) * 4).fill(255);
  for (let from = 0, to = 0; from < rgb.length; from += 3, to += 4) rgba.set(rgb.subarray(from, from + 3), to);
  return rgba;
}
