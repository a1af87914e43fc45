// Looking: a live camera or a photo, and over it what the network sees.

import { CameraProblem, cameras, isFront, openCamera } from "./camera.js";
import { byId, element, milliseconds, notice, percent, write } from "./dom.js";
import { Frames } from "./frames.js";
import { Recognition, likeliest } from "./recognition.js";
import { Smoothing } from "./smoothing.js";

const BARS = 5;
// A photo's pixels as they are in the file, upright, without what browsers do to colours.
const AS_IT_IS = { colorSpaceConversion: "none" };
const STILL_MS = 800; // an answer that stays this long is read out

export class Looking {
  #turn = 0; // grows whenever something else is looked at
  #stream = null;
  #frames = null;
  #photoUrl = null;
  #opened = null; // the network, loaded
  #embedding = null; // of what was seen last
  #still = null;

  constructor(description, engine, index) {
    Object.assign(this, { description, engine, index });
    byId("resized").hidden = description.input.shape[0] === null;
    this.main = description.outputs[0];
    this.recognition = description.recognition && new Recognition(description.recognition);
    this.smoothing = this.recognition && new Smoothing(this.recognition);
    this.video = byId("video");
    this.rows = Array.from({ length: Math.min(BARS, this.main.labels.length) }, bar);
    byId("bars").replaceChildren(...this.rows.map(({ view }) => view));
  }

  /** Shows the panel; where the camera was allowed before, it starts at once. */
  async begin(opened) {
    this.#opened = opened;
    byId("look").hidden = false;
    byId("camera-start").addEventListener("click", () => (this.#stream ? this.stop() : this.start()));
    byId("camera").addEventListener("change", () => this.start(byId("camera").value));
    byId("photo-choose").addEventListener("click", () => byId("photo-file").click());
    byId("photo-file").addEventListener("change", ({ target }) => target.files.length && this.photo(target.files[0]));
    byId("search-now").addEventListener("click", () => this.#find());
    navigator.mediaDevices?.addEventListener("devicechange", () => this.#stream && this.#listCameras());
    this.#offerSearch();
    // The camera and the network take their time side by side.
    const allowed = await navigator.permissions?.query({ name: "camera" }).catch(() => null);
    if (allowed?.state === "granted") await this.start();
    await opened;
  }

  async start(deviceId = null) {
    this.stop();
    const turn = this.#turn;
    this.#say("Opening the camera");
    let stream;
    try {
      stream = await openCamera(deviceId);
    } catch (error) {
      if (!(error instanceof CameraProblem)) throw error;
      if (turn !== this.#turn) return;
      write(byId("camera-start"), "Try again");
      return this.#say(error.message);
    }
    if (turn === this.#turn) await this.#show(stream);
    else release(stream); // something else was chosen meanwhile
  }

  async #show(stream) {
    this.#stream = stream;
    const [track] = stream.getVideoTracks();
    track.addEventListener("ended", () => this.#lost());
    this.video.toggleAttribute("data-mirrored", isFront(track));
    this.video.srcObject = stream;
    this.video.hidden = false;
    this.#say("");
    write(byId("camera-start"), "Stop");
    // It does not play where it was stopped meanwhile. Before it plays, it tells nobody of its frames.
    await Promise.all([this.#listCameras(), this.video.play().catch(() => null)]);
    if (stream === this.#stream) this.#watch();
  }

  /** Lets go of the camera and the photo. */
  stop() {
    this.#turn++;
    this.#frames?.stop();
    this.#frames = null;
    if (this.#stream) release(this.#stream);
    this.#stream = this.video.srcObject = null;
    this.video.hidden = byId("photo").hidden = byId("label").hidden = true;
    if (this.#photoUrl) URL.revokeObjectURL(this.#photoUrl);
    this.#photoUrl = null;
    this.smoothing?.forget();
    for (const name of ["age-ms", "rate"]) write(byId(name), "–");
    write(byId("camera-start"), "Start the camera");
    this.#say("The camera is off.");
  }

  /** One picture from disk; what is said of it is not smoothed. */
  async photo(file) {
    this.stop();
    const turn = this.#turn;
    byId("photo-file").value = "";
    this.#say(`Opening ${file.name}`);
    let bitmap;
    try {
      bitmap = await createImageBitmap(file, AS_IT_IS);
    } catch {
      if (turn === this.#turn) this.#say(`The browser cannot read ${file.name} as a picture.`);
      return;
    }
    if (turn !== this.#turn) return bitmap.close(); // something else was chosen meanwhile
    this.#photoUrl = URL.createObjectURL(file);
    byId("photo").src = this.#photoUrl;
    byId("photo").hidden = false;
    this.#say("");
    try {
      await this.#opened;
      const { outputs, ms } = await this.engine.picture(bitmap);
      if (turn !== this.#turn) return;
      const probabilities = outputs[this.main.name];
      this.#tell(this.recognition?.answer(probabilities) ?? this.#plain(probabilities), outputs, ms);
      await this.#find();
    } catch (error) {
      if (turn === this.#turn) this.#broken(error);
    }
  }

  async #watch() {
    const frames = new Frames(this.video, this.engine, (frame) => this.#frame(frame));
    this.#frames = frames;
    try {
      await this.#opened;
      await frames.run();
    } catch (error) {
      if (this.#frames === frames) this.#broken(error);
    }
  }

  #frame({ outputs, takenMs, modelMs, ageMs, rate, seen, asked }) {
    const probabilities = outputs[this.main.name];
    const answer = this.smoothing?.take(probabilities, takenMs / 1000) ?? this.#plain(probabilities);
    this.#tell(answer, outputs, modelMs);
    write(byId("age-ms"), milliseconds(ageMs));
    write(byId("rate"), rate === null ? "–" : rate.toFixed(1));
    document.dispatchEvent(new CustomEvent("penstock-frame", { detail: { answer, outputs, takenMs, modelMs, ageMs, seen, asked } }));
  }

  /** What is said where an application has no thresholds: the likeliest label. */
  #plain(probabilities) {
    const top = likeliest(probabilities, BARS).map((index) => [this.main.labels[index], probabilities[index]]);
    const [label, probability] = top[0];
    return { label, group: label, probability, group_probability: probability, unsure: false, top };
  }

  #tell(answer, outputs, modelMs) {
    const { label, group, probability, group_probability, unsure, top } = answer;
    byId("label").hidden = false;
    byId("label").toggleAttribute("data-unsure", unsure);
    write(byId("label-big"), unsure ? "unsure" : group);
    write(byId("label-small"), unsure ? "" : [label === group ? "" : (label ?? "which kind is unsure"), percent(label && label !== group ? probability : group_probability)].filter(Boolean).join(" · "));
    this.rows.forEach((row, place) => {
      const [name, share] = top[place];
      write(row.name, name);
      write(row.number, percent(share));
      row.fill.style.transform = `scaleX(${share})`;
    });
    write(byId("model-ms"), milliseconds(modelMs));
    this.#embedding = outputs.embedding ?? null;
    this.#speakWhenStill(unsure ? "unsure" : [group, label !== group && label].filter(Boolean).join(", "));
  }

  /** For who does not see the picture: once an answer has stayed. */
  #speakWhenStill(text) {
    if (this.#still?.text === text) return;
    clearTimeout(this.#still?.timer);
    this.#still = { text, timer: setTimeout(() => write(byId("spoken"), text), STILL_MS) };
  }

  async #listCameras() {
    const found = await cameras();
    const select = byId("camera");
    const mine = this.#stream?.getVideoTracks()[0]?.getSettings().deviceId;
    select.replaceChildren(...found.map(({ id, name }) => element("option", { value: id, selected: id === mine }, name)));
    select.hidden = found.length < 2;
  }

  async #offerSearch() {
    let index;
    try {
      index = await this.index;
    } catch (error) {
      this.index = null;
      return notice(`The index of pictures is of no use here: ${error.message}`);
    }
    if (!index) return;
    byId("search").hidden = false;
    write(byId("search-count"), index.items.length.toLocaleString("en"));
  }

  async #find() {
    const index = await this.index;
    if (!index || !this.#embedding) return;
    const found = index.search(this.#embedding);
    byId("found").replaceChildren(...(await Promise.all(found.map(async ({ item, cosine }) => {
      const picture = element("img", { src: await index.thumbnail(item), alt: item.file, title: item.file });
      return element("li", {}, picture, element("small", {}, item.file), element("small", {}, cosine.toFixed(3)));
    }))));
  }

  #lost() {
    this.stop();
    write(byId("camera-start"), "Try again");
    this.#say("The camera is gone. Plug it in again, or choose another.");
  }

  #broken(error) {
    this.stop();
    this.#say(`The network does not run: ${error.message}`);
  }

  #say(sentence) {
    write(byId("stage-text"), sentence);
  }
}

function release(stream) {
  for (const track of stream.getTracks()) track.stop();
}

function bar() {
  const row = { name: element("span"), fill: element("i"), number: element("b") };
  row.view = element("li", {}, row.name, element("span", { className: "track" }, row.fill), row.number);
  return row;
}
