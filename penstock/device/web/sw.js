// Service worker: keeps one complete version of the app on the device, and answers all requests for its files.
//
// A version is the SHA-256 of its pack.json, given in this script's URL, sw.js?v=.... It is installed once every file has
// been downloaded and matches its hash in pack.json, and the signature is valid; otherwise the previous version stays. It
// takes over when no page of the previous version is open, so that no page gets files of two versions.

const VERSION = new URL(location).searchParams.get("v");
const ROOT = new URL("../", location).href; // the pack's folder
const NAME = `penstock ${ROOT} `; // prefix of its caches; other packs of this origin have other ones
const KEPT = NAME + VERSION;
const KEY = `${NAME}key`; // holds the public key that signed the first signed version
const GOLDEN = "golden.safetensors";
const MOST_GOLDEN_BYTES = 8e6; // larger examples, of large pictures, are not installed
const PAGE = "web/index.html";
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
const EMBEDDER = "cross-origin-embedder-policy";
// Headers of the host that are kept: they isolate the page, which allows more than one thread.
const HEADERS = ["content-security-policy", EMBEDDER, "cross-origin-opener-policy"];
// For workers, which follow the policy of their own file, not that of index.html.
const SCRIPT_POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'";
const NO_ROOM = "the browser has no room for it; free some space on this device, and try again.";

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));
self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  const path = url.origin + url.pathname;
  // Only the check for a new version and the index, which is versioned apart, go to the host.
  if (event.request.method !== "GET" || !path.startsWith(ROOT)) return;
  if (url.search === "?latest" || path.startsWith(`${ROOT}index/`)) return;
  event.respondWith(answer(path, event.request));
});

async function answer(path, { mode, url }) {
  const kept = await caches.match(path.endsWith("/web/") ? `${path}index.html` : path, { cacheName: KEPT });
  if (kept) return kept;
  if (mode === "navigate" && !(await caches.has(KEPT))) {
    // The browser evicted the files: load the page from the host and install again.
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
    if (signedBy !== null) await checkAge(pack);
    await keep("pack.json", bytes, response, VERSION);
    await keepFiles(needed(pack), await request(PAGE));
    await pin(signedBy);
  } catch (error) {
    // Unless this version is already active in another service worker.
    if (!self.registration.active?.scriptURL.endsWith(`?v=${VERSION}`)) await caches.delete(KEPT);
    await tell({ refused: error.name === "QuotaExceededError" ? NO_ROOM : error.message });
    throw error;
  }
}

/** Parse pack.json and verify its own hash, computed with zeros in place of the hash. */
async function parsed(bytes) {
  const text = new TextDecoder().decode(bytes);
  const pack = JSON.parse(text);
  const unsealed = new TextEncoder().encode(text.replace(pack.sha256, "0".repeat(64)));
  if ((await sha256(unsealed)) !== pack.sha256) throw new Error("pack.json is not the file that was written.");
  return pack;
}

/** The app's files, the network, vocabularies and recorded examples: [path, { sha256, bytes }] of each. */
function needed(pack) {
  const { file, step } = pack.models.fp32;
  const others = [file, step, pack.text?.vocabulary, pack.reply?.vocabulary].filter(Boolean);
  const lacking = others.find((path) => !pack.files[path]);
  if (lacking) throw new Error(`pack.json has no hash of ${lacking}.`);
  if (pack.files[GOLDEN]?.bytes <= MOST_GOLDEN_BYTES) others.push(GOLDEN);
  return Object.entries(pack.files).filter(([path]) => path.startsWith("web/") || others.includes(path));
}

/** Keep files; `page` is the host's response to the page as it is now. */
async function keepFiles(files, page) {
  const total = files.reduce((sum, [, { bytes }]) => sum + bytes, 0);
  let done = 0;
  const keepOne = async ([path, { sha256: expected, bytes: size }]) => {
    if (!(await keptBefore(path, expected, page))) {
      const { bytes, response } = await (path === PAGE ? whole(path, page) : fetched(path));
      if ((await sha256(bytes)) !== expected) throw new Error(`${path} does not match pack.json: its hash differs.`);
      await keep(path, bytes, response, expected);
    }
    done += size;
    await tell({ done, total });
  };
  // All downloads end before a failure is reported, so that nothing is cached after the cleanup.
  const ends = await Promise.allSettled(files.map(keepOne));
  const failed = ends.find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
}

async function request(path) {
  try {
    return await fetch(ROOT + path, { cache: "no-cache", credentials: "same-origin" });
  } catch {
    throw new Error(`${path} did not come: the host does not answer.`);
  }
}

const fetched = async (path) => whole(path, await request(path));

async function whole(path, response) {
  if (!response.ok) throw new Error(`${path} did not come: the host says ${response.status}.`);
  return { bytes: await response.arrayBuffer(), response };
}

/** Reuse a file that is unchanged from another version, unless it came with other policies than the page has now. */
async function keptBefore(path, hash, page) {
  if (path === PAGE) return false;
  const isScript = /\.m?js$/.test(path);
  for (const name of await caches.keys()) {
    if (!name.startsWith(NAME) || name === KEY) continue;
    const kept = await (await caches.open(name)).match(address(path));
    if (kept?.headers.get("x-sha256") !== hash) continue;
    // Browsers load no worker without this header into a page that has it.
    if (isScript && kept.headers.get(EMBEDDER) !== page.headers.get(EMBEDDER)) continue;
    if (name !== KEPT) await (await caches.open(KEPT)).put(address(path), kept);
    return true;
  }
  return false;
}

/** Cache a file; large files are hosted as X.gzip, because few hosts compress, and cached as X. */
async function keep(path, bytes, response, hash) {
  const headers = new Headers({ "content-type": type(path), "x-sha256": hash });
  for (const name of HEADERS) if (response.headers.has(name)) headers.set(name, response.headers.get(name));
  if (/\.m?js$/.test(path)) headers.append("content-security-policy", SCRIPT_POLICY);
  const body = path.endsWith(".gzip") ? new Response(bytes).body.pipeThrough(new DecompressionStream("gzip")) : bytes;
  await (await caches.open(KEPT)).put(address(path), new Response(body, { headers }));
}

const address = (path) => ROOT + path.replace(/\.gzip$/, "");
const type = (path) => TYPES[address(path).split(".").at(-1)] ?? "application/octet-stream";

/** Verify the signature of pack.json; return the signer's public key, or null if it is not signed. */
async function checkSignature(bytes) {
  const pinned = await (await (await caches.open(KEY)).match(ROOT))?.text();
  const response = await request("pack.sig");
  if (response.status === 404 && !pinned) return null;
  if (response.status === 404) throw new Error("this version is not signed, the one before was.");
  if (!response.ok) throw new Error(`pack.sig did not come: the host says ${response.status}.`);
  const { algorithm, public_key: key, signature } = await response.json();
  if (algorithm !== "Ed25519") throw new Error(`pack.sig is signed by ${algorithm}; this app knows Ed25519.`);
  if (pinned && pinned !== key) throw new Error("this version is signed with another key than the one before.");
  if (!(await isSignedBy(key, signature, bytes))) throw new Error("the signature in pack.sig is not of this pack.json.");
  return key;
}

/** Refuse a signed version that was made before one that is kept: a signature does not say that it is the newest. */
async function checkAge(pack) {
  for (const name of await caches.keys()) {
    if (!name.startsWith(NAME) || name === KEPT || name === KEY) continue;
    const kept = await (await caches.open(name)).match(`${ROOT}pack.json`);
    const before = kept && Date.parse((await kept.json()).made.when);
    if (before && !(Date.parse(pack.made.when) >= before)) throw new Error("this version is older than the one before.");
  }
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

/** Pin the signer: versions with another signature, or none, are refused from now on. */
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
