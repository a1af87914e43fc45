"""The web app of a pack in headless Chromium, run by the page's own engine."""

import base64
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, Self, final

import numpy as np

from penstock.core.errors import PackError, one_line
from penstock.core.packs.pack import WEB, Pack
from penstock.core.packs.pack_live import chunks_of
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.export.static_host import pack_host
from penstock.verify.backends import Answer, Backend
from penstock.verify.chromium import open_chromium, wait_for
from penstock.verify.verify_inputs import Example

INSTALL_S = 60

OPEN = """async () => {
  await navigator.serviceWorker.ready;
  const { Engine } = await import("./engine.js");
  globalThis.bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  globalThis.engine = new Engine(await (await fetch("../pack.json")).json());
  await engine.open();
}"""
ARRAY = """async ([text, shape]) => {
  const { outputs } = await engine.array(bytes(text), shape);
  return Array.from(outputs[engine.description.outputs[0].name]);
}"""
TENSORS = """async (given) => {
  const inputs = given.map(([name, text, shape]) => [name, { bytes: bytes(text), shape }]);
  const { outputs } = await engine.tensors(Object.fromEntries(inputs));
  return Object.entries(outputs).map(([name, { values, shape }]) => [name, Array.from(values), shape]);
}"""
STEPS = """async (given) => {
  const inputs = given.map(([name, text, shape]) => [name, { bytes: bytes(text), shape }]);
  const numbers = {};
  const sizes = {};
  for await (const { outputs } of engine.generate(Object.fromEntries(inputs), "tensors")) {
    for (const [name, { values, shape }] of Object.entries(outputs)) {
      (numbers[name] ??= []).push(...values);
      sizes[name] = [(sizes[name]?.[0] ?? 0) + 1, ...shape];
    }
  }
  return Object.entries(numbers).map(([name, values]) => [name, values, sizes[name]]);
}"""
SOUND = """async ([text, length, last]) => {
  const { rows, values } = await engine.sound(new Int16Array(bytes(text).buffer), length, last);
  return [rows, Array.from(values)];
}"""


@final
class BrowserBackend(Backend):
    """The web app in a headless browser, hosted on localhost; to be used as a context.

    Args:
        pack: Including its `web/`.

    Raises:
        PackError: No browser can be started, or the app does not open in it.
    """

    name = "web app"

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._open = ExitStack()
        self._page: Any = None

    def __enter__(self) -> Self:
        from playwright.sync_api import Error

        with ExitStack() as opening:
            host = opening.enter_context(pack_host(self._pack))
            context = opening.enter_context(open_chromium()).new_context()
            try:
                self._install(context.new_page(), host.page)
                # The first page reloads itself; a second one starts from the installed files.
                self._page = context.new_page()
                self._page.goto(host.page)
                self._page.evaluate(OPEN)
            except Error as error:
                raise PackError(
                    f"the web app does not open in a browser ({one_line(error)}); leave it out with --no-browser."
                ) from None
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _install(self, page: Any, url: str) -> None:
        page.goto(url)
        if not wait_for(page, "Boolean(navigator.serviceWorker?.controller)", INSTALL_S):
            text = " ".join(page.inner_base64("body").split())[:200]
            raise PackError(f"the web app was not installed in {INSTALL_S} s (the page shows {text!r}).")

    def answer(self, example: Example) -> Answer:
        """Run the example."""
        pack, raw = self._pack, example.raw
        if pack.live is not None:
            return self._run_signal(raw, pack.live.chunk)
        if pack.generate is not None or not pack.tensors.is_plain:
            return self._run_tensors(raw)
        outputs = pack.outputs[0]
        shape = raw.shape if pack.raw else (1, *raw.shape)
        numbers = self._page.evaluate(ARRAY, [_base64(raw), shape])
        return np.array(numbers, outputs.dtype).reshape(outputs.shape)

    def _run_tensors(self, raw: Array) -> Answer:
        given, made = self._pack.input, self._pack.tensors.output
        inputs = given.unpack(raw) if isinstance(given, RecordSpec) else {given.name: raw}
        run = TENSORS if self._pack.generate is None else STEPS
        found = self._page.evaluate(run, [[name, _base64(each), each.shape] for name, each in inputs.items()])
        dtypes = {spec.name: spec.numpy_dtype for spec in made.tensors}
        outputs = {name: np.array(numbers, dtypes[name]).reshape(shape) for name, numbers, shape in found}
        return outputs if isinstance(made, RecordSpec) else outputs[made.name]

    def _run_signal(self, signal_T: Array, chunk: int) -> Array:
        spec = self._pack.outputs[0]
        parts: list[Array] = []
        for part_T, last in chunks_of(signal_T, chunk):
            whole_T = np.zeros((chunk, *part_T.shape[1:]), part_T.dtype)
            whole_T[: len(part_T)] = part_T
            rows, numbers = self._page.evaluate(SOUND, [_base64(whole_T), len(part_T), last])
            parts.append(np.array(numbers, spec.dtype).reshape(spec.shape)[:rows])
        return np.concatenate(parts)


def browser_obstacle(pack: Pack) -> str:
    """The reason that the web app cannot be run here; empty if it can."""
    if f"{WEB}/index.html" not in pack.files:
        return "the pack has no web app"
    if find_spec("playwright") is None:
        return "playwright is not installed"
    if pack.live is not None and pack.inputs[0].dtype != "int16":
        return "it supports no live signals but sound"
    return ""


def _base64(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
