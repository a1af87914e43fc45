// The few things that every part of the page does with the document.

/** A new element. Properties are set as they are; children are elements or text. */
export function element(tag, properties = {}, ...children) {
  const { data, aria, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(aria ?? {})) made.setAttribute(`aria-${name}`, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Text that changes only when it differs, so that nothing is laid out or announced anew without need. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Resolves at once while the tab is shown, otherwise as soon as it is. */
export function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", function look() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    });
  });
}

/** 0.42 ms, 4.2 ms, 42 ms: two digits that matter. */
export function milliseconds(ms) {
  if (ms === null) return "–";
  return `${ms < 1 ? ms.toFixed(2) : ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en")} ms`;
}

/** A whole number with separators; below ten, and not whole, with one decimal. */
export function count(number) {
  if (number === null) return "–";
  return number < 10 && !Number.isInteger(number) ? number.toFixed(1) : Math.round(number).toLocaleString("en");
}
