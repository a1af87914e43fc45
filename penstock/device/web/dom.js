// Helpers for the document.

/** Create an element with properties and children (elements or text). */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set text only if it differs, which avoids needless layout and screen reader announcements. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Show an error above everything else. */
export function notice(sentence) {
  byId("notice").hidden = false;
  write(byId("notice"), sentence);
}

/** Format with two significant digits: 0.42 ms, 4.2 ms, 42 ms. */
export function milliseconds(ms) {
  if (ms === null) return "–";
  return `${ms < 1 ? ms.toFixed(2) : ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en")} ms`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
