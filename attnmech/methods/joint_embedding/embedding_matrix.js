// All heads of joint embeddings as small plots: their places, the plots in view, and the selected head.

const MOVING = 50000; // points drawn while the plots move, at first; then as many as the machine can
const FRAME = [22, 40]; // milliseconds per frame: below the first, more points are drawn; above the second, fewer
const MOST_WITHOUT_GL = 100000; // points drawn without WebGL2
const STILL = 160; // milliseconds after which all points are drawn

/**
 * The plots of all heads. `pick(block)` receives the selected head; `describe(block)` gives the words at the pointer.
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

  /** The last request. */
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

  // ---- where each plot is -------------------------------------------------------------------------------

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

  /** Draws few points while plots move, and all points when they rest. */
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
      : `This browser lacks WebGL2: the small plots show ${sampled_ ? `${(shown / 2).toLocaleString("en")} of the ${tokens.count.toLocaleString("en")} tokens` : "all tokens"}, without transparency. The large plot shows all.`;
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

  /** The next plot in a direction; the same plot at an edge. */
  function neighbour(block, key) {
    const here = slots.findIndex((slot) => slot.block === block);
    const { x, y } = slots[here];
    const target = {
      ArrowLeft: slots[here - 1],
      ArrowRight: slots[here + 1],
      ArrowUp: slots.findLast((slot) => slot.x === x && slot.y < y),
      ArrowDown: slots.find((slot) => slot.x === x && slot.y > y),
      Home: slots[0],
      End: slots.at(-1),
    };
    return key in target ? (target[key] ?? slots[here]).block : undefined;
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
    /** Sets colours or search hits: a few bytes per token. @param {Colouring} colouring @param {Set<number> | null} hits */
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
    /** Sets the selected head and point, the order of the heads, their captions, and the size of the plots. */
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
      const slot = slots.find((slot) => slot.block === block);
      if (!slot || (slot.y >= box.scrollTop && slot.y + side <= box.scrollTop + box.clientHeight)) return;
      box.scrollTop = slot.y - box.clientHeight / 2;
    },
    print(now) {
      printing = now;
      box.classList.toggle("attnmech-printing", now);
      refresh();
    },
    /** For measurements. */
    about: () => ({ webgl: inGl !== null, slots, side, frames, points: points * places.length }),
    moved,
  };
}
