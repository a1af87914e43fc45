// A surface to draw a grey image on: white ink on black, by mouse, finger, pen or keyboard.
// Strokes are kept as points in the image's own pixels, and painted at any resolution.

const PEN = 0.11; // width of the pen, as a share of the image's shorter side
const SHOWN_PIXELS = 720; // resolution of what is seen
const SENT_PIXELS = 128; // and of what is sent: the server averages it to the image's size
const KEY_STEP = 0.02;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Drawing {
  #strokes = [];
  #open = null; // the stroke that is being drawn
  #pen = null; // where the keyboard's pen is
  #due = false;
  #inked = false; // whether there is other ink than when `changed` was last called
  #sent = document.createElement("canvas");
  #context = this.#sent.getContext("2d", { willReadFrequently: true });

  /** Draws on a canvas an image of `height` x `width` pixels; `changed` is called once a frame in which it changed. */
  constructor(canvas, [height, width], changed) {
    Object.assign(this, { canvas, height, width, changed });
    this.scale = Math.max(1, Math.floor(SENT_PIXELS / Math.max(height, width)));
    resize(canvas, this, Math.max(1, Math.ceil(SHOWN_PIXELS / Math.max(height, width))));
    resize(this.#sent, this, this.scale);
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.#open = null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#lift());
    this.#paint();
  }

  get empty() {
    return this.#strokes.length === 0;
  }

  /** Removes all ink; `changed` is not called if `isTold` is false. */
  clear(isTold = true) {
    this.#strokes = [];
    this.#open = null;
    this.#inked &&= isTold;
    this.#repaint({ inked: isTold });
  }

  undo() {
    this.#strokes.pop();
    this.#open = null;
    this.#repaint();
  }

  /** The drawing as a PNG file. */
  png() {
    return new Promise((resolve) => this.#sent.toBlob(resolve, "image/png"));
  }

  /** The drawing averaged to the image's own pixels, row by row: what the network gets. */
  pixels() {
    const { height, width, scale } = this;
    const { data } = this.#context.getImageData(0, 0, width * scale, height * scale);
    const sums = new Float32Array(height * width);
    for (let y = 0; y < height * scale; y++) {
      const row = Math.floor(y / scale) * width;
      for (let x = 0; x < width * scale; x++) sums[row + Math.floor(x / scale)] += data[4 * (y * width * scale + x)];
    }
    return Uint8Array.from(sums, (sum) => Math.round(sum / scale ** 2));
  }

  #down(event) {
    if (event.button !== 0 || !event.isPrimary) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.#pen = null;
    this.#begin(this.#at(event));
  }

  #move(event) {
    if (!this.#open || !event.isPrimary || this.#pen) return;
    const steps = event.getCoalescedEvents();
    this.#open.push(...(steps.length ? steps : [event]).map((step) => this.#at(step)));
    this.#repaint();
  }

  #key(event) {
    const arrow = ARROWS[event.key];
    if (arrow) this.#step(arrow, event.shiftKey ? 4 : 1);
    else if (event.key === " ") this.#open ? this.#lift() : this.#touch();
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else if (event.key === "z" && (event.ctrlKey || event.metaKey)) this.undo();
    else return;
    event.preventDefault();
  }

  #step([right, down], times) {
    const [x, y] = this.#pen ?? this.#middle();
    const step = KEY_STEP * times * Math.min(this.height, this.width);
    this.#pen = [clamp(x + right * step, this.width), clamp(y + down * step, this.height)];
    if (this.#open) this.#open.push(this.#pen);
    this.#repaint({ inked: this.#open !== null });
  }

  #touch() {
    this.#pen ??= this.#middle();
    this.#begin(this.#pen);
  }

  #lift() {
    this.#open = null;
    this.#repaint({ inked: false });
  }

  #begin(point) {
    this.#open = [point];
    this.#strokes.push(this.#open);
    this.#repaint();
  }

  #middle() {
    return [this.width / 2, this.height / 2];
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * this.width,
      ((event.clientY - box.top) / box.height) * this.height,
    ];
  }

  #repaint({ inked } = { inked: true }) {
    this.#inked ||= inked;
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#paint();
      if (this.#inked) this.changed();
      this.#due = this.#inked = false;
    });
  }

  #paint() {
    for (const canvas of [this.canvas, this.#sent]) {
      const context = canvas.getContext("2d");
      const scale = canvas.width / this.width;
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.fillStyle = "black";
      context.fillRect(0, 0, this.width, this.height);
      for (const stroke of this.#strokes) paintStroke(context, stroke, PEN * Math.min(this.height, this.width));
    }
    if (this.#pen) this.#paintPen();
  }

  #paintPen() {
    const context = this.canvas.getContext("2d");
    context.beginPath();
    context.arc(...this.#pen, PEN * Math.min(this.height, this.width), 0, 2 * Math.PI);
    context.strokeStyle = this.#open ? "#2391ba" : "#8a949d";
    context.lineWidth = 0.012 * this.width;
    context.stroke();
  }
}

/** A stroke as a smooth line: through the middles between its points, bent by the points. */
function paintStroke(context, points, width) {
  context.strokeStyle = context.fillStyle = "white";
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  if (points.length === 1) {
    context.arc(...points[0], width / 2, 0, 2 * Math.PI);
    context.fill();
    return;
  }
  context.moveTo(...points[0]);
  for (let index = 1; index < points.length - 1; index++) {
    const [[x, y], [nextX, nextY]] = [points[index], points[index + 1]];
    context.quadraticCurveTo(x, y, (x + nextX) / 2, (y + nextY) / 2);
  }
  context.lineTo(...points.at(-1));
  context.stroke();
}

function resize(canvas, { height, width }, scale) {
  Object.assign(canvas, { height: height * scale, width: width * scale });
}

const clamp = (value, largest) => Math.min(Math.max(value, 0), largest);
