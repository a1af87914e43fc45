// Panel of a dense network: a picture of any size, tile by tile on this device, with its finds marked.

import { byId, element, write } from "./dom.js";
import { addCells, findsOf, isEmpty, tilesOf } from "./finds.js";

const MOST_PIXELS = 1 << 27; // what browsers decode
const OVERVIEW = 2048; // longest side
const MOST_LISTED = 200;
const COLOURS = ["#00c83c", "#1e6eff", "#ff8c00", "#dc1ec8", "#00bec8"];

export class Tiling {
  #newest = 0; // number of the latest picture

  constructor(description, engine) {
    Object.assign(this, { description, engine });
    this.file = element("input", { type: "file", id: "slide-file", accept: "image/*" });
    this.state = element("p", { id: "slide-state", role: "status" });
    this.canvas = element("canvas", { id: "slide-picture", hidden: true });
    this.canvas.setAttribute("role", "img");
    this.canvas.style.maxWidth = "100%";
    this.list = element("ol", { id: "slide-finds", className: "words" });
    this.list.setAttribute("aria-label", "Finds");
  }

  async begin(opened) {
    const label = element("label", { htmlFor: "slide-file" }, "A picture of any size, which is cut into tiles");
    byId("type").after(element("section", { id: "slide" }, label, this.file, this.state, this.canvas, this.list));
    await opened;
    this.file.addEventListener("change", () => this.file.files.length && this.run(this.file.files[0]));
    if (this.file.files.length) await this.run(this.file.files[0]);
  }

  /** Run the tiles of a file one after another; another file ends it. */
  async run(file) {
    const mine = ++this.#newest;
    const bitmap = await createImageBitmap(file).catch(() => null);
    if (mine !== this.#newest) return;
    if (!bitmap || bitmap.width * bitmap.height > MOST_PIXELS) {
      return write(this.state, `${file.name} is no picture of up to ${MOST_PIXELS.toLocaleString("en")} pixels that a browser reads; use penstock tiles for slides.`);
    }
    this.#begin(bitmap);
    const { width, height } = bitmap;
    try {
      const cells = await this.#cells(mine, bitmap);
      if (mine === this.#newest) this.#show(findsOf(this.description.dense, cells.filter(({ x, y }) => x < width && y < height)));
    } catch (error) {
      if (mine === this.#newest) write(this.state, error.message);
    } finally {
      bitmap.close();
    }
  }

  async #cells(mine, bitmap) {
    const { dense, inputs: [input], outputs: [output] } = this.description;
    const [height, width] = input.shape;
    const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    const places = tilesOf(bitmap.width, bitmap.height, [height, width], dense.margin);
    const cells = [];
    for (const [done, { left, top }] of places.entries()) {
      context.fillStyle = "white"; // outside of the picture
      context.fillRect(0, 0, width, height);
      context.drawImage(bitmap, dense.margin - left, dense.margin - top);
      const pixels = rgbOf(context.getImageData(0, 0, width, height).data);
      if (!isEmpty(dense, pixels, [height, width])) {
        const { outputs } = await this.engine.array(pixels, [1, height, width, 3]);
        addCells(cells, dense, Array.from(outputs[output.name]), output.shape[1], left, top);
      }
      if (mine !== this.#newest) return [];
      write(this.state, `${(done + 1).toLocaleString("en")} of ${places.length.toLocaleString("en")} tiles`);
    }
    return cells;
  }

  #begin(bitmap) {
    this.reduction = Math.max(1, Math.max(bitmap.width, bitmap.height) / OVERVIEW);
    this.canvas.width = Math.max(1, Math.round(bitmap.width / this.reduction));
    this.canvas.height = Math.max(1, Math.round(bitmap.height / this.reduction));
    this.canvas.getContext("2d").drawImage(bitmap, 0, 0, this.canvas.width, this.canvas.height);
    this.canvas.setAttribute("aria-label", "The picture");
    this.canvas.hidden = false;
    this.list.replaceChildren();
  }

  #show(finds) {
    const context = this.canvas.getContext("2d");
    const radius = Math.max(6, 40 / this.reduction);
    for (const { kind, x, y } of finds) {
      context.strokeStyle = COLOURS[kind % COLOURS.length];
      context.lineWidth = 2;
      context.beginPath();
      context.arc(x / this.reduction, y / this.reduction, radius, 0, 2 * Math.PI);
      context.stroke();
    }
    const words = finds.slice(0, MOST_LISTED).map(({ label, score, x, y }) => `${label} ${score.toFixed(2)} at ${x.toFixed(0)}, ${y.toFixed(0)}`);
    const more = finds.length > MOST_LISTED ? [`… and ${(finds.length - MOST_LISTED).toLocaleString("en")} more`] : [];
    this.list.replaceChildren(...[...words, ...more].map((text) => element("li", {}, text)));
    this.canvas.setAttribute("aria-label", finds.length ? `The picture with ${finds.length} marked` : "The picture: nothing was found");
  }
}

function rgbOf(rgba) {
  const rgb = new Uint8Array((rgba.length / 4) * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4) {
    rgb[to++] = rgba[from];
    rgb[to++] = rgba[from + 1];
    rgb[to++] = rgba[from + 2];
  }
  return rgb;
}
