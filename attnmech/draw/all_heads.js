// All heads as small maps, and the selected one large. A colour's opacity is the square root of the weight.

{
  const SIGNS = { self: "●", first: "◆", other: "■" }; // attnmech/draw/style.py
  const LABEL = 12; // pixels that a label needs across its line
  const SPARSE = 5; // pixels a row needs for the marks of neighbouring rows to stay apart
  const SHOWN_KEYS = 5; // of the selected row, listed below the map
  const BUDGET = 8; // milliseconds of a frame that small maps may take

  // ---- probabilities as pixels --------------------------------------------------------------------------------

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

  // ---- words --------------------------------------------------------------------------------------------------

  const labelOf = (tokens, position) => `${position} ${isolated(tokens[position])}`;

  /** The label, cut to the width; whole characters go, not halves of an emoji. */
  function fitted(context, tokens, position, width) {
    const whole = labelOf(tokens, position);
    if (context.measureText(whole).width <= width) return whole;
    const characters = [...new Intl.Segmenter().segment(tokens[position].slice(0, 80))].map(({ segment }) => segment);
    for (let count = characters.length - 1; count > 0; count -= 1) {
      const cut = `${position} ${isolated(`${characters.slice(0, count).join("")}…`)}`;
      if (context.measureText(cut).width <= width) return cut;
    }
    return String(position);
  }

  /**
   * Python's numbers for each head: `sentence` states them, `top` is each row's highest key or NaN.
   *
   * @param {LayersData & Facts} data
   */
  async function factsOf({ layers, heads, means, rows, top, words }) {
    const tops = await unpack(top);
    const aligned = "self" in means;
    const markOf = (query, key) => (aligned && key === query ? "self" : key === 0 ? "first" : "other");

    function sentence({ layer, head }) {
      const where = `L${layers[layer]}H${head}`;
      if (rows === 0) return `Every row of ${where} sees only one key.`;
      const block = layer * heads + head;
      const highest = tops.of(block);
      const mean = (name) => percent(means[name][block]);
      const count = (wanted) => highest.reduce((sum, key, query) => sum + (key === wanted(query) ? 1 : 0), 0);
      const first = `In ${where}, the highest weight is on the first ${aligned ? "" : "key "}token in ${count(() => 0)} of ${rows} rows with several keys`;
      if (!aligned) return `${first}; on average it receives ${mean("first")} of the ${words.whole}.`;
      return (
        `${first}, on the token itself in ${count((query) => query)} and on the previous one in ${count((query) => query - 1)}; ` +
        `on average these receive ${mean("first")}, ${mean("self")} and ${mean("previous")} of the ${words.whole}.`
      );
    }
    return { sentence, markOf, top: ({ layer, head }) => tops.of(layer * heads + head), aligned };
  }

  // ---- small maps ---------------------------------------------------------------------------------------------

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

  // ---- the large map ------------------------------------------------------------------------------------------

  /** One head with its tokens; `pick(query)` is called when the user selects a row. */
  function largeMap(stage, { queries, keys, pattern, words }, patterns, facts, { pick }) {
    const approximately = "scale" in pattern && pattern.scale === "root" ? "≈\u00a0" : ""; // eight bits are less precise than the digits shown
    const map = make("canvas", { className: "attnmech-model-map", tabindex: 0, role: "img" });
    const queryLabels = make("canvas", { className: "attnmech-model-queries" });
    const keyLabels = make("canvas", { className: "attnmech-model-keys" });
    const rowText = make("p", { className: "attnmech-model-row", "aria-live": "polite" });
    const frame = make(
      "div",
      { className: "attnmech-model-frame" },
      make("span", { className: "attnmech-model-axes", text: "query\u00a0↓ key\u00a0→" }),
      keyLabels,
      queryLabels,
      map,
    );
    const element = make("div", { className: "attnmech-model-large" }, frame, rowText);
    const image = make("canvas");
    let shown = { layer: 0, head: 0, query: queries.length - 1 };
    let marks = null; // whether all rows are marked; null, until the user chooses, marks them if there is room
    let place; // of the map on the page, in CSS pixels

    function layout() {
      const narrow = element.clientWidth < 400;
      const context = contextOf(queryLabels);
      context.font = "11px ui-monospace, monospace";
      const longest = (tokens) => Math.max(...range(tokens.length).map((at) => context.measureText(labelOf(tokens, at)).width));
      const left = Math.ceil(Math.min(longest(queries) + 8, narrow ? 84 : 128));
      const top = Math.ceil(Math.min(longest(keys) + 8, narrow ? 72 : 104));
      const width = Math.min(element.clientWidth - left, 44 * keys.length);
      const height = Math.min(Math.max((width * queries.length) / keys.length, 14), 1.3 * Math.max(width, 240));
      place = { left, top, width: Math.floor(width), height: Math.round(height) };
      frame.style.gridTemplateColumns = `${left}px ${place.width}px`;
      frame.style.gridTemplateRows = `${top}px ${place.height}px`;
    }

    const shape = () => ({
      height: Math.min(screenPixels(place.height), queries.length),
      width: Math.min(screenPixels(place.width), keys.length),
    });
    const rowHeight = () => place.height / queries.length;
    const allMarked = () => marks ?? rowHeight() >= SPARSE;

    function redraw() {
      if (!element.clientWidth) return;
      layout();
      drawHead();
    }

    function drawHead() {
      const pattern = patterns.of(shown.layer, shown.head);
      paint(image, pooled(pattern, queries.length, keys.length, shape()), shape(), weightColour(stage));
      drawRow();
    }

    function drawRow() {
      const context = sizeCanvas(map, place.width, place.height);
      context.imageSmoothingEnabled = false;
      context.drawImage(image, 0, 0, place.width, place.height);
      drawMarks(context);
      context.strokeStyle = colourOf(stage, "--ink");
      context.lineWidth = 1.5;
      const height = Math.max(rowHeight(), 4);
      const middle = (shown.query + 0.5) * rowHeight();
      context.strokeRect(0.75, Math.max(0.75, middle - height / 2), place.width - 1.5, Math.min(height, place.height - 1.5));
      drawQueryLabels();
      drawKeyLabels();
      describeRow();
    }

    function drawMarks(context) {
      const top = facts.top(shown);
      const colours = Object.fromEntries(Object.keys(SIGNS).map((mark) => [mark, colourOf(stage, `--${mark}`)]));
      const [height, width] = [rowHeight(), place.width / keys.length];
      const radius = Math.min(5, Math.max(2, 0.32 * Math.min(height, width)));
      context.strokeStyle = colourOf(stage, "--paper");
      context.lineWidth = radius > 3 ? 1 : 0.5;
      for (const query of allMarked() ? range(queries.length) : [shown.query]) {
        if (Number.isNaN(top[query])) continue;
        const mark = facts.markOf(query, top[query]);
        context.fillStyle = colours[mark];
        trace(context, mark, (top[query] + 0.5) * width, (query + 0.5) * height, radius);
        context.fill();
        context.stroke();
      }
    }

    function trace(context, mark, x, y, radius) {
      context.beginPath();
      if (mark === "self") context.arc(x, y, radius, 0, 2 * Math.PI);
      else if (mark === "other") context.rect(x - 0.85 * radius, y - 0.85 * radius, 1.7 * radius, 1.7 * radius);
      else {
        const reach = 1.25 * radius;
        for (const [right, down] of [[0, -reach], [reach, 0], [0, reach], [-reach, 0]]) context.lineTo(x + right, y + down);
        context.closePath();
      }
    }

    /** Which labels stand where along the axis, as close as they can be read; they give way to the one of `always`. */
    function labelled(count, length, always) {
      const pixels = length / count;
      const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((step) => step * pixels >= LABEL) ?? 2000;
      const middle = (index) => Math.min(Math.max((index + 0.5) * pixels, 7), Math.max(length - 7, 7));
      const shown = always === undefined ? [] : [[always, middle(always)]];
      for (let index = 0; index < count; index += step) {
        if (shown.every(([, other]) => Math.abs(middle(index) - other) >= LABEL - 0.5)) shown.push([index, middle(index)]);
      }
      return shown;
    }

    function ready(canvas, width, height) {
      const context = sizeCanvas(canvas, width, height);
      context.font = "11px ui-monospace, monospace";
      context.textBaseline = "middle";
      context.direction = "ltr"; // of the number before the token; the token keeps its own
      context.fillStyle = colourOf(stage, "--ink");
      return context;
    }

    function drawQueryLabels() {
      const context = ready(queryLabels, place.left, place.height);
      context.textAlign = "right";
      for (const [query, middle] of labelled(queries.length, place.height, shown.query)) {
        context.font = `${query === shown.query ? "bold " : ""}11px ui-monospace, monospace`;
        context.fillText(fitted(context, queries, query, place.left - 6), place.left - 5, middle);
      }
    }

    function drawKeyLabels() {
      const context = ready(keyLabels, place.width, place.top);
      for (const [key, middle] of labelled(keys.length, place.width)) {
        context.save();
        context.translate(middle, place.top - 4);
        context.rotate(-Math.PI / 2);
        context.fillText(fitted(context, keys, key, place.top - 6), 0, 0);
        context.restore();
      }
    }

    /** The selected row as text, for phones and screen readers too. */
    function describeRow() {
      const pattern = patterns.of(shown.layer, shown.head);
      const row = pattern.subarray(shown.query * keys.length, (shown.query + 1) * keys.length);
      const highest = range(keys.length)
        .filter((key) => row[key] > 0)
        .sort((one, other) => row[other] - row[one] || one - other)
        .slice(0, SHOWN_KEYS);
      rowText.replaceChildren(make("b", {}, `Query ${shown.query} `, make("bdi", { text: queries[shown.query] })), " attends to ");
      highest.forEach((key, rank) => {
        rowText.append(`${rank ? ", " : ""}${key} `, make("bdi", { text: keys[key] }), ` ${approximately}${percent(row[key])}`);
      });
      if (!highest.length) rowText.append("no key");
    }

    // ---- pointer and keys

    /** The largest cell under a pixel: the one drawn if a pixel covers several cells. */
    function cellAt({ offsetX, offsetY }) {
      const { height, width } = shape();
      const block = (offset, length, pixels, count) => {
        const at = Math.min(pixels - 1, Math.max(0, Math.floor((offset / length) * pixels)));
        return [Math.ceil((at * count) / pixels), Math.ceil(((at + 1) * count) / pixels)];
      };
      const rows = block(offsetY, place.height, height, queries.length);
      const columns = block(offsetX, place.width, width, keys.length);
      const pattern = patterns.of(shown.layer, shown.head);
      let largest = { query: rows[0], key: columns[0], share: -1 };
      for (let query = rows[0]; query < rows[1]; query += 1) {
        for (let key = columns[0]; key < columns[1]; key += 1) {
          const share = pattern[query * keys.length + key];
          if (share > largest.share) largest = { query, key, share };
        }
      }
      return largest;
    }

    const pointed = pointerBox(stage);
    map.addEventListener("pointermove", (event) => {
      const { query, key, share } = cellAt(event);
      const top = facts.top(shown)[query] === key ? ` ${SIGNS[facts.markOf(query, key)]} the row's maximum` : "";
      pointed.show(event, [
        `query ${labelOf(queries, query)}`,
        `key ${labelOf(keys, key)}`,
        `${words.weight} ${approximately}${percent(share)}${top}`,
      ]);
    });
    map.addEventListener("pointerleave", pointed.hide);
    map.addEventListener("click", (event) => pick(cellAt(event).query));
    map.addEventListener("keydown", (event) => {
      const query = shown.query + ({ ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0);
      if (query === shown.query) return;
      event.preventDefault();
      if (query >= 0 && query < queries.length) pick(query);
    });

    return {
      element,
      redraw,
      allMarked,
      choose({ layer, head, query }) {
        const sameHead = layer === shown.layer && head === shown.head;
        shown = { layer, head, query };
        map.setAttribute("aria-label", "attention of the selected head; the up and down arrows select a query");
        if (place) sameHead ? drawRow() : drawHead();
      },
      markAll(ticked) {
        marks = ticked;
        drawRow();
      },
    };
  }

  // ---- the view -----------------------------------------------------------------------------------------------

  /** The legend of the scale: one square per weight; `name` says what the weights are. */
  function scaleLegend(name) {
    const squares = [0, 0.01, 0.1, 0.25, 0.5, 1].map((share) => {
      const square = make("i", { style: `--opacity: ${100 * Math.sqrt(share)}%` });
      return make("span", {}, square, `${100 * share}\u00a0%`);
    });
    return make("div", { className: "attnmech-model-scale" }, name, ...squares);
  }

  function markLegend(aligned) {
    const words = { self: "itself", first: "the first token", other: "another token" };
    const shown = Object.entries(words).filter(([mark]) => aligned || mark !== "self");
    const items = shown.map(([mark, text]) =>
      make("span", {}, make("b", { style: `color: var(--${mark})`, text: SIGNS[mark] }), ` ${text}`),
    );
    return make("span", { className: "attnmech-model-marks" }, ...items);
  }

  views.model = async (stage, data) => {
    suitBackground(stage);
    const { layers, heads, queries, overview, embedded, remarks } = data;
    const patterns = await patternsIn(data.pattern, heads);
    const facts = overview ? null : await factsOf(/** @type {LayersData & Facts} */ (data));
    const state = { query: queries.length - 1, ...data.chosen };
    const parts = []; // functions called after each choice

    function choose(changes) {
      Object.assign(state, changes);
      scaleName.textContent = data.words.weight;
      for (const part of parts) part(state);
    }

    /** Shows the user's choice, and announces it to the page if it changed. */
    function pick(changes) {
      const news = Object.fromEntries(Object.entries(changes).filter(([name, index]) => state[name] !== index));
      if (!Object.keys(news).length) return;
      choose(news);
      announce(stage, news);
    }

    const scaleName = make("span");
    const root = make("div", { className: `attnmech-model ${overview ? "attnmech-model-alone" : ""}` });
    const nameOf = ({ layer, head }) => `L${layers[layer]}H${head}${remarks ? `: ${remarks[layer * heads + head]}` : ""}`;
    const describe = facts ? facts.sentence : nameOf;
    const small = smallMaps(stage, data, patterns, { pick, describe, follow: !overview });
    parts.push(small.choose);
    const redraws = [small.redraw];
    if (facts) redraws.push(addLarge(facts));
    else root.append(small.element, scaleLegend(scaleName));
    stage.append(root);
    for (const redraw of redraws) redraw();
    choose({});
    onChange(stage, () => {
      for (const redraw of redraws) redraw();
    });
    return { choose, print: small.print };

    function addLarge(facts) {
      const large = largeMap(stage, data, patterns, facts, { pick: (query) => pick({ query }) });
      const finding = make("p", { className: "attnmech-finding", "aria-live": "polite" });
      const marks = checkbox("mark each row's maximum:", false, (ticked) => large.markAll(ticked));
      const enlarge = make("button", { type: "button", onclick: () => zoom(!zoomed()) });
      const zoomed = () => root.classList.contains("attnmech-model-zoomed");

      function zoom(on) {
        root.classList.toggle("attnmech-model-zoomed", on);
        enlarge.textContent = on ? "Show all heads" : "Enlarge this head";
        redrawLarge();
        if (!on) small.redraw();
      }

      function redrawLarge() {
        large.redraw();
        marks.box.checked = large.allMarked();
      }

      root.addEventListener("keydown", ({ key }) => {
        if (key !== "Escape" || !zoomed()) return;
        zoom(false);
        small.focus();
      });
      const controls = make("div", { className: "attnmech-controls" }, enlarge);
      if (!embedded) {
        const selectors = headSelectors(data, pick);
        controls.prepend(selectors.layer, selectors.head);
        parts.push(selectors.show);
      }
      root.append(
        controls,
        finding,
        make("div", { className: "attnmech-controls" }, scaleLegend(scaleName), marks.element, markLegend(facts.aligned)),
        make("div", { className: "attnmech-model-panes" }, small.element, large.element),
      );
      enlarge.textContent = "Enlarge this head";
      parts.push(large.choose, (chosen) => (finding.textContent = facts.sentence(chosen)));
      return redrawLarge;
    }
  };
}
