"""Versions of the offline app in headless Chromium: whole or not at all, signed by the same, one at a time."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, Page, expect

from benchmarks.acceptance.device.counting_host import CountingHost
from benchmarks.acceptance.device.film import write_film
from penstock.export.static_host import ISOLATED
from tests.support.device import picture_of, sign, version_of, write_pack
from tests.support.device_fixtures import browser_fixture, host_fixture
from tests.support.device_page import Device, runs, seen

pytestmark = pytest.mark.slow


browser = browser_fixture(camera=lambda film: write_film(film, [picture_of(0)], each=1))
host = host_fixture("function")


@pytest.fixture
def device(browser: Browser) -> Iterator[Device]:
    device = Device(browser)
    yield device
    device.context.close()


@pytest.fixture
def pack_folder(tmp_path: Path) -> Path:
    return write_pack(tmp_path / "pack", name="one")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def restarted(device: Device, host: CountingHost) -> Page:
    """The app after all its pages were closed."""
    device.close_pages()
    return device.installed(host)


def updated(device: Device, host: CountingHost, name: str) -> Page:
    """The app after a restart that brought another version."""
    page = restarted(device, host)
    is_version(page, name, version_of(host.folder))
    return page


def is_version(page: Page, name: str, folder_version: str) -> None:
    expect(page.locator("#app-name")).to_have_text(name)
    expect(page.locator("#version")).to_have_text(folder_version[:8])


def kept(page: Page) -> int:
    """How many versions are on the device."""
    return page.evaluate("caches.keys().then((names) => names.filter((name) => !name.endsWith(' key')).length)")


def test_another_version_waits_for_the_next_start(device: Device, host: CountingHost) -> None:
    page = device.installed(host)
    one = version_of(host.folder)
    is_version(page, "one", one)
    write_pack(host.folder, name="two")
    before = len(host.sent)
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    # What is the same in both is not fetched again. The browser may look for a change of the worker that it has.
    host.settle()
    fetched = {path for path, _ in host.sent[before:]} - {f"/web/sw.js?v={one}"}
    always = {"/pack.json?latest", f"/web/sw.js?v={version_of(host.folder)}", "/pack.json", "/web/index.html"}
    assert fetched == always
    is_version(page, "one", one)
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    is_version(page, "one", one)
    page = updated(device, host, "two")
    expect(page.locator("#update")).to_have_text("This is the latest version.", timeout=20_000)
    assert kept(page) == 1


def test_another_version_takes_over_from_a_busy_worker(device: Device, host: CountingHost) -> None:
    page = device.installed(host)
    write_pack(host.folder, name="two")
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    for worker in device.context.service_workers:
        worker.evaluate("setTimeout(() => { const end = Date.now() + 1000; while (Date.now() < end); }, 20)")
    page = updated(device, host, "two")
    expect(page.locator("#update")).to_have_text("This is the latest version.", timeout=20_000)


@pytest.mark.parametrize("with_event", [True, False])
def test_a_page_that_another_version_takes_over_is_all_of_that_version(
    device: Device, host: CountingHost, with_event: bool
) -> None:
    page = device.installed(host)
    write_pack(host.folder, name="two")
    if not with_event:
        # As in a page that was not ready at that moment.
        page.add_init_script(
            """navigator.serviceWorker.addEventListener(
                "controllerchange", (event) => event.stopImmediatePropagation())"""
        )
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    # As when the last page of the old version is closed while this one is being opened.
    session = device.context.new_cdp_session(page)
    session.send("ServiceWorker.enable")
    session.send("ServiceWorker.skipWaiting", {"scopeURL": host.page})
    is_version(page, "two", version_of(host.folder))
    expect(page.locator("#update")).to_have_text("This is the latest version.", timeout=20_000)
    assert seen(page, 2)


@pytest.mark.parametrize("times", [1, 3])
def test_a_page_that_gets_files_from_the_host_is_reloaded_once(device: Device, host: CountingHost, times: int) -> None:
    """As where the browser stops a version's worker while its page is being opened, which DevTools prevents."""
    page = device.installed(host)
    page.add_init_script(
        f"""
        sessionStorage.setItem("opened", Number(sessionStorage.getItem("opened") ?? 0) + 1);
        const kept = window.fetch;
        window.fetch = (path, ...options) => {{
          if (path !== "../pack.json") return kept(path, ...options);
          const asked = Number(sessionStorage.getItem("asked") ?? 0) + 1;
          sessionStorage.setItem("asked", asked);
          return asked > {times} ? kept(path, ...options) : Promise.resolve(new Response("of another version"));
        }};"""
    )
    page.reload()
    page.wait_for_function("sessionStorage.getItem('opened') === '2'")
    runs(page)
    assert seen(page, 2)
    assert page.evaluate("sessionStorage.getItem('opened')") == "2"


def test_a_version_with_a_flipped_byte_is_refused_and_the_one_before_stays(device: Device, host: CountingHost) -> None:
    page = device.installed(host)
    one = version_of(host.folder)
    # Another network with a flipped byte: at the host, or on the way.
    write_pack(host.folder, name="two", slow=1)
    flip(host.folder / "model.onnx")
    page.reload()
    expect(page.locator("#update")).to_contain_text("model.onnx does not match pack.json", timeout=20_000)
    page = restarted(device, host)
    is_version(page, "one", one)
    assert seen(page, 2)
    assert kept(page) == 1


def test_a_first_version_with_a_flipped_byte_is_not_installed(device: Device, host: CountingHost) -> None:
    flip(host.folder / "web" / "vendor" / "ort.wasm.min.mjs")
    page = device.open(host)
    expect(page.locator("#install-text")).to_contain_text("ort.wasm.min.mjs does not match pack.json", timeout=20_000)
    expect(page.locator("main:visible")).to_have_count(0)
    flip(host.folder / "web" / "vendor" / "ort.wasm.min.mjs")
    page.get_by_role("button", name="Try again").click()
    runs(page)
    assert seen(page, 2)


def test_a_host_that_lacks_a_file_is_said(device: Device, host: CountingHost) -> None:
    (host.folder / "model.onnx").unlink()
    page = device.open(host)
    expect(page.locator("#install-text")).to_contain_text("model.onnx did not come: the host says 404", timeout=20_000)


def test_the_key_of_the_first_version_is_asked_of_all(device: Device, host: CountingHost) -> None:
    mine, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    sign(host.folder, mine)
    page = device.installed(host)
    one = version_of(host.folder)
    for key, name, refusal in (
        (other, "two", "signed with another key"),
        (None, "three", "not signed, the one before was"),
    ):
        write_pack(host.folder, name=name)
        if key:
            sign(host.folder, key)
        page.reload()
        expect(page.locator("#update")).to_contain_text(refusal, timeout=20_000)
        is_version(page, "one", one)
    write_pack(host.folder, name="four")
    sign(host.folder, mine)
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    updated(device, host, "four")


def test_a_wrong_signature_is_refused_at_first(device: Device, host: CountingHost) -> None:
    sign(host.folder, Ed25519PrivateKey.generate())
    signature = (host.folder / "pack.sig").read_bytes()
    write_pack(host.folder, name="altered")
    (host.folder / "pack.sig").write_bytes(signature)
    page = device.open(host)
    expect(page.locator("#install-text")).to_contain_text("is not of this pack.json", timeout=20_000)


def test_an_isolated_page_uses_threads(device: Device, tmp_path: Path) -> None:
    with CountingHost(write_pack(tmp_path / "isolated", slow=2), headers=ISOLATED) as host:
        page = device.installed(host)
        assert page.evaluate("crossOriginIsolated")
        assert seen(page, 2)
        cores = page.evaluate("navigator.hardwareConcurrency")
        assert cores > 1
        expect(page.locator("#threads")).to_have_text(f"{min(4, cores)} threads")
        expect(page.locator("#slower")).to_be_hidden()
        host.stop()
        page.reload()
        assert seen(page, 2)


def test_a_page_that_is_not_isolated_uses_one_thread_and_says_the_fix(device: Device, host: CountingHost) -> None:
    page = device.installed(host)
    expect(page.locator("#threads")).to_have_text("one thread")
    expect(page.locator("#slower")).to_contain_text("in one thread, slower than this device can")
    for name, value in ISOLATED.items():
        expect(page.locator("#slower")).to_contain_text(f"{name}: {value}")
    # The fix is what it says: the next version has threads, its unchanged scripts too.
    host.headers = ISOLATED
    write_pack(host.folder, name="two")
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    page = updated(device, host, "two")
    assert page.evaluate("crossOriginIsolated")
    expect(page.locator("#threads")).to_contain_text("threads")
    expect(page.locator("#slower")).to_be_hidden()
    assert seen(page, 2)


def test_a_device_of_one_core_lacks_no_thread(device: Device, host: CountingHost) -> None:
    device.context.add_init_script("Object.defineProperty(navigator, 'hardwareConcurrency', { get: () => 1 })")
    page = device.installed(host)
    expect(page.locator("#threads")).to_have_text("one thread")
    expect(page.locator("#slower")).to_be_hidden()


def test_two_packs_of_one_host_are_two_apps(device: Device, tmp_path: Path) -> None:
    for name in ("flowers", "dogs"):
        write_pack(tmp_path / name, name=name)
    with CountingHost(tmp_path) as host:
        page = device.context.new_page()
        session = device.context.new_cdp_session(page)
        apps: list[str] = []
        for name in ("flowers", "dogs"):
            page.goto(f"{host.url}{name}/web/")
            runs(page)
            apps.append(session.send("Page.getAppId")["appId"])
        assert len(set(apps)) == 2, apps


def test_an_app_whose_files_the_browser_threw_away_comes_again(device: Device, host: CountingHost) -> None:
    page = device.installed(host)
    page.evaluate("caches.keys().then((names) => Promise.all(names.map((name) => caches.delete(name))))")
    page.reload()
    runs(page)
    assert seen(page, 2)
    host.stop()
    page.reload()
    assert seen(page, 2)


def test_a_device_without_room_is_said(device: Device, host: CountingHost) -> None:
    page = device.context.new_page()
    page.goto(f"{host.url}pack.json")
    few = {"origin": host.url.rstrip("/"), "quotaSize": 1_000_000}
    device.context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", few)
    page.goto(host.page)
    expect(page.locator("#install-text")).to_contain_text("the browser has no room for it", timeout=20_000)


def test_a_browser_that_keeps_no_apps_is_said(device: Device, host: CountingHost) -> None:
    device.context.add_init_script(
        """ServiceWorkerContainer.prototype.register = async () => {
            throw new DOMException("access is denied", "SecurityError");
        };"""
    )
    page = device.open(host)
    expect(page.locator("#install-text")).to_contain_text("does not keep the app on this device: access is denied")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_an_installation_that_the_browser_stops_can_be_tried_again(device: Device, host: CountingHost) -> None:
    model = host.folder / "model.onnx"
    network = model.read_bytes()
    model.unlink()
    os.mkfifo(model)  # the host waits for its bytes, and the app for the host
    page = device.open(host)
    expect(page.locator("#install-text")).to_contain_text("MB", timeout=20_000)
    session = device.context.new_cdp_session(page)
    session.send("ServiceWorker.enable")
    session.send("ServiceWorker.stopAllWorkers")
    expect(page.locator("#install-text")).to_have_text("The browser stopped the download; try again.")
    # The host goes on, if it came to the file: nobody may have asked for it before the download was stopped.
    with suppress(OSError):
        os.close(os.open(model, os.O_WRONLY | os.O_NONBLOCK))
    model.unlink()
    model.write_bytes(network)
    page.get_by_role("button", name="Try again").click()
    runs(page)
    assert seen(page, 2)


def test_a_version_that_does_not_run_is_replaced_by_a_better_one(device: Device, host: CountingHost) -> None:
    write_pack(host.folder, name="broken", outputs=[])
    page = device.installed(host)
    expect(page.locator("#notice")).to_contain_text("The app does not run: ")
    write_pack(host.folder, name="mended")
    page.reload()
    expect(page.locator("#update")).to_contain_text("It takes effect at the next start.", timeout=20_000)
    updated(device, host, "mended")


def test_an_older_version_of_the_same_signer_is_refused(device: Device, host: CountingHost) -> None:
    mine = Ed25519PrivateKey.generate()
    write_pack(host.folder, name="two", made={"when": "2026-02-01T00:00:00+00:00"})
    sign(host.folder, mine)
    page = device.installed(host)
    two = version_of(host.folder)
    for when in ("2026-01-31T23:59:59+00:00", "never"):
        write_pack(host.folder, name="one", made={"when": when})
        sign(host.folder, mine)
        page.reload()
        expect(page.locator("#update")).to_contain_text("this version is older than the one before", timeout=20_000)
        is_version(page, "two", two)
