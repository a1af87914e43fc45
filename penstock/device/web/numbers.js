// The answers of a network that is no classifier: its outputs by name.

import { byId } from "./dom.js";
import { output } from "./show.js";

export class NumberAnswers {
  keepsPicture = false;

  constructor({ outputs }) {
    this.outputs = outputs;
    byId("bars").hidden = true;
    byId("numbers").hidden = false;
  }

  /** The answer to one picture. */
  photo({ outputs }) {
    return { outputs };
  }

  /** The answer to a frame of a video. */
  frame({ outputs }) {
    return { outputs };
  }

  reset() {}

  /** Show an answer; nothing is announced, because numbers change with every frame. */
  show({ outputs }) {
    byId("label").hidden = true;
    const sections = this.outputs.map((spec) => {
      const made = outputs[spec.name];
      return output(spec, ArrayBuffer.isView(made) ? { values: made, shape: spec.shape } : made);
    });
    byId("numbers").replaceChildren(...sections);
    return "";
  }
}
