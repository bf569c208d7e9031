// Maps of probabilities as pixels. A colour's opacity is the square root of the weight.

/** The largest probability under each pixel, as opacity from 0 to 255: thin lines stay visible. */
function pooled(pattern, rows, columns, { height, width }) {
  const largest = new Float32Array(height * width);
  const columnOf = Uint32Array.from({ length: columns }, (_, key) => Math.floor((key * width) / columns));
  for (let query = 0, cell = 0; query < rows; query += 1) {
    const start = Math.floor((query * height) / rows) * width;
    for (let key = 0; key < columns; key += 1, cell += 1) {
      const at = start + columnOf[key];
      if (pattern[cell] > largest[at]) largest[at] = pattern[cell];
    }
  }
  return Uint8ClampedArray.from(largest, (share) => 255 * Math.sqrt(share));
}

/** Draws opacities of one colour into a canvas of their size. */
function paint(canvas, opacities, { height, width }, colour) {
  const image = new ImageData(width, height);
  const pixels = new DataView(image.data.buffer);
  for (let index = 0; index < opacities.length; index += 1) pixels.setUint32(4 * index, colour + opacities[index]);
  canvas.width = width;
  canvas.height = height;
  contextOf(canvas).putImageData(image, 0, 0);
}

/** The colour of weights as a pixel that is quite transparent. */
function weightColour(stage) {
  const [red, green, blue] = numbersIn(colourOf(stage, "--weight"));
  return ((red << 24) | (green << 16) | (blue << 8)) >>> 0;
}

const screenPixels = (length) => Math.max(1, Math.round(length * (window.devicePixelRatio || 1)));
