// An answer that takes steps: the loop over two graphs. The same as in penstock/core/packs/pack_loop.py.

import { reframe, sizesOf } from "./tensors.js";

// Entries by which the room of a dimension grows, as in penstock/core/state_layout.py.
const PAGE = 16;
const STATE = "state.";
const NEXT = "next.";
const DONE = "step.done";

const dimsOf = (specs) => specs.flatMap(({ shape }) => shape.filter((size) => typeof size === "object"));
const byName = (dims) => Object.fromEntries(dims.map((dim) => [dim.name, dim]));

export class Generation {
  #state; // tensors by name: the state, and the lengths
  #room = Object.create(null);
  #steps = 0;

  /** `sessions` are those of `begin` and `step`; `Tensor` is ONNX Runtime's. */
  constructor({ generate, inputs, outputs }, sessions, Tensor) {
    Object.assign(this, { generate, outputs, sessions, Tensor });
    this.dims = byName(dimsOf(Object.values(generate.state)));
    // A raw array of any size has no named dimensions.
    this.ofInputs = Object.keys(byName(dimsOf(inputs.map(({ shape }) => ({ shape: shape.filter(Boolean) })))));
    this.growing = Object.keys(this.dims).filter((name) => !this.ofInputs.includes(name));
    this.names = [...Object.keys(generate.state), ...this.growing];
  }

  /** Begin the answer to the inputs of a graph. */
  async begin(feeds) {
    const { max_steps: most, max_steps_input: name } = this.generate;
    const asked = name ? Number(feeds[name].data[0]) : most;
    this.most = Math.min(Math.max(1, asked), most);
    const made = await this.sessions.begin.run(feeds);
    this.#state = Object.fromEntries(this.names.map((each) => [each, made[NEXT + each]]));
    for (const each of this.ofInputs) this.#state[each] = feeds[each];
  }

  /** Take one step: `{ outputs, ended }`; `ended` is null while the answer goes on, else "end" or "max_steps". */
  async step() {
    this.#makeRoom();
    const state = this.#state;
    const feeds = Object.fromEntries(Object.keys(state).map((name) => [STATE + name, state[name]]));
    const made = await this.sessions.step.run(feeds);
    for (const name of this.names) state[name] = made[NEXT + name] ?? state[name];
    this.#steps++;
    const outputs = Object.fromEntries(
      this.outputs.map(({ name }) => [name, { values: made[name].data, shape: made[name].dims.slice(1) }]),
    );
    return { outputs, ended: this.#ended(made[DONE].data[0]) };
  }

  /** Cut or pad the tensors of the state, so that those that grow have room for one entry more. */
  #makeRoom() {
    for (const [name, { max }] of Object.entries(this.dims)) {
      const more = this.#length(name) + (this.growing.includes(name) ? 1 : 0);
      const room = Math.max(1, Math.min(Math.ceil(more / PAGE) * PAGE, max));
      this.#room[name] = Math.max(room, this.#room[name] ?? 0);
    }
    for (const [name, spec] of Object.entries(this.generate.state)) {
      const { data, dims } = this.#state[name];
      const sizes = [1, ...sizesOf(spec, this.#room)];
      const fits = sizes.every((size, axis) => size === dims[axis]);
      if (!fits) this.#state[name] = new this.Tensor(spec.dtype, reframe(data, dims, sizes), sizes);
    }
  }

  #ended(isDone) {
    if (isDone) return "end";
    const isFull = this.growing.some((name) => this.#length(name) >= this.dims[name].max);
    return isFull || this.#steps >= this.most ? "max_steps" : null;
  }

  #length(name) {
    return Number(this.#state[name].data[0]);
  }
}
