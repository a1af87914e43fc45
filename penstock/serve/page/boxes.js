// The picture that was sent, and the boxes that were found in it.

import { element } from "./dom.js";

const COLOURS = ["#ffd54a", "#4dd0e1", "#ff7ad9", "#9cff57", "#ff8a65", "#b39dff"];
const SHARE = 1 / 40; // height of the letters, as a share of the picture's longer side
const LEAST_LETTERS = 11;

export class BoxedPicture {
  #shown = 0;

  /** `shows` is the application's declaration of its boxes. */
  constructor(shows) {
    this.shows = shows;
    this.view = element("canvas", { className: "boxed", role: "img", hidden: true });
  }

  clear() {
    this.#shown++;
    this.view.hidden = true;
  }

  /** Draws a file and the boxes of the reply to it; a body that is no picture has nothing to draw on. */
  async show(body, reply) {
    const mine = ++this.#shown;
    const picture = body instanceof Blob ? await createImageBitmap(body).catch(() => null) : null;
    if (mine !== this.#shown) return;
    this.view.hidden = picture === null;
    if (!picture) return;
    const { boxes, classes, scores, labels } = this.shows;
    const found = reply[boxes].map((box, row) => ({ box, kind: reply[classes][row], score: reply[scores][row] }));
    this.view.width = picture.width;
    this.view.height = picture.height;
    const context = this.view.getContext("2d");
    context.drawImage(picture, 0, 0);
    picture.close();
    for (const each of found.reverse()) draw(context, each, labels);
    const names = found.map(({ kind, score }) => `${labels[kind]} ${score.toFixed(2)}`);
    this.view.setAttribute("aria-label", names.length ? `The picture with boxes: ${names.join(", ")}` : "The picture: nothing was found");
  }
}

function draw(context, { box: [left, top, right, bottom], kind, score }, labels) {
  const { width, height } = context.canvas;
  const letters = Math.max(LEAST_LETTERS, Math.max(width, height) * SHARE);
  const colour = COLOURS[kind % COLOURS.length];
  context.lineWidth = letters / 6;
  context.strokeStyle = context.fillStyle = colour;
  context.strokeRect(left, top, right - left, bottom - top);
  context.font = `600 ${letters}px system-ui, sans-serif`;
  const text = `${labels[kind] ?? kind} ${score.toFixed(2)}`;
  const wide = context.measureText(text).width + letters / 2;
  const x = Math.max(0, Math.min(left, width - wide));
  const y = Math.max(0, top - 1.3 * letters);
  context.fillRect(x, y, wide, 1.3 * letters);
  context.fillStyle = "black";
  context.fillText(text, x + letters / 4, y + letters);
}
