// Install a complete, verified version of the app on the device, and start it.

import { byId, notice, write } from "./dom.js";
import { sha256 } from "./hash.js";

const ONCE = "penstock-reloaded";
const REPLACED = "penstock-replaced";
const MIXED = "penstock-mixed";

/** SHA-256 of the host's current pack.json. */
async function latestVersion() {
  const response = await fetch("../pack.json?latest", { cache: "no-store" });
  if (!response.ok) throw new Error(`The host has no pack.json here: it says ${response.status}.`);
  return sha256(await response.arrayBuffer());
}

const versionOf = (worker) => new URL(worker.scriptURL).searchParams.get("v");
const register = (version) => navigator.serviceWorker.register(`sw.js?v=${version}`, { updateViaCache: "none" });

/** Reload the page, so that all of it comes from the installed files. */
function reload() {
  if (sessionStorage.getItem(ONCE)) {
    return fail("The browser does not let the app take over this page. Close it, and open it again.");
  }
  sessionStorage.setItem(ONCE, "yes");
  location.reload();
}

/** Reload a page whose version was replaced, once: the next one is of the new version. */
function reloadIfReplaced(worker) {
  if (worker.state !== "redundant") return sessionStorage.removeItem(REPLACED);
  if (sessionStorage.getItem(REPLACED)) return;
  sessionStorage.setItem(REPLACED, "yes");
  location.reload();
}

/**
 * Reload a page that gets its files from the host, once: a browser may stop the worker of a version, for the next one to
 * take over, while a page of it is being opened. Return whether it is reloaded.
 */
async function reloadIfMixed(version) {
  let served;
  try {
    const response = await fetch("../pack.json");
    served = await sha256(await response.arrayBuffer());
  } catch {
    served = null; // the host is not there
  }
  if (served === version) sessionStorage.removeItem(MIXED);
  if (served === version || sessionStorage.getItem(MIXED)) return false;
  sessionStorage.setItem(MIXED, "yes");
  location.reload();
  return true;
}

function fail(sentence) {
  byId("install").hidden = false;
  byId("install-bar").hidden = true;
  byId("install-retry").hidden = false;
  write(byId("install-text"), sentence);
}

async function install() {
  const { serviceWorker } = navigator;
  byId("install").hidden = false;
  // A page that bypassed the service worker (Shift and reload) is reloaded.
  const registration = await serviceWorker.getRegistration();
  if (registration?.active) return reload();
  serviceWorker.addEventListener("controllerchange", reload, { once: true });
  let version;
  serviceWorker.addEventListener("message", ({ data }) => {
    if (data.version !== version) return; // from another app on this host
    if (data.refused) return fail(`The app was not installed: ${data.refused}`);
    byId("install-bar").value = data.done / data.total;
    write(byId("install-text"), `Downloading the app: ${megabytes(data.done)} of ${megabytes(data.total)} MB`);
  });
  try {
    version = await latestVersion();
  } catch (error) {
    return fail(error instanceof TypeError ? "The host does not answer." : error.message);
  }
  const { installing } = await register(version);
  installing?.addEventListener("statechange", () => {
    const reported = !byId("install-retry").hidden;
    if (installing.state === "redundant" && !reported) fail("The browser stopped the download; try again.");
  });
}

const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

/** Look for a newer version while this one runs; it takes effect at the next start. */
async function lookForNewer() {
  const { serviceWorker } = navigator;
  const mine = versionOf(serviceWorker.controller);
  write(byId("version"), mine.slice(0, 8));
  let version;
  try {
    version = await latestVersion();
  } catch {
    return write(byId("update"), "The host is not there; the app does without.");
  }
  if (version === mine) return write(byId("update"), "This is the latest version.");
  serviceWorker.addEventListener("message", ({ data }) => {
    if (data.version === version && data.refused) write(byId("update"), `A new version was refused: ${data.refused}`);
  });
  let registration;
  try {
    registration = await register(version);
  } catch (error) {
    return write(byId("update"), `A new version did not come: ${error.message}`);
  }
  const newer = registration.installing ?? registration.waiting;
  const look = () => {
    if (newer?.state === "installed") {
      write(byId("update"), `A new version, ${version.slice(0, 8)}, is here. It takes effect at the next start.`);
    }
  };
  newer?.addEventListener("statechange", look);
  look();
}

async function start() {
  byId("install-retry").addEventListener("click", () => location.reload());
  if (!window.isSecureContext) {
    return fail("Browsers let a page use the camera over https:// or at localhost alone; this one came otherwise.");
  }
  if (!navigator.serviceWorker) {
    return fail("This browser keeps no apps on the device (service workers), as in some private windows. Use another.");
  }
  if (!navigator.serviceWorker.controller) return install();
  sessionStorage.removeItem(ONCE);
  // Another version may take over while this page is being opened, if the last page of the old one was just closed.
  navigator.serviceWorker.addEventListener("controllerchange", () => location.reload(), { once: true });
  // A page that was not ready at that moment gets no such event, and would show files of both.
  const { controller } = navigator.serviceWorker;
  controller.addEventListener("statechange", () => reloadIfReplaced(controller));
  reloadIfReplaced(controller);
  const version = versionOf(controller);
  if (await reloadIfMixed(version)) return;
  try {
    const { run } = await import("./app.js");
    // If pack.json is still of this version, all modules before it were, too.
    if (await reloadIfMixed(version)) return;
    await run();
  } catch (error) {
    notice(`The app does not run: ${error.message}`);
  }
  // Even if this version fails, so that a fixed one can be installed.
  await lookForNewer();
}

try {
  await start();
} catch (error) {
  fail(`The browser does not keep the app on this device: ${error.message}`);
}
