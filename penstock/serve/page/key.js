// The API key of a server that wants one: asked for once, kept as long as the tab is open, never shown.

import { byId, write } from "./dom.js";

const PLACE = "penstock-api-key";

let asking = null;

/** The key that was entered, or null. */
export const apiKey = () => sessionStorage.getItem(PLACE);

/** Resolves when there is another key than the one that the server refused; all who wait are asked once. */
export async function anotherKey(refused) {
  if (apiKey() !== refused) return;
  asking ??= ask(refused);
  try {
    await asking;
  } finally {
    asking = null;
  }
}

function ask(refused) {
  const [dialog, field] = [byId("key-dialog"), byId("key")];
  write(byId("key-problem"), refused === null ? "" : "This server does not know that key.");
  write(byId("connection"), "needs a key");
  byId("connection").dataset.state = "waiting";
  field.value = "";
  // What is copied often comes with a space or a line end.
  field.oninput = () => (field.value = field.value.trim());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.querySelector("form").onsubmit = () => {
      sessionStorage.setItem(PLACE, field.value);
      field.value = "";
      resolve();
    };
    dialog.oncancel = () => {
      write(byId("notice"), "This server requires an API key. Reload the page to enter one.");
      byId("notice").hidden = false;
    };
  });
}
