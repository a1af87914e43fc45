// A picture of any size: its tiles, and an overview with a circle around each find and a list of them.

import { element } from "./dom.js";

const MAX_PIXELS = 1 << 27; // what browsers decode
const LONGEST_SIDE = 2048;
const MAX_LISTED = 200;
const MAX_READ_OUT = 5;
const [RADIUS, MIN_RADIUS] = [40, 6]; // of the picture, of the overview
const COLOURS = ["#00c83c", "#1e6eff", "#ff8c00", "#dc1ec8", "#00bec8"];

/** The bitmap of a file; null if a browser cannot read it. */
export async function bitmapOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (bitmap === null || bitmap.width * bitmap.height <= MAX_PIXELS) return bitmap;
  bitmap.close();
  return null;
}

/** Why a file has no bitmap. */
export const noPicture = (file) => `${file.name} is no picture of up to ${MAX_PIXELS.toLocaleString("en")} pixels that a browser reads; use penstock tiles for slides.`;

/** A function that gives the pixels of a tile; what lies outside of the picture is white. */
export function tileCutter(bitmap, [height, width], margin) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  return ({ left, top }) => {
    context.fillStyle = "white";
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, margin - left, margin - top);
    return rgbOf(context.getImageData(0, 0, width, height).data);
  };
}

/** The overview, on a canvas and in a list. */
export class Overview {
  constructor(canvas, list) {
    Object.assign(this, { canvas, list });
  }

  /** Begins with a picture; `bitmap` may be a canvas. */
  begin(bitmap) {
    this.reduction = Math.max(1, Math.max(bitmap.width, bitmap.height) / LONGEST_SIDE);
    this.canvas.width = Math.max(1, Math.round(bitmap.width / this.reduction));
    this.canvas.height = Math.max(1, Math.round(bitmap.height / this.reduction));
    this.canvas.getContext("2d").drawImage(bitmap, 0, 0, this.canvas.width, this.canvas.height);
    this.canvas.setAttribute("aria-label", "The picture");
    this.canvas.hidden = false;
    this.list.replaceChildren();
  }

  show(finds) {
    const context = this.canvas.getContext("2d");
    for (const { kind, x, y } of finds) {
      context.strokeStyle = COLOURS[kind % COLOURS.length];
      context.lineWidth = 2;
      context.beginPath();
      context.arc(x / this.reduction, y / this.reduction, Math.max(MIN_RADIUS, RADIUS / this.reduction), 0, 2 * Math.PI);
      context.stroke();
    }
    const words = finds.slice(0, MAX_LISTED).map(({ label, score, x, y }) => `${label} ${score.toFixed(2)} at ${x.toFixed(0)}, ${y.toFixed(0)}`);
    const more = finds.length > MAX_LISTED ? [`… and ${(finds.length - MAX_LISTED).toLocaleString("en")} more`] : [];
    this.list.replaceChildren(...[...words, ...more].map((text) => element("li", {}, text)));
    const marked = `The picture with ${finds.length} marked: ${words.slice(0, MAX_READ_OUT).join("; ")}`;
    this.canvas.setAttribute("aria-label", finds.length ? marked : "The picture: nothing was found");
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
