// The tiles of a picture under a dense network, and the finds in their maps, as `core/pictures/dense.py` has them.

/** The upper left corners of the cells of each tile that a picture needs; `tile` is height and width of the input. */
export function tilesOf(width, height, [down, across], margin) {
  const places = [];
  for (let top = 0; top < height; top += down - 2 * margin) {
    for (let left = 0; left < width; left += across - 2 * margin) places.push({ left, top });
  }
  return places;
}

/** Whether a tile, RGB, needs no run: every fourth pixel in both directions is bright in each colour. */
export function isEmpty({ empty_above: least }, pixels, [height, width]) {
  if (least === null) return false;
  for (let row = 0; row < height; row += 4) {
    for (let column = 0; column < width; column += 4) {
      const at = 3 * (row * width + column);
      if (pixels[at] < least || pixels[at + 1] < least || pixels[at + 2] < least) return false;
    }
  }
  return true;
}

/** Adds the cells of a map, flat `[h, w, K]`, with at least the threshold; `left` and `top` are those of its first cell. */
export function addCells(cells, { threshold, stride, labels }, map, columns, left, top) {
  const kinds = labels.length;
  map.forEach((score, at) => {
    if (!(score >= threshold)) return;
    const cell = Math.floor(at / kinds);
    const [row, column] = [Math.floor(cell / columns), cell % columns];
    cells.push({ kind: at % kinds, score, x: column * stride + left + stride / 2, y: row * stride + top + stride / 2 });
  });
}

/** The finds of the cells of a whole picture, from the highest score on: a cell belongs to the nearest one within `distance`. */
export function findsOf({ distance, labels }, cells) {
  const side = Math.max(distance, 1);
  const squares = new Map();
  const peaks = [];
  const order = (one, other) => other.score - one.score || one.kind - other.kind || one.y - other.y || one.x - other.x;
  for (const { kind, score, x, y } of [...cells].sort(order)) {
    const [column, row] = [Math.floor(x / side), Math.floor(y / side)];
    let best = null;
    for (const i of [-1, 0, 1]) {
      for (const j of [-1, 0, 1]) {
        for (const peak of squares.get(`${kind} ${column + i} ${row + j}`) ?? []) {
          const away = Math.hypot(peak.x - x, peak.y - y);
          if (best === null || away < best.away) best = { away, peak };
        }
      }
    }
    let peak = best?.peak;
    if (!best || best.away > distance) {
      peak = { kind, score, x, y, sum: 0, sumX: 0, sumY: 0 };
      const square = `${kind} ${column} ${row}`;
      squares.set(square, [...(squares.get(square) ?? []), peak]);
      peaks.push(peak);
    }
    peak.sum += score;
    peak.sumX += score * x;
    peak.sumY += score * y;
  }
  return peaks.map(({ kind, score, sum, sumX, sumY }) => ({ kind, label: labels[kind], score, x: sumX / sum, y: sumY / sum }));
}
