// The selected head as a large map, with its tokens.

const LABEL = 12; // pixels that a label needs across its line
const SPARSE = 5; // pixels a row needs for the marks of neighbouring rows to stay apart
const SHOWN_KEYS = 5; // of the selected row, listed below the map

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
