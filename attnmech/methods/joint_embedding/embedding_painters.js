// Draws the points of all heads of joint embeddings on one canvas, with WebGL2 in one draw call, from textures. Heads
// share their tokens, so a search or a new colour changes a texture of a few bytes per token, never the positions.

const EMBEDDING_WIDTH = 2048; // of textures; longer ones are wrapped
const [MISSED, UNSOUGHT, FOUND] = [0, 128, 255]; // of a token, in the alpha of its colour

const EMBEDDING_VERTICES = `#version 300 es
  precision highp float;
  precision highp int;
  uniform highp usampler2D positions; // of each head's points: x, y, z and norm
  uniform highp sampler2D cells; // of each plot: left, top, head
  uniform highp sampler2D tokens; // of each point: colour, and whether it matches the search
  uniform highp sampler2D others; // colours of norms, or of heads
  uniform ivec4 at; // first plot, points of a head, what colours show, point that is marked
  uniform vec4 view; // what is in view of the content: left, top, width, height
  uniform vec4 dots; // side of a plot, size, opacity, device pixels
  uniform vec4 ink;
  flat out vec4 colour;

  ivec2 place(int index) {
    return ivec2(index % ${EMBEDDING_WIDTH}, index / ${EMBEDDING_WIDTH});
  }

  void main() {
    vec4 cell = texelFetch(cells, place(at.x + gl_InstanceID), 0);
    int head = int(cell.z);
    uvec4 point = texelFetch(positions, place(head * at.y + gl_VertexID), 0);
    vec4 token = texelFetch(tokens, place(gl_VertexID), 0);
    bool marked = gl_VertexID == at.w;
    bool missed = token.a < 0.25;
    bool found = token.a > 0.75;
    vec3 shown = at.z == 0 ? token.rgb : texelFetch(others, place(at.z == 1 ? int(point.w >> 8) : head), 0).rgb;
    float opacity = marked || found ? 1.0 : missed ? 0.3 * dots.z : dots.z;
    vec3 grey = vec3(0.53);
    colour = vec4((marked ? ink.rgb : missed ? grey : shown) * opacity, opacity);
    vec2 corner = vec2(float(point.x), ${2 * HALF_RANGE}.0 - float(point.y)) / ${2 * HALF_RANGE}.0;
    vec2 pixel = cell.xy - view.xy + dots.x * (0.04 + 0.92 * corner);
    float depth = marked ? -0.9 : found ? -0.5 : 0.5;
    gl_Position = vec4(2.0 * pixel / view.zw - 1.0, depth, 1.0) * vec4(1.0, -1.0, 1.0, 1.0);
    if (point.x > ${2 * HALF_RANGE}u) gl_Position = vec4(2.0, 2.0, 2.0, 1.0);
    gl_PointSize = dots.w * (marked ? 1.8 * dots.y + 3.0 : found ? 1.6 * dots.y : dots.y);
  }`;

const EMBEDDING_FRAGMENTS = `#version 300 es
  precision mediump float;
  flat in vec4 colour;
  out vec4 pixel;
  void main() { pixel = colour; }`;

/**
 * Draws plots with WebGL2; null without WebGL2.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{heads: number, points: number, order: number[]}} sizes
 */
function embeddingInGl(canvas, { heads, points, order }) {
  const options = { antialias: false, preserveDrawingBuffer: true, powerPreference: "high-performance" };
  const found = canvas.getContext("webgl2", options);
  if (!found) return null;
  const gl = /** @type {WebGL2RenderingContext} */ (found);
  const names = ["positions", "cells", "tokens", "others"];
  /** @type {Record<string, WebGLUniformLocation | null>} */
  let places = {};
  begin();

  function begin() {
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, EMBEDDING_VERTICES], [gl.FRAGMENT_SHADER, EMBEDDING_FRAGMENTS]]) {
      const shader = /** @type {WebGLShader} */ (gl.createShader(/** @type {number} */ (kind)));
      gl.shaderSource(shader, /** @type {string} */ (source));
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program) ?? "no program");
    gl.useProgram(program);
    places = Object.fromEntries(["at", "view", "dots", "ink"].map((name) => [name, gl.getUniformLocation(program, name)]));
    names.forEach((name, unit) => {
      gl.activeTexture(gl.TEXTURE0 + unit);
      gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
      for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, filter, gl.NEAREST);
      gl.uniform1i(gl.getUniformLocation(program, name), unit);
    });
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    gl.enable(gl.DEPTH_TEST);
    gl.depthFunc(gl.LEQUAL);
  }

  /** Fills a texture of four channels; `values` may end within the last row. */
  function fill(name, inside, format, type, values) {
    const rows = Math.max(1, Math.ceil(values.length / 4 / EMBEDDING_WIDTH));
    const whole = new values.constructor(4 * EMBEDDING_WIDTH * rows);
    whole.set(values);
    gl.activeTexture(gl.TEXTURE0 + names.indexOf(name));
    gl.texImage2D(gl.TEXTURE_2D, 0, inside, EMBEDDING_WIDTH, rows, 0, format, type, whole);
  }

  return {
    restored: begin,
    /** @param {Cloud} cloud @param {Uint16Array} norms */
    positions({ codes, dims }, norms) {
      const values = new Uint16Array(4 * heads * points);
      for (let head = 0, to = 0; head < heads; head += 1) {
        for (let index = 0; index < points; index += 1, to += 4) {
          const from = head * points + order[index];
          for (let axis = 0; axis < dims; axis += 1) values[to + axis] = codes[from * dims + axis];
          values[to + 3] = norms[from];
        }
      }
      fill("positions", gl.RGBA16UI, gl.RGBA_INTEGER, gl.UNSIGNED_SHORT, values);
    },
    cells: (values) => fill("cells", gl.RGBA32F, gl.RGBA, gl.FLOAT, values),
    /** @param {Uint8Array} colours @param {Uint8Array} others */
    colours(colours, others) {
      fill("tokens", gl.RGBA8, gl.RGBA, gl.UNSIGNED_BYTE, colours);
      fill("others", gl.RGBA8, gl.RGBA, gl.UNSIGNED_BYTE, others);
    },
    /** @param {EmbeddingFrame} frame */
    draw({ first, count, shown, mode, marked, view, dots, ink }) {
      gl.viewport(0, 0, canvas.width, canvas.height);
      gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
      gl.uniform4i(places.at, first, points, mode, marked < 0 ? -1 : order.indexOf(marked));
      gl.uniform4f(places.view, ...view);
      gl.uniform4f(places.dots, ...dots);
      gl.uniform4f(places.ink, ink[0] / 255, ink[1] / 255, ink[2] / 255, 1);
      if (count) gl.drawArraysInstanced(gl.POINTS, 0, shown, count);
    },
  };
}

/**
 * Draws fewer points, pixel by pixel, without WebGL2; it has the same methods.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{points: number, order: number[]}} sizes
 */
function embeddingInPixels(canvas, { points, order }) {
  /** @type {{codes: Uint16Array, dims: number, norms: Uint16Array, cells: Float32Array, colours: Uint8Array, others: Uint8Array}} */
  const given = { codes: new Uint16Array(), dims: 2, norms: new Uint16Array(), cells: new Float32Array(), colours: new Uint8Array(), others: new Uint8Array() };
  return {
    restored() {},
    positions: ({ codes, dims }, norms) => Object.assign(given, { codes, dims, norms }),
    cells: (cells) => Object.assign(given, { cells }),
    colours: (colours, others) => Object.assign(given, { colours, others }),
    /** @param {EmbeddingFrame} frame */
    draw({ first, count, shown, mode, marked, view, dots, ink }) {
      const { codes, dims, norms, cells, colours, others } = given;
      const [side, size, , ratio] = dots;
      const context = contextOf(canvas);
      const image = new ImageData(Math.max(1, canvas.width), Math.max(1, canvas.height));
      const pixels = new DataView(image.data.buffer);

      function square(cell, from, colour, wide) {
        const x = cells[cell] - view[0] + side * (0.04 + (0.92 * codes[from * dims]) / (2 * HALF_RANGE));
        const y = cells[cell + 1] - view[1] + side * (0.96 - (0.92 * codes[from * dims + 1]) / (2 * HALF_RANGE));
        const across = Math.max(1, Math.round(wide * ratio));
        const [left, top] = [Math.round(x * ratio - across / 2), Math.round(y * ratio - across / 2)];
        for (let row = Math.max(0, top); row < Math.min(image.height, top + across); row += 1) {
          for (let column = Math.max(0, left); column < Math.min(image.width, left + across); column += 1) {
            pixels.setUint32(4 * (row * image.width + column), colour);
          }
        }
      }

      for (const wanted of [MISSED, UNSOUGHT, FOUND]) {
        for (let slot = first; slot < first + count; slot += 1) {
          const head = cells[4 * slot + 2];
          for (let index = 0; index < (wanted === FOUND ? points : shown); index += 1) {
            if (colours[4 * index + 3] !== wanted) continue;
            const from = head * points + order[index];
            if (codes[from * dims] === NO_VALUE) continue;
            const at = 4 * (mode === 0 ? index : mode === 1 ? norms[from] >> 8 : head);
            const [table, start] = mode === 0 ? [colours, at] : [others, at];
            const colour = ((table[start] << 24) | (table[start + 1] << 16) | (table[start + 2] << 8) | 255) >>> 0;
            square(4 * slot, from, wanted === MISSED ? 0x88888855 : colour, wanted === FOUND ? 1.6 * size : size);
          }
        }
      }
      if (marked >= 0) {
        const colour = ((ink[0] << 24) | (ink[1] << 16) | (ink[2] << 8) | 255) >>> 0;
        for (let slot = first; slot < first + count; slot += 1) square(4 * slot, cells[4 * slot + 2] * points + marked, colour, 1.8 * size + 3);
      }
      context.putImageData(image, 0, 0);
    },
  };
}
