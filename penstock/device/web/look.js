// Camera panel: a live camera or a photo, and the network's answer.

import { CameraProblem, cameras, isFront, openCamera } from "./camera.js";
import { byId, element, milliseconds, notice, percent, write } from "./dom.js";
import { Frames } from "./frames.js";
import { Recognition, likeliest } from "./recognition.js";
import { Smoothing } from "./smoothing.js";

const BARS = 5;
// A photo's pixels, upright, without colour conversion by the browser.
const UNCONVERTED = { colorSpaceConversion: "none" };
const STABLE_MS = 800; // time after which an unchanged answer is announced to screen readers

export class Looking {
  #generation = 0; // incremented whenever the source changes
  #stream = null;
  #frames = null;
  #photoUrl = null;
  #opened = null; // resolves when the network is loaded
  #embedding = null; // of the last answer
  #stable = null;

  constructor(description, engine, index) {
    Object.assign(this, { description, engine, index });
    byId("resized").hidden = description.inputs[0].shape[0] === null;
    this.main = description.outputs[0];
    this.recognition = description.recognition && new Recognition(description.recognition);
    this.smoothing = this.recognition && new Smoothing(this.recognition);
    this.video = byId("video");
    this.rows = Array.from({ length: Math.min(BARS, this.main.labels.length) }, bar);
    byId("bars").replaceChildren(...this.rows.map(({ view }) => view));
  }

  /** Show the panel; start the camera at once if it was allowed before. */
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
    // The camera opens while the network loads.
    const allowed = await navigator.permissions?.query({ name: "camera" }).catch(() => null);
    if (allowed?.state === "granted") await this.start();
    await opened;
  }

  async start(deviceId = null) {
    this.stop();
    const generation = this.#generation;
    this.#say("Opening the camera");
    let stream;
    try {
      stream = await openCamera(deviceId);
    } catch (error) {
      if (!(error instanceof CameraProblem)) throw error;
      if (generation !== this.#generation) return;
      write(byId("camera-start"), "Try again");
      return this.#say(error.message);
    }
    if (generation === this.#generation) await this.#show(stream);
    else release(stream); // another source was chosen meanwhile
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
    // play() fails if the video was stopped meanwhile. Frame callbacks come only while it plays.
    await Promise.all([this.#listCameras(), this.video.play().catch(() => null)]);
    if (stream === this.#stream) this.#watch();
  }

  /** Release the camera and the photo. */
  stop() {
    this.#generation++;
    this.#frames?.stop();
    this.#frames = null;
    if (this.#stream) release(this.#stream);
    this.#stream = this.video.srcObject = null;
    this.video.hidden = byId("photo").hidden = byId("label").hidden = true;
    if (this.#photoUrl) URL.revokeObjectURL(this.#photoUrl);
    this.#photoUrl = null;
    this.smoothing?.reset();
    for (const name of ["age-ms", "rate"]) write(byId(name), "–");
    write(byId("camera-start"), "Start the camera");
    this.#say("The camera is off.");
  }

  /** Classify one picture from disk, without smoothing. */
  async photo(file) {
    this.stop();
    const generation = this.#generation;
    byId("photo-file").value = "";
    this.#say(`Opening ${file.name}`);
    let bitmap;
    try {
      bitmap = await createImageBitmap(file, UNCONVERTED);
    } catch {
      if (generation === this.#generation) this.#say(`The browser cannot read ${file.name} as a picture.`);
      return;
    }
    if (generation !== this.#generation) return bitmap.close(); // another source was chosen meanwhile
    this.#photoUrl = URL.createObjectURL(file);
    byId("photo").src = this.#photoUrl;
    byId("photo").hidden = false;
    this.#say("");
    try {
      await this.#opened;
      const { outputs, ms } = await this.engine.picture(bitmap);
      if (generation !== this.#generation) return;
      const probabilities = outputs[this.main.name];
      this.#render(this.recognition?.answer(probabilities) ?? this.#plain(probabilities), outputs, ms);
      await this.#find();
    } catch (error) {
      if (generation === this.#generation) this.#broken(error);
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

  #frame({ outputs, capturedMs, modelMs, ageMs, rate, presented, processed }) {
    const probabilities = outputs[this.main.name];
    const answer = this.smoothing?.take(probabilities, capturedMs / 1000) ?? this.#plain(probabilities);
    this.#render(answer, outputs, modelMs);
    write(byId("age-ms"), milliseconds(ageMs));
    write(byId("rate"), rate === null ? "–" : rate.toFixed(1));
    document.dispatchEvent(new CustomEvent("penstock-frame", { detail: { answer, outputs, capturedMs, modelMs, ageMs, presented, processed } }));
  }

  /** The answer of an application without a recognition: the likeliest label. */
  #plain(probabilities) {
    const top = likeliest(probabilities, BARS).map((index) => [this.main.labels[index], probabilities[index]]);
    const [label, probability] = top[0];
    return { label, group: label, probability, group_probability: probability, unsure: false, top };
  }

  #render(answer, outputs, modelMs) {
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
    this.#announceWhenStable(unsure ? "unsure" : [group, label !== group && label].filter(Boolean).join(", "));
  }

  /** Announce an answer to screen readers once it is stable. */
  #announceWhenStable(text) {
    if (this.#stable?.text === text) return;
    clearTimeout(this.#stable?.timer);
    this.#stable = { text, timer: setTimeout(() => write(byId("spoken"), text), STABLE_MS) };
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
