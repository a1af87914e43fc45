// Figures of each frame, from the app's event; `firstMs` is when the first one was shown.
window.frames = [];
document.addEventListener("penstock-frame", ({ detail }) => {
  window.firstMs ??= performance.now();
  const { answer, outputs, ...figures } = detail;
  window.frames.push(figures);
  if (window.frames.length > 100) window.frames.shift();
});
