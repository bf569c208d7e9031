// All heads of joint embeddings as small plots in one canvas: with WebGL2 in one draw call, from textures. The heads
// share their tokens, so a search or another colour changes a texture with a few bytes a token, never the positions.

const EMBEDDING_WIDTH = 2048; // of textures; longer ones are wrapped
const MOVING = 50000; // points drawn while the plots move, at first; then as many as the machine can
const FRAME = [22, 40]; // milliseconds: in less, more points can be drawn; in more, there are too many
const MOST_WITHOUT_GL = 100000; // points drawn without WebGL2
const STILL = 160; // milliseconds after which all points are drawn
const [MISSED, UNSOUGHT, FOUND] = [0, 128, 255]; // of a token, in the alpha of its colour

const EMBEDDING_VERTICES = `#version 300 es
  precision highp float;
  precision highp int;
  uniform highp usampler2D positions; // of each head's points: x, y, z and norm
  uniform highp sampler2D cells; // of each plot: left, top, head
  uniform highp sampler2D tokens; // of each point: colour, and whether it was found
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
 * Draws plots with WebGL2; null where there is none.
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

  /** Fills a texture of four channels; `values` may end before its last row does. */
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
 * Draws fewer points, pixel by pixel, where there is no WebGL2: the same calls.
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

/**
 * The plots of all heads. `pick(block)` hears which one a reader takes, `describe(block)` are the words at the pointer.
 *
 * @param {HTMLElement} stage
 * @param {EmbeddingData} data
 * @param {EmbeddingTokens} tokens
 * @param {{pick(block: number): void, describe(block: number): string[], norms: Uint16Array}} page
 */
function embeddingMatrix(stage, data, tokens, { pick, describe, norms }) {
  const [GUTTER, HEADER, GAP, CAPTION] = [34, 22, 4, 17];
  const { places, layers } = data;
  const heads = 1 + Math.max(...places.map(([, head]) => head));
  const points = 2 * tokens.count;
  const order = mixed(tokens.count).flatMap((token) => [token, token + tokens.count]); // no kind covers the other

  const canvas = make("canvas", { "aria-hidden": "true", className: "attnmech-embedding-plots" });
  const names = make("div", { className: "attnmech-embedding-heads", "aria-hidden": "true" });
  const numbers = make("div", { className: "attnmech-embedding-layers", "aria-hidden": "true" });
  const content = make("div", { className: "attnmech-embedding-cells", role: "group", "aria-label": "all heads; the arrow keys move between them" });
  const box = make("div", { className: "attnmech-embedding-matrix" }, canvas, content, names, numbers);
  const note = make("p", { className: "attnmech-reading" });
  const element = make("div", {}, note, box);

  const sizes = { heads: places.length, points, order };
  const inGl = embeddingInGl(canvas, sizes);
  const painter = inGl ?? embeddingInPixels(canvas, sizes);

  const buttons = places.map(([layer, head]) => {
    const name = `layer ${layers[layer]}, head ${head}`;
    return make("button", { type: "button", tabindex: -1, "aria-label": name, "aria-pressed": "false" }, make("span"));
  });
  const blockOf = new Map(buttons.map((button, block) => [button, block]));
  content.append(...buttons);

  /** What was last asked for. */
  let asked = { chosen: 0, marked: -1, size: 1, ranked: /** @type {number[] | null} */ (null), captions: /** @type {string[]} */ ([]) };
  let slots = /** @type {{block: number, x: number, y: number}[]} */ ([]);
  let side = 40;
  let across = heads;
  let mode = 0;
  let still = 0;
  let printing = false;
  let frames = 0; // drawn so far
  let budget = MOVING;
  let lastMoving = -Infinity;
  const drawMoving = inNextFrame(() => {
    const gap = performance.now() - lastMoving;
    lastMoving += gap;
    if (gap < FRAME[0]) budget = Math.min(1.2 * budget, points * places.length);
    else if (gap > FRAME[1] && gap < STILL) budget = Math.max(0.7 * budget, MOVING / 4);
    draw(false);
  });

  // ---- where each plot stands -------------------------------------------------------------------------------

  function arrange() {
    const { size, ranked, captions } = asked;
    const room = box.clientWidth - (ranked ? GAP : GUTTER) - 2;
    const least = ranked ? 76 : 26;
    const wanted = ranked ? 100 : Math.min(180, room / heads - GAP);
    side = Math.floor(Math.max(least, wanted * size));
    const caption = captions.length && side >= 44 ? CAPTION : 0;
    const step = side + GAP;
    across = ranked ? Math.max(1, Math.floor(room / step)) : heads;
    const left = ranked ? GAP : GUTTER;
    const top = ranked ? GAP : HEADER;
    const blocks = ranked ?? range(places.length);
    slots = blocks.map((block, index) => {
      const [row, column] = ranked ? [Math.floor(index / across), index % across] : places[block];
      return { block, x: left + column * step, y: top + row * (step + caption) };
    });
    const cells = new Float32Array(4 * slots.length);
    slots.forEach(({ block, x, y }, slot) => {
      const { style } = buttons[block];
      Object.assign(style, { left: `${x}px`, top: `${y}px`, width: `${side}px`, height: `${side}px` });
      cells.set([x, y, block, 0], 4 * slot);
      const label = /** @type {HTMLElement} */ (buttons[block].firstChild);
      const [layer, head] = places[block];
      label.textContent = caption ? `${ranked ? `L${layers[layer]}H${head} ` : ""}${captions[block]}` : "";
    });
    const last = slots[slots.length - 1];
    content.style.height = `${last.y + side + caption + GAP}px`;
    content.style.width = `${left + across * step}px`;
    names.hidden = numbers.hidden = ranked !== null;
    names.replaceChildren(
      make("span", { text: "layer ↓ head →", className: "attnmech-embedding-corner" }),
      ...range(heads).map((head) => make("span", { text: head, style: `left:${GUTTER + head * step}px;width:${side}px` })),
    );
    names.style.width = content.style.width;
    numbers.replaceChildren(
      ...layers.map((layer, row) => make("span", { text: layer, style: `top:${HEADER + row * (step + caption)}px;height:${side}px` })),
    );
    painter.cells(cells);
    content.classList.toggle("attnmech-embedding-ranked", ranked !== null);
  }

  // ---- drawing ----------------------------------------------------------------------------------------------

  /** Few points while things move; all of them once they are still. */
  function moved() {
    follow();
    drawMoving();
    clearTimeout(still);
    still = window.setTimeout(() => draw(true), STILL);
  }

  function follow() {
    names.style.transform = `translateY(${box.scrollTop}px)`;
    numbers.style.transform = `translateX(${box.scrollLeft}px)`;
  }

  function draw(whole) {
    const [width, height] = printing ? [content.offsetWidth, content.offsetHeight] : [box.clientWidth, box.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    const [across_, down] = [width, height].map((length) => Math.max(1, Math.round(length * ratio)));
    if (canvas.width !== across_ || canvas.height !== down) {
      Object.assign(canvas, { width: across_, height: down });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px`, marginBottom: `-${height}px` });
    }
    const top = printing ? 0 : box.scrollTop;
    const first = slots.findIndex(({ y }) => y + side > top);
    const after = slots.findIndex(({ y }) => y >= top + height);
    const count = (after < 0 ? slots.length : after) - Math.max(0, first);
    const most = inGl ? (whole ? Infinity : budget) : MOST_WITHOUT_GL / (whole ? 1 : 2);
    const shown = Math.min(points, 2 * Math.max(10, Math.floor(most / 2 / Math.max(1, count))));
    const size = Math.min(5, Math.max(1.2, side / 45));
    const opacity = Math.min(0.9, Math.max(0.3, (1.5 * side * side) / (shown * size * size)));
    const ink = numbersIn(colourOf(stage, "--ink"));
    /** @type {EmbeddingFrame["view"]} */
    const view = [printing ? 0 : box.scrollLeft, top, width, height];
    painter.draw({ first: Math.max(0, first), count, shown, mode, marked: asked.marked, view, dots: [side, size, opacity, ratio], ink });
    const sampled_ = whole && shown < points;
    note.textContent = inGl
      ? ""
      : `This browser offers no WebGL2: the small plots show ${sampled_ ? `${(shown / 2).toLocaleString("en")} of the ${tokens.count.toLocaleString("en")} tokens` : "all tokens"}, without transparency. The large plot shows all.`;
    frames += 1;
  }

  // ---- choosing ---------------------------------------------------------------------------------------------

  function mark(block) {
    for (const button of content.querySelectorAll('[aria-pressed="true"]')) button.setAttribute("aria-pressed", "false");
    for (const button of content.querySelectorAll('[tabindex="0"]')) button.setAttribute("tabindex", "-1");
    buttons[block].setAttribute("aria-pressed", "true");
    buttons[block].tabIndex = 0;
  }

  /** @param {Event} event */
  const blockAt = ({ target }) =>
    blockOf.get(/** @type {HTMLButtonElement} */ (/** @type {Element} */ (target).closest("button")));

  /** The plot beside one, in a direction; itself at an edge. */
  function neighbour(block, key) {
    const here = slots.findIndex((slot) => slot.block === block);
    const { x, y } = slots[here];
    const found = {
      ArrowLeft: slots[here - 1],
      ArrowRight: slots[here + 1],
      ArrowUp: slots.findLast((slot) => slot.x === x && slot.y < y),
      ArrowDown: slots.find((slot) => slot.x === x && slot.y > y),
      Home: slots[0],
      End: slots.at(-1),
    };
    return key in found ? (found[key] ?? slots[here]).block : undefined;
  }

  box.addEventListener("scroll", () => {
    pointed.hide();
    moved();
  });
  content.addEventListener("click", (event) => {
    const block = blockAt(event);
    if (block !== undefined) pick(block);
  });
  content.addEventListener("keydown", (event) => {
    const block = blockAt(event);
    if (block === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = neighbour(block, event.key);
    if (next === undefined) return;
    event.preventDefault();
    pick(next);
    buttons[next].focus();
  });
  const pointed = pointerBox(stage);
  content.addEventListener("pointermove", (event) => {
    const block = blockAt(event);
    if (block === undefined) pointed.hide();
    else pointed.show(event, describe(block));
  });
  content.addEventListener("pointerleave", pointed.hide);
  canvas.addEventListener("webglcontextlost", (event) => event.preventDefault());

  let cloudShown = /** @type {Cloud | null} */ (null);
  let dyes = /** @type {[Uint8Array, Uint8Array] | null} */ (null);
  canvas.addEventListener("webglcontextrestored", () => {
    painter.restored();
    if (cloudShown) painter.positions(cloudShown, norms);
    if (dyes) painter.colours(...dyes);
    refresh();
  });

  function refresh() {
    arrange();
    draw(true);
  }

  return {
    element,
    refresh,
    /** @param {Cloud} cloud */
    positions(cloud) {
      cloudShown = cloud;
      painter.positions(cloud, norms);
      if (slots.length) moved();
    },
    /** Another colour or search: a few bytes a token. @param {Colouring} colouring @param {Set<number> | null} hits */
    colours({ by, rgb }, hits) {
      mode = { token: 0, norm: 1, head: 2 }[by];
      const colours = new Uint8Array(4 * points);
      order.forEach((point, index) => {
        if (by === "token") colours.set(rgb.subarray(3 * point, 3 * point + 3), 4 * index);
        colours[4 * index + 3] = hits === null ? UNSOUGHT : hits.has(point % tokens.count) ? FOUND : MISSED;
      });
      const others = new Uint8Array((4 * rgb.length) / 3);
      for (let index = 0; index < rgb.length / 3; index += 1) others.set(rgb.subarray(3 * index, 3 * index + 3), 4 * index);
      dyes = [colours, by === "token" ? new Uint8Array(4) : others];
      painter.colours(...dyes);
      moved();
    },
    /** The head and the point that are chosen, the order of the heads, the words below them, the plots' size. */
    choose(changes) {
      const before = asked;
      asked = { ...asked, ...changes };
      mark(asked.chosen);
      const differs = (...names_) => names_.some((name) => before[name] !== asked[name]);
      if (differs("size", "ranked", "captions") || !slots.length) {
        arrange();
        moved();
      } else if (differs("marked")) moved();
    },
    toTop() {
      box.scrollTop = 0;
    },
    reveal(block) {
      const slot = slots.find((each) => each.block === block);
      if (!slot || (slot.y >= box.scrollTop && slot.y + side <= box.scrollTop + box.clientHeight)) return;
      box.scrollTop = slot.y - box.clientHeight / 2;
    },
    print(now) {
      printing = now;
      box.classList.toggle("attnmech-printing", now);
      refresh();
    },
    /** For those who measure. */
    about: () => ({ webgl: inGl !== null, slots, side, frames, points: points * places.length }),
    moved,
  };
}
