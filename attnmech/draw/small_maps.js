// All heads as small maps.

const BUDGET = 8; // milliseconds of a frame that small maps may take

/** The grid of all heads; `pick(place)` is called when the user selects one, `describe(place)` gives the text on hover. */
function smallMaps(stage, { layers, heads, queries, keys, words, overview = false }, patterns, { pick, describe, follow }) {
  const single = layers.length === 1;
  const box = make("div", {
    className: `attnmech-model-overview ${single ? "attnmech-model-wrapping" : ""}`,
    role: "group",
    "aria-label": "all heads; the arrow keys move between them",
  });
  const places = range(layers.length * heads).map((index) => ({ layer: Math.floor(index / heads), head: index % heads }));
  const cells = places.map(({ layer, head }) => {
    const name = `layer ${layers[layer]}, head ${head}`;
    const canvas = make("canvas");
    const cell = make("button", { type: "button", "aria-label": name, "aria-pressed": "false", tabindex: -1 }, canvas);
    if (single) cell.append(make("span", { text: `head ${head}` }));
    return cell;
  });
  /** @type {Map<EventTarget | null, number>} */
  const indexOf = new Map(cells.map((cell, index) => [cell, index]));
  /** The cell in which an event is, if any. @type {(event: Event) => number | undefined} */
  const indexAt = ({ target }) => indexOf.get(/** @type {Element} */ (target).closest("button"));
  fill();

  function fill() {
    if (single) return box.append(...cells);
    box.append(make("span", { className: "attnmech-model-corner", text: "layer\u00a0↓ head\u00a0→" }));
    for (const head of range(heads)) box.append(make("span", { className: "attnmech-model-head", text: String(head) }));
    for (const layer of range(layers.length)) {
      box.append(make("span", { className: "attnmech-model-layer", text: String(layers[layer]) }));
      box.append(...cells.slice(layer * heads, (layer + 1) * heads));
    }
  }

  // Maps are made when they come near the view, a few a frame, and kept as opacities.
  const made = new Map();
  const wanted = new Set();
  let shape = { height: 1, width: 1 };
  let colour = 0;
  let working = 0;
  let shown = words.weight; // what the maps are made of
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const index = Number(indexOf.get(target));
        if (isIntersecting && !made.has(index)) wanted.add(index);
        else wanted.delete(index);
      }
      if (wanted.size && !working) working = requestAnimationFrame(work);
    },
    { root: box, rootMargin: "120px" },
  );

  function work() {
    const end = performance.now() + BUDGET;
    for (const index of wanted) {
      wanted.delete(index);
      drawMap(index);
      if (performance.now() > end) break;
    }
    working = wanted.size ? requestAnimationFrame(work) : 0;
  }

  function drawMap(index) {
    const { layer, head } = places[index];
    made.set(index, pooled(patterns.of(layer, head), queries.length, keys.length, shape));
    paint(cells[index].firstChild, made.get(index), shape, colour);
  }

  function size() {
    const [least, most] = overview ? [24, 40] : single ? [64, 96] : [24, 72];
    const across = single ? Math.min(heads, 8) : heads;
    const side = Math.floor((box.clientWidth - (single ? 8 : 48)) / across) - 4;
    return Math.min(most, Math.max(least, side));
  }

  function redraw() {
    const side = size();
    const pixels = screenPixels(side);
    const next = { height: Math.min(pixels, queries.length), width: Math.min(pixels, keys.length) };
    colour = weightColour(stage);
    box.style.setProperty("--side", `${side}px`);
    box.style.setProperty("--heads", heads);
    if (next.height === shape.height && next.width === shape.width && made.size) {
      for (const [index, opacities] of made) paint(cells[index].firstChild, opacities, shape, colour);
      return;
    }
    shape = next;
    remake();
  }

  /** Redraws all maps, each when it comes near the view. */
  function remake() {
    shown = words.weight;
    made.clear();
    for (const cell of cells) {
      watcher.unobserve(cell); // so that each reports again
      watcher.observe(cell);
    }
  }

  let current = 0;
  function mark(index) {
    cells[current].tabIndex = -1;
    cells[current].setAttribute("aria-pressed", "false");
    cells[index].tabIndex = 0;
    cells[index].setAttribute("aria-pressed", "true");
    current = index;
  }

  function neighbour(index, key) {
    const across = single ? cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length : heads;
    const column = index % across;
    const step = {
      ArrowLeft: column > 0 ? -1 : 0,
      ArrowRight: column < across - 1 ? 1 : 0,
      ArrowUp: -across,
      ArrowDown: across,
      Home: -column,
      End: across - 1 - column,
    }[key];
    return step === undefined ? undefined : cells[index + step] ? index + step : index;
  }

  box.addEventListener("keydown", (event) => {
    const index = indexAt(event);
    if (index === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = neighbour(index, event.key);
    if (next === undefined) return;
    event.preventDefault();
    cells[index].tabIndex = -1;
    cells[next].tabIndex = 0;
    cells[next].focus();
    if (follow) pick(places[next]);
  });
  box.addEventListener("click", (event) => {
    const index = indexAt(event);
    if (index !== undefined) pick(places[index]);
  });
  const pointed = pointerBox(stage);
  box.addEventListener("pointermove", (event) => {
    const index = indexAt(event);
    if (index === undefined) pointed.hide();
    else pointed.show(event, [describe(places[index])]);
  });
  box.addEventListener("pointerleave", pointed.hide);
  box.addEventListener("scroll", pointed.hide);

  return {
    element: box,
    redraw,
    choose({ layer, head }) {
      mark(layer * heads + head);
      if (shown !== words.weight) remake();
    },
    focus: () => cells[current].focus(),
    /** On paper nothing scrolls: all maps at once, drawn before the page is laid out. */
    print(printing) {
      box.classList.toggle("attnmech-printing", printing);
      for (const index of cells.keys()) if (!made.has(index)) drawMap(index);
    },
  };
}
