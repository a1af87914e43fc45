// Keeps one version of the app whole on the device, and answers every request for its files from there.
//
// A version is the SHA-256 of its pack.json and stands in this script's own address, sw.js?v=.... It is installed when
// every file that it needs has come with the hash that pack.json says, and the signature is right; otherwise the version
// before stays. It takes over when no page of that one is open any more, so that no page ever sees files of two.

const VERSION = new URL(location).searchParams.get("v");
const ROOT = new URL("../", location).href; // the pack's folder
const NAME = `penstock ${ROOT} `; // of its caches: other packs of this origin have their own
const KEPT = NAME + VERSION;
const KEY = `${NAME}key`; // holds the public key that signed the first signed version
const TYPES = {
  css: "text/css",
  html: "text/html; charset=utf-8",
  js: "text/javascript",
  json: "application/json",
  mjs: "text/javascript",
  png: "image/png",
  svg: "image/svg+xml",
  txt: "text/plain; charset=utf-8",
  wasm: "application/wasm",
  webmanifest: "application/manifest+json",
};
// What of the host's headers is kept: how a page may be isolated, and so use more than one thread.
const HEADERS = ["content-security-policy", "cross-origin-embedder-policy", "cross-origin-opener-policy"];
// Of workers, whose policy is that of their own file: the page's, in index.html, does not bind them.
const SCRIPT_POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'";
const NO_ROOM = "the browser has no room for it; free some space on this device, and try again.";

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));
self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  const path = url.origin + url.pathname;
  // The host itself is asked for the latest pack.json alone. Of the index the page takes care, which is not of a version.
  if (event.request.method !== "GET" || !path.startsWith(ROOT)) return;
  if (url.search === "?latest" || path.startsWith(`${ROOT}index/`)) return;
  event.respondWith(answer(path, event.request));
});

async function answer(path, { mode, url }) {
  const kept = await caches.match(path.endsWith("/web/") ? `${path}index.html` : path, { cacheName: KEPT });
  if (kept) return kept;
  if (mode === "navigate" && !(await caches.has(KEPT))) {
    // The browser has thrown the files away: the page comes from the host, and the app is installed anew.
    await self.registration.unregister();
    return Response.redirect(url);
  }
  return new Response("This is no part of the app.", { status: 404 });
}

async function activate() {
  for (const name of await caches.keys()) {
    if (name.startsWith(NAME) && name !== KEPT && name !== KEY) await caches.delete(name);
  }
  await self.clients.claim();
}

async function install() {
  try {
    const { bytes, response } = await fetched("pack.json");
    if ((await sha256(bytes)) !== VERSION) throw new Error("pack.json has changed meanwhile; try again.");
    const pack = await parsed(bytes);
    const signedBy = await checkSignature(bytes);
    await keep("pack.json", bytes, response, VERSION);
    await keepFiles(needed(pack));
    await pin(signedBy);
  } catch (error) {
    // Another service worker of the same version may be the one that works.
    if (!self.registration.active?.scriptURL.endsWith(`?v=${VERSION}`)) await caches.delete(KEPT);
    await tell({ refused: error.name === "QuotaExceededError" ? NO_ROOM : error.message });
    throw error;
  }
}

/** pack.json names its own hash too: that of its bytes with zeros where the hash stands. */
async function parsed(bytes) {
  const text = new TextDecoder().decode(bytes);
  const pack = JSON.parse(text);
  const unsealed = new TextEncoder().encode(text.replace(pack.sha256, "0".repeat(64)));
  if ((await sha256(unsealed)) !== pack.sha256) throw new Error("pack.json is not the file that was written.");
  return pack;
}

/** The page's own files and the network: [path, { sha256, bytes }] of each. */
function needed(pack) {
  const model = pack.models.fp32.file;
  if (!pack.files[model]) throw new Error(`pack.json has no hash of ${model}.`);
  return Object.entries(pack.files).filter(([path]) => path.startsWith("web/") || path === model);
}

async function keepFiles(files) {
  const total = files.reduce((sum, [, { bytes }]) => sum + bytes, 0);
  let done = 0;
  const keepOne = async ([path, { sha256: expected, bytes: size }]) => {
    if (!(await keptBefore(path, expected))) {
      const { bytes, response } = await fetched(path);
      if ((await sha256(bytes)) !== expected) throw new Error(`${path} is not what pack.json says: its hash differs.`);
      await keep(path, bytes, response, expected);
    }
    done += size;
    await tell({ done, total });
  };
  // All of them end before any failure is told: nothing is kept behind the back of who cleans up.
  const ends = await Promise.allSettled(files.map(keepOne));
  const failed = ends.find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
}

async function asked(path) {
  try {
    return await fetch(ROOT + path, { cache: "no-cache", credentials: "same-origin" });
  } catch {
    throw new Error(`${path} did not come: the host does not answer.`);
  }
}

async function fetched(path) {
  const response = await asked(path);
  if (!response.ok) throw new Error(`${path} did not come: the host says ${response.status}.`);
  return { bytes: await response.arrayBuffer(), response };
}

/** What is unchanged since another version is not fetched again. */
async function keptBefore(path, hash) {
  for (const name of await caches.keys()) {
    if (!name.startsWith(NAME) || name === KEY) continue;
    const kept = await (await caches.open(name)).match(address(path));
    if (kept?.headers.get("x-sha256") !== hash) continue;
    if (name !== KEPT) await (await caches.open(KEPT)).put(address(path), kept);
    return true;
  }
  return false;
}

/** Hosts compress little of themselves: what is large comes as X.gzip, and is kept as X. */
async function keep(path, bytes, response, hash) {
  const headers = new Headers({ "content-type": type(path), "x-sha256": hash });
  for (const name of HEADERS) if (response.headers.has(name)) headers.set(name, response.headers.get(name));
  if (/\.m?js$/.test(path)) headers.append("content-security-policy", SCRIPT_POLICY);
  const body = path.endsWith(".gzip") ? new Response(bytes).body.pipeThrough(new DecompressionStream("gzip")) : bytes;
  await (await caches.open(KEPT)).put(address(path), new Response(body, { headers }));
}

const address = (path) => ROOT + path.replace(/\.gzip$/, "");
const type = (path) => TYPES[address(path).split(".").at(-1)] ?? "application/octet-stream";

/** The public key that signed these bytes of pack.json, or null where nobody did. */
async function checkSignature(bytes) {
  const pinned = await (await (await caches.open(KEY)).match(ROOT))?.text();
  const response = await asked("pack.sig");
  if (response.status === 404 && !pinned) return null;
  if (response.status === 404) throw new Error("this version is not signed, the one before was.");
  if (!response.ok) throw new Error(`pack.sig did not come: the host says ${response.status}.`);
  const { algorithm, public_key: key, signature } = await response.json();
  if (algorithm !== "Ed25519") throw new Error(`pack.sig is signed by ${algorithm}; this app knows Ed25519.`);
  if (pinned && pinned !== key) throw new Error("this version is signed with another key than the one before.");
  if (!(await isSignedBy(key, signature, bytes))) throw new Error("the signature in pack.sig is not of this pack.json.");
  return key;
}

async function isSignedBy(key, signature, bytes) {
  let publicKey;
  try {
    publicKey = await crypto.subtle.importKey("raw", decoded(key), { name: "Ed25519" }, false, ["verify"]);
  } catch (error) {
    if (error.name !== "NotSupportedError") return false;
    throw new Error("this browser cannot check signatures (Ed25519); a newer one can.");
  }
  return crypto.subtle.verify({ name: "Ed25519" }, publicKey, decoded(signature), bytes);
}

/** From now on no version that is signed by another, or by nobody, is taken. */
async function pin(key) {
  if (key !== null) await (await caches.open(KEY)).put(ROOT, new Response(key));
}

async function sha256(bytes) {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function tell(message) {
  const pages = await self.clients.matchAll({ includeUncontrolled: true });
  for (const page of pages) page.postMessage({ version: VERSION, ...message });
}

const decoded = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
