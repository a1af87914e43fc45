// JSON of any length: short values in a line, long ones folded, each opened on demand.

import { element } from "./dom.js";

const ONE_LINE = 100;
const AT_ONCE = 100; // items that are opened together

/** A tree of a JSON value; nothing is cut off. */
export function jsonTree(value, name = null) {
  const line = shortLine(value);
  const label = name === null ? "" : `${JSON.stringify(name)}: `;
  if (line !== null) return element("div", { className: "json" }, label + line);
  const keys = Array.isArray(value) ? null : Object.keys(value);
  const count = (keys ?? value).length;
  const kind = keys ? `{ ${count.toLocaleString("en")} fields }` : `[ ${count.toLocaleString("en")} items ]`;
  const made = element("details", { className: "json" }, element("summary", {}, label + kind));
  const item = (at) => (keys ? jsonTree(value[keys[at]], keys[at]) : jsonTree(value[at], at));
  made.addEventListener("toggle", () => made.open && fill(made, count, item), { once: true });
  return made;
}

function fill(into, count, item) {
  const from = into.children.length - 1;
  const to = Math.min(count, from + AT_ONCE);
  for (let at = from; at < to; at++) into.append(item(at));
  if (to === count) return;
  const more = element("button", { type: "button" }, `${(count - to).toLocaleString("en")} more`);
  more.addEventListener("click", () => {
    more.remove();
    fill(into, count, item);
  });
  into.append(more);
}

/** The value on one line, or null if that is long or deep. */
function shortLine(value) {
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if ((Array.isArray(value) ? value : Object.keys(value)).length > ONE_LINE / 2) return null;
  const line = JSON.stringify(value);
  return line.length <= ONE_LINE ? line : null;
}
