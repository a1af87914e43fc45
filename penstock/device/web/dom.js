// The few things that every part of the app does with the document.

/** A new element. Properties are set as they are; children are elements or text. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Text that changes only when it differs, so that nothing is laid out or announced anew without need. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Says what does not work, above all else. */
export function notice(sentence) {
  byId("notice").hidden = false;
  write(byId("notice"), sentence);
}

/** 0.42 ms, 4.2 ms, 42 ms: two digits that matter. */
export function milliseconds(ms) {
  if (ms === null) return "–";
  return `${ms < 1 ? ms.toFixed(2) : ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en")} ms`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
