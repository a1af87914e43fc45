// Camera panel: a live camera or a photo, and the network's answer: labels, or boxes over the picture.

import { BoxAnswers } from "./boxes.js";
import { CameraProblem, cameras, isFront, openCamera } from "./camera.js";
import { byId, element, milliseconds, notice, write } from "./dom.js";
import { Examples, Recorded } from "./examples.js";
import { Frames } from "./frames.js";
import { goldenOf } from "./golden.js";
import { LabelAnswers } from "./labels.js";
import { NumberAnswers } from "./numbers.js";
import { imageOf, pictureOf } from "./pixels.js";
import { areScores } from "./show.js";

// A photo's pixels, upright, without colour conversion by the browser.
const UNCONVERTED = { colorSpaceConversion: "none" };
const STABLE_MS = 800; // time after which an unchanged answer is announced to screen readers

/** Whether the first output is a probability of each label. */
const isClassifier = ({ recognition, outputs: [first] }) =>
  Boolean(recognition) || (areScores(first) && first.shape.length === 1 && (!first.units || first.units === "probability"));

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
    this.answers = new (description.shows ? BoxAnswers : isClassifier(description) ? LabelAnswers : NumberAnswers)(description);
    this.video = byId("video");
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
    this.recorded = new Recorded(this.description);
    byId("look").querySelector(".figures").before(this.recorded.view);
    this.examples = new Examples(this.description, await goldenOf(this.description), (example) => pictureOf(this.#imageOf(example)), (example) => this.example(example));
    byId("look").querySelector(".tools").after(this.examples.view);
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
    this.answers.reset();
    this.examples?.mark(null);
    this.recorded?.show(null);
    for (const name of ["age-ms", "rate"]) write(byId(name), "–");
    write(byId("camera-start"), "Start the camera");
    this.#say("The camera is off.");
  }

  /** Run the network on one picture from disk, without smoothing. */
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
    this.#showPhoto(file);
    try {
      await this.#opened;
      const result = await runPicture(this.engine, bitmap, this.answers.keepsPicture);
      if (generation !== this.#generation) return result.picture?.close();
      this.#render(this.answers.photo(result), result);
      await this.#find();
    } catch (error) {
      if (generation === this.#generation) this.#broken(error);
    }
  }

  /** Run the network on a recorded example, pixel by pixel as it was recorded. */
  async example(example) {
    this.stop();
    const generation = this.#generation;
    const image = this.#imageOf(example);
    const { width, height } = image;
    this.#say("The network is still loading.");
    try {
      await this.#opened;
      const blob = await new Promise((resolve) => pictureOf(image).toBlob(resolve));
      const { outputs, ms } = await this.engine.pixels(image);
      const picture = this.answers.keepsPicture ? await createImageBitmap(image) : null;
      if (generation !== this.#generation) return picture?.close();
      this.#showPhoto(blob);
      this.examples.mark(example);
      const result = { outputs, modelMs: ms, seen: { width, height }, picture };
      this.#render(this.answers.photo(result), result);
      this.recorded.show(example.outputs, this.#named(outputs), result.seen);
      await this.#find();
    } catch (error) {
      if (generation === this.#generation) this.#broken(error);
    }
  }

  #imageOf({ inputs }) {
    return imageOf(inputs[this.description.inputs[0].name]);
  }

  #named(outputs) {
    const specs = this.description.outputs.map(({ name, shape }) => [name, ArrayBuffer.isView(outputs[name]) ? { values: outputs[name], shape } : outputs[name]]);
    return Object.fromEntries(specs);
  }

  #showPhoto(blob) {
    this.#photoUrl = URL.createObjectURL(blob);
    byId("photo").src = this.#photoUrl;
    byId("photo").hidden = false;
    this.#say("");
  }

  async #watch() {
    const run = (bitmap) => runPicture(this.engine, bitmap, this.answers.keepsPicture);
    const frames = new Frames(this.video, run, (frame) => this.#frame(frame));
    this.#frames = frames;
    try {
      await this.#opened;
      await frames.run();
    } catch (error) {
      if (this.#frames === frames) this.#broken(error);
    }
  }

  #frame(result) {
    const { outputs, capturedMs, modelMs, ageMs, rate, presented, processed } = result;
    const answer = this.answers.frame(result);
    this.#render(answer, result);
    write(byId("age-ms"), milliseconds(ageMs));
    write(byId("rate"), rate === null ? "–" : rate.toFixed(1));
    document.dispatchEvent(new CustomEvent("penstock-frame", { detail: { answer, outputs, capturedMs, modelMs, ageMs, presented, processed } }));
  }

  #render(answer, { outputs, modelMs, picture }) {
    byId("label").hidden = false;
    const spoken = this.answers.show(answer, picture, this.video.hasAttribute("data-mirrored") && this.#stream !== null);
    write(byId("model-ms"), milliseconds(modelMs));
    const { embedding } = outputs;
    this.#embedding = (ArrayBuffer.isView(embedding) ? embedding : embedding?.values) ?? null;
    this.#announceWhenStable(spoken);
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

/** Run the network on an ImageBitmap; `picture` is a copy of it to draw on, if it is kept. */
async function runPicture(engine, bitmap, keeps) {
  // The engine takes the bitmap away.
  const picture = keeps ? await createImageBitmap(bitmap) : null;
  const { outputs, ms, seen } = await engine.picture(bitmap);
  return { outputs, modelMs: ms, seen, picture };
}

function release(stream) {
  for (const track of stream.getTracks()) track.stop();
}
