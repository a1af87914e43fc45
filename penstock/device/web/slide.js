// Panel of a dense network: a picture of any size, tile by tile on this device, with its finds marked.

import { byId, element, write } from "./dom.js";
import { addCells, findsOf, isEmpty, tilesOf } from "./finds.js";
import { Overview, bitmapOf, noPicture, tileCutter } from "./overview.js";

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
    this.overview = new Overview(this.canvas, this.list);
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
    const bitmap = await bitmapOf(file);
    if (mine !== this.#newest) return bitmap?.close();
    if (bitmap === null) return write(this.state, noPicture(file));
    this.overview.begin(bitmap);
    const { width, height } = bitmap;
    try {
      const cells = await this.#cells(mine, bitmap);
      if (mine === this.#newest) this.overview.show(findsOf(this.description.dense, cells.filter(({ x, y }) => x < width && y < height)));
    } catch (error) {
      if (mine === this.#newest) write(this.state, error.message);
    } finally {
      bitmap.close();
    }
  }

  async #cells(mine, bitmap) {
    const { dense, inputs: [input], outputs: [output] } = this.description;
    const tileSize = input.shape.slice(0, 2);
    const pixelsAt = tileCutter(bitmap, tileSize, dense.margin);
    const places = tilesOf(bitmap.width, bitmap.height, tileSize, dense.margin);
    const cells = [];
    for (const [done, place] of places.entries()) {
      const pixels = pixelsAt(place);
      if (!isEmpty(dense, pixels, tileSize)) {
        const { outputs } = await this.engine.array(pixels, [1, ...tileSize, 3]);
        addCells(cells, dense, Array.from(outputs[output.name]), output.shape[1], place.left, place.top);
      }
      if (mine !== this.#newest) return [];
      write(this.state, `${(done + 1).toLocaleString("en")} of ${places.length.toLocaleString("en")} tiles`);
    }
    return cells;
  }
}
