// Charts in SVG. Every plot is 100 x 100 units, stretched to its box; lines keep their width, and labels are HTML beside it.

import { element, write } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

/** A round number that is not below a value, and not far above. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

/** The path with a name, made when it is first drawn. */
function path(svg, name) {
  const found = svg.querySelector(`.${name}`);
  if (found) return found;
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", name);
  svg.append(made);
  return made;
}

/** A line through points `[x, y]` in units; null for y breaks it. */
export function drawLine(svg, name, points) {
  let pen = "M";
  let line = "";
  for (const [x, y] of points) {
    if (y !== null) line += `${pen}${x.toFixed(2)} ${y.toFixed(2)}`;
    pen = y === null ? "M" : "L";
  }
  path(svg, name).setAttribute("d", line);
}

/** The area below such a line. */
export function drawArea(svg, name, points) {
  let area = "";
  let end = null; // where the area that is being drawn ends so far
  for (const [x, y] of [...points, [0, null]]) {
    if (y === null && end !== null) area += `L${end} 100Z`;
    if (y !== null) area += `${end === null ? `M${x.toFixed(2)} 100` : ""}L${x.toFixed(2)} ${y.toFixed(2)}`;
    end = y === null ? null : x.toFixed(2);
  }
  path(svg, name).setAttribute("d", area);
}

/** Horizontal lines at heights in units. */
export function drawLevels(svg, name, heights) {
  path(svg, name).setAttribute("d", heights.map((y) => `M0 ${y.toFixed(2)}H100`).join(""));
}

/** Bars side by side, each with a share of the full height. */
export function drawBars(svg, name, shares) {
  const step = 100 / shares.length;
  const bar = (share, index) => {
    const height = share > 0 ? Math.max(100 * share, 1.5) : 0;
    return `M${(index * step + step * 0.12).toFixed(2)} 100v${-height.toFixed(2)}h${(step * 0.76).toFixed(2)}V100Z`;
  };
  path(svg, name).setAttribute("d", shares.map(bar).join(""));
}

/** Labels of a y axis: `[height in units, text]`. */
export function labelLevels(box, labels) {
  match(box, labels.length).forEach((label, index) => {
    label.style.top = `${labels[index][0]}%`;
    write(label, labels[index][1]);
  });
}

/** Labels below bars. */
export function labelBars(box, labels) {
  match(box, labels.length).forEach((label, index) => write(label, labels[index]));
}

function match(box, length) {
  while (box.children.length > length) box.lastChild.remove();
  while (box.children.length < length) box.append(element("span"));
  return [...box.children];
}
