// The answers of a detector: what was found in words, and boxes drawn over the frame that they belong to.
// `found` and `sentence` are the same as in penstock/core/pictures/boxes.py; shared examples test both.

import { byId, element, percent, write } from "./dom.js";

const COLOURS = ["#ffd54a", "#4dd0e1", "#ff7ad9", "#9cff57", "#ff8a65", "#b39dff"];
const SHARE = 1 / 40; // height of the letters, as a share of the picture's longer side
const LEAST_LETTERS = 11;
const LONGEST_SIDE = 2048; // of the canvas; a larger photo is drawn smaller
const ROWS = 5;

/**
 * The boxes to show, the largest score first, in the pixels of `picture`; `outputs` are of the engine, `shows` of pack.json.
 * `seen` is the size at which the network saw the picture.
 */
export function found({ labels, frame, boxes, classes, scores, least }, outputs, seen, picture = seen) {
  const share = Math.max(seen.height / frame[0], seen.width / frame[1]);
  const [across, down] = [(share * picture.width) / seen.width, (share * picture.height) / seen.height];
  const each = outputs[scores].values;
  const smallest = each instanceof Float32Array ? Math.fround(least) : least;
  return [...each.keys()]
    .filter((row) => each[row] >= smallest)
    .sort((a, b) => each[b] - each[a] || a - b)
    .map((row) => {
      const kind = Number(outputs[classes].values[row]);
      const [left, top, right, bottom] = outputs[boxes].values.subarray(4 * row, 4 * row + 4);
      const box = [across * left, down * top, across * right, down * bottom];
      return { label: labels[kind] ?? String(kind), kind, score: each[row], box };
    });
}

/** What was found in words, in the order of the classes. */
export function sentence(found) {
  const counts = new Map();
  for (const { label, kind } of found.toSorted((a, b) => a.kind - b.kind)) counts.set(kind, [label, (counts.get(kind)?.[1] ?? 0) + 1]);
  const parts = [...counts.values()].map(([label, count]) => `${count} ${count === 1 ? label : plural(label)}`);
  return parts.join(", ") || "nothing found";
}

function plural(label) {
  if (/([sxz]|[cs]h)$/.test(label)) return `${label}es`;
  return /(?<![aeiou])y$/.test(label) ? `${label.slice(0, -1)}ies` : `${label}s`;
}

export class BoxAnswers {
  keepsPicture = true;

  constructor({ shows }) {
    this.shows = shows;
    this.canvas = byId("boxed");
    byId("label").toggleAttribute("data-boxes", true);
  }

  /** The answer to a photo or a frame, whose bitmap is `picture`. */
  photo({ outputs, seen, picture }) {
    return { found: found(this.shows, outputs, seen, picture) };
  }

  frame(result) {
    return this.photo(result);
  }

  reset() {
    this.canvas.hidden = true;
  }

  /** Draw the answer over the picture, and close it; return what is announced to screen readers. */
  show({ found }, picture, mirrored) {
    const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
    const [width, height] = [picture.width, picture.height].map((size) => Math.max(1, Math.round(scale * size)));
    const { canvas } = this;
    // Setting a size clears a canvas.
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d", { alpha: false });
    context.setTransform(mirrored ? -1 : 1, 0, 0, 1, mirrored ? width : 0, 0);
    context.drawImage(picture, 0, 0, width, height);
    context.setTransform(1, 0, 0, 1, 0, 0);
    const sides = [width / picture.width, height / picture.height];
    picture.close();
    for (const each of found.toReversed()) drawBox(context, each, sides, mirrored);
    canvas.hidden = false;
    const names = found.map(({ label, score }) => `${label} ${score.toFixed(2)}`);
    canvas.setAttribute("aria-label", names.length ? `The picture with boxes: ${names.join(", ")}` : "The picture: nothing was found");
    byId("label").toggleAttribute("data-unsure", found.length === 0);
    write(byId("label-big"), sentence(found));
    write(byId("label-small"), "");
    byId("bars").replaceChildren(...found.slice(0, ROWS).map(row));
    return sentence(found);
  }
}

/** The sides of a box within 0..size, in order, as a network may give others. */
const within = (sides, size) => sides.map((side) => (side > 0 ? Math.min(side, size) : 0)).sort((a, b) => a - b);

/** Draw a box as penstock/device/drawn_boxes.py does; `across` and `down` are pixels of the canvas for one of the picture. */
export function drawBox(context, { label, kind, score, box }, [across, down], mirrored) {
  const { width, height } = context.canvas;
  const xs = [box[0], box[2]].map((side) => (mirrored ? width - across * side : across * side));
  const [left, right] = within(xs, width - 1);
  const [top, bottom] = within([down * box[1], down * box[3]], height - 1);
  const letters = Math.max(LEAST_LETTERS, Math.max(width, height) * SHARE);
  context.lineWidth = Math.max(2, letters / 6);
  context.strokeStyle = context.fillStyle = COLOURS.at(kind % COLOURS.length);
  context.strokeRect(left, top, right - left, bottom - top);
  context.font = `600 ${letters}px system-ui, sans-serif`;
  const text = `${label} ${score.toFixed(2)}`;
  const wide = context.measureText(text).width + letters / 2;
  const x = Math.max(0, Math.min(left, width - wide));
  const y = Math.max(0, top - 1.3 * letters);
  context.fillRect(x, y, wide, 1.3 * letters);
  context.fillStyle = "black";
  context.fillText(text, x + letters / 4, y + letters);
}

function row({ label, score }) {
  const fill = element("i");
  fill.style.transform = `scaleX(${score})`;
  return element("li", {}, element("span", {}, label), element("span", { className: "track" }, fill), element("b", {}, percent(score)));
}
