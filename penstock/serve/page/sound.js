// Live sound in the browser: a microphone, or a file that is played in real time, as chunks of 16-bit samples.

const FLUSH_MS = 500; // a browser that has paused its audio thread gives nothing more

/** There is no sound to be had; the message says why. */
export class SoundProblem extends Error {}

/**
 * Opens the microphone, or a file where one is given.
 * `told` gets `chunk(samples)`, `level({ peak, rms })`, `lost(sentence)` where the sound breaks off,
 * `paused(whether)` where the browser holds it back, and `played()` at a file's end.
 */
export async function openSound(file, chunkS, told) {
  if (!window.isSecureContext) {
    throw new SoundProblem("Browsers let a page hear sound over https:// or at localhost alone; this one came otherwise.");
  }
  const context = new AudioContext({ latencyHint: "interactive" });
  let source = null;
  try {
    await context.audioWorklet.addModule(new URL("capture.js", import.meta.url));
    source = await (file ? playing(context, file, told) : microphone(context, told));
    return new Sound(context, source, Math.max(1, Math.round(context.sampleRate * chunkS)), told);
  } catch (error) {
    source?.release();
    context.close();
    throw new SoundProblem(reason(error, file));
  }
}

class Sound {
  #over = null;

  constructor(context, source, chunkFrames, told) {
    Object.assign(this, { context, source });
    this.rateHz = context.sampleRate;
    const mono = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    this.capture = new AudioWorkletNode(context, "capture", { ...mono, processorOptions: { chunkFrames } });
    this.capture.port.onmessage = ({ data }) => {
      if (data.samples) told.chunk(data.samples);
      else if (data.level) told.level(data.level);
      else this.#over?.();
    };
    context.onstatechange = () => context.state !== "closed" && told.paused(context.state !== "running");
    source.node.connect(this.capture);
    context.resume();
  }

  /** A file begins to play; a microphone is heard anyway. */
  begin() {
    this.source.begin();
  }

  /** Resolves when all that was heard has been told. */
  async end() {
    const over = new Promise((resolve) => (this.#over = resolve));
    this.capture.port.postMessage("end");
    await Promise.race([over, new Promise((resolve) => setTimeout(resolve, FLUSH_MS))]);
    this.close();
  }

  /** At once: the browser shows no microphone in use any more. */
  close() {
    this.capture.port.onmessage = this.context.onstatechange = null;
    this.source.release();
    if (this.context.state !== "closed") this.context.close();
  }
}

async function microphone(context, told) {
  // As it is: what a browser does for telephony is not what networks have learned from.
  const audio = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  const media = await navigator.mediaDevices.getUserMedia({ audio });
  const [track] = media.getAudioTracks();
  track.onended = () => told.lost("The microphone is gone.");
  const node = context.createMediaStreamSource(media);
  return { node, begin() {}, release: () => track.stop() };
}

async function playing(context, file, told) {
  const node = context.createBufferSource();
  node.buffer = await context.decodeAudioData(await file.arrayBuffer());
  node.connect(context.destination);
  node.onended = () => told.played();
  const release = () => (node.onended = null);
  return { node, begin: () => node.start(), release };
}

function reason(error, file) {
  if (error instanceof SoundProblem) return error.message;
  return REASONS[error.name] ?? `The ${file ? "file" : "microphone"} cannot be heard: ${error.message}`;
}

const REASONS = {
  NotAllowedError: "The browser may not use the microphone. Allow it beside the address of this page, and start again.",
  NotFoundError: "There is no microphone. Plug one in, or play a file.",
  NotReadableError: "The microphone gives no sound; another program may be using it.",
  EncodingError: "The browser cannot read this file as sound.",
};
