"""The web app of a pack in headless Chromium, asked by the page's own engine."""

import base64
import shutil
import threading
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, Self, final

import numpy as np

from penstock.core.errors import PackError
from penstock.core.pack import WEB, Pack
from penstock.core.spec import Array
from penstock.device.engine import chunks_of
from penstock.export.host import LOCALHOST, host_of
from penstock.verify.examples import Example
from penstock.verify.places import Place

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox, since what is opened is our own page; and nothing of the browser's own goes out.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
INSTALL_S = 60

# The app's own engine for what the app takes; for inputs of a fixed size, which no camera gives, the runtime below it.
OPEN = """async () => {
  await navigator.serviceWorker.ready;
  const description = await (await fetch("../pack.json")).json();
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  globalThis.bytes = bytes;
  if (description.kind === "live" || description.input.shape.includes(null)) {
    const { Engine } = await import("./engine.js");
    globalThis.engine = new Engine(description);
    await engine.open();
    return;
  }
  const ort = await import("./vendor/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./vendor/", location).href;
  const model = await (await fetch("../" + description.models.fp32.file)).arrayBuffer();
  const session = await ort.InferenceSession.create(new Uint8Array(model), { executionProviders: ["wasm"] });
  globalThis.run = async (values, shape) => {
    const { name, dtype } = description.input;
    const outputs = await session.run({ [name]: new ort.Tensor(dtype, values, shape) });
    return Array.from(outputs[description.outputs[0].name].data);
  };
}"""
PIXELS = """async ([text, height, width]) => {
  const data = new Uint8ClampedArray(bytes(text).buffer);
  const { outputs } = await engine.pixels({ data, height, width });
  const { outputs: [{ name }] } = engine.description;
  return Array.from(outputs[name]);
}"""
SOUND = """async ([text, length, last]) => {
  const { rows, values } = await engine.sound(new Int16Array(bytes(text).buffer), length, last);
  return [rows, Array.from(values)];
}"""
FIXED = """async ([text, kind, shape]) => run(new globalThis[kind](bytes(text).buffer), shape)"""
KINDS = {
    "bool": "Uint8Array",
    "float32": "Float32Array",
    "float64": "Float64Array",
    "int16": "Int16Array",
    "int32": "Int32Array",
    "int64": "BigInt64Array",
    "int8": "Int8Array",
    "uint8": "Uint8Array",
}


@final
class Browser(Place):
    """The web app, hosted on localhost and open in a headless browser; use it in a `with`.

    Args:
        pack: With its `web/`.

    Raises:
        PackError: No browser can be started, or the app does not open in it.
    """

    def __init__(self, pack: Pack) -> None:
        self.name = "web app" if pack.varies or pack.live is not None else "WASM in a browser"
        self._pack = pack
        self._open = ExitStack()
        self._page: Any = None

    def __enter__(self) -> Self:
        from playwright.sync_api import Error, sync_playwright

        try:
            host = self._open.enter_context(host_of(self._pack))
            threading.Thread(target=host.serve_forever, daemon=True).start()
            self._open.callback(host.shutdown)
            playwright = self._open.enter_context(sync_playwright())
            found = next(filter(None, map(shutil.which, BROWSERS)), None)
            browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
            self._open.callback(browser.close)
            context, address = browser.new_context(), f"http://{LOCALHOST}:{host.server_address[1]}/{WEB}/"
            self._wait_until_installed(context.new_page(), address)
            # That page loads itself anew; another one begins with what is installed.
            self._page = context.new_page()
            self._page.goto(address)
            self._page.evaluate(OPEN)
        except Error as error:
            self._open.close()
            cause = " ".join(str(error).split())[:300]
            raise PackError(
                f"the web app does not open in a browser ({cause}); leave it out with --no-browser."
            ) from None
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _wait_until_installed(self, page: Any, address: str) -> None:
        from playwright.sync_api import Error

        page.goto(address)
        for _ in range(INSTALL_S * 10):
            try:
                # The page's policy lets the browser wait for nothing that it would have to evaluate there.
                if page.evaluate("Boolean(navigator.serviceWorker?.controller)"):
                    return
            except Error as error:
                if "context was destroyed" not in str(error):
                    raise
            page.wait_for_timeout(100)
        said = " ".join(page.inner_text("body").split())[:200]
        raise PackError(f"the web app was not installed in {INSTALL_S} s (the page says {said!r}).")

    def answer(self, example: Example) -> Array:
        """See `Place`."""
        raw, outputs = example.raw, self._pack.outputs[0]
        if self._pack.live is not None:
            return self._heard(raw, self._pack.live.chunk)
        if self._pack.varies:
            numbers = self._page.evaluate(PIXELS, [_text(raw), *raw.shape[:2]])
        else:
            numbers = self._page.evaluate(FIXED, [_text(raw), KINDS[raw.dtype.name], [1, *raw.shape]])
        return np.array(numbers, outputs.dtype).reshape(outputs.shape)

    def _heard(self, signal_T: Array, chunk: int) -> Array:
        spec = self._pack.outputs[0]
        parts: list[Array] = []
        for part_T, last in chunks_of(signal_T, chunk):
            whole_T = np.zeros((chunk, *part_T.shape[1:]), part_T.dtype)
            whole_T[: len(part_T)] = part_T
            rows, numbers = self._page.evaluate(SOUND, [_text(whole_T), len(part_T), last])
            parts.append(np.array(numbers, spec.dtype).reshape(spec.shape)[:rows])
        return np.concatenate(parts)


def why_no_browser(pack: Pack) -> str:
    """Why the web app cannot be asked here; empty where it can."""
    if f"{WEB}/index.html" not in pack.files:
        return "the pack has no web app"
    if find_spec("playwright") is None:
        return "playwright is not installed"
    if pack.live is not None and pack.input.dtype != "int16":
        return "of live signals it hears sound alone"
    return ""


def _text(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
