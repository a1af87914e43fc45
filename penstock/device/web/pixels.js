// Recorded pictures: their numbers as pixels.

/** The ImageData of a picture, `{ values, shape }`: grey, RGB or RGBA, row by row. */
export function imageOf({ values, shape: [height, width, channels = 1] }) {
  if (channels === 4) return new ImageData(new Uint8ClampedArray(values), width, height);
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let channel = 0; channel < 3; channel++) image.data[4 * pixel + channel] = values[channels * pixel + Math.min(channel, channels - 1)];
    image.data[4 * pixel + 3] = 255;
  }
  return image;
}

/** A canvas with an ImageData, opaque, as the network ignores what is transparent. */
export function pictureOf(image) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: image.width, height: image.height });
  const opaque = new ImageData(image.data.slice(), image.width, image.height);
  for (let at = 3; at < opaque.data.length; at += 4) opaque.data[at] = 255;
  canvas.getContext("2d").putImageData(opaque, 0, 0);
  return canvas;
}
