// The large plot of one head of joint embeddings: zoom, pan and turn, labels, attention between points.

const REACH = 14; // CSS pixels: the largest distance from the pointer to the point that it selects
const LEAST_DRAWN = 0.05; // the smallest weight drawn when all attention lines are shown
const MOST_OF_POINT = 40; // the largest number of lines drawn for one point
const MOST_LABELS = 140;
const TURN_STEP = 0.12; // radians per press of an arrow key
const ZOOMS = [1, 64];

/**
 * The plot of one head. `pick(point)` receives the point that the reader selects; -1 for none.
 *
 * @param {HTMLElement} stage
 * @param {EmbeddingData} data
 * @param {EmbeddingTokens} tokens
 * @param {{pick(point: number): void, norms: Uint16Array, normOf(block: number, point: number): number,
 *   attention: ReturnType<typeof embeddingAttention>, patches: (text: number) => HTMLImageElement | null}} page
 */
function embeddingHead(stage, data, tokens, { pick, norms, normOf, attention, patches }) {
  const points = 2 * tokens.count;
  const order = mixed(tokens.count).flatMap((token) => [token, token + tokens.count]);
  const canvas = make("canvas", {
    tabindex: 0, role: "img", className: "attnmech-embedding-plot",
    "aria-label": "the head's queries and keys; arrow keys move or turn, + and − zoom, 0 resets, [ and ] step through the tokens",
  });
  const zoomIn = make("button", { type: "button", text: "+", "aria-label": "zoom in", onclick: () => zoom(1.5) });
  const zoomOut = make("button", { type: "button", text: "−", "aria-label": "zoom out", onclick: () => zoom(1 / 1.5) });
  const again = make("button", { type: "button", text: "Reset view", onclick: reset });
  const tools = make("div", { className: "attnmech-embedding-tools" }, zoomIn, zoomOut, again);
  const element = make("div", { className: "attnmech-embedding-large" }, canvas, tools);
  const pointed = pointerBox(stage);
  const redraw = inNextFrame(draw);

  let seen = { zoom: 1, x: 0, y: 0, yaw: 0.6, pitch: 0.4 };
  let width = 0;
  let height = 0;
  let hovered = -1;
  let frames = 0;
  const where = new Float32Array(3 * points); // pixels of each point, and its depth
  /** @type {{state: EmbeddingState, cloud: Cloud, colouring: Colouring, hits: Set<number> | null} | null} */
  let shown = null;
  /** @type {ReturnType<typeof attention.ofPoint>} */
  let attended = { whole: false, weights: [] };
  /** @type {Line[]} */
  let lines = []; // between dots

  const inSpace = () => shown !== null && shown.cloud.dims === 3 && !shown.state.flat;
  const first = () => (shown?.state.block ?? 0) * points;

  // ---- where points are -------------------------------------------------------------------------------------

  function place() {
    if (!shown) return;
    const { cloud } = shown;
    const turn = inSpace()
      ? { cosYaw: Math.cos(seen.yaw), sinYaw: Math.sin(seen.yaw), cosPitch: Math.cos(seen.pitch), sinPitch: Math.sin(seen.pitch) }
      : null;
    const scale = pixelsPerUnit();
    const out = [0, 0, 0];
    for (let point = 0; point < points; point += 1) {
      coordinates(cloud, first(), point, turn, out);
      where[3 * point] = width / 2 + (out[0] - seen.x) * scale;
      where[3 * point + 1] = height / 2 - (out[1] - seen.y) * scale;
      where[3 * point + 2] = out[2];
      if (cloud.codes[(first() + point) * cloud.dims] === NO_VALUE) where[3 * point] = Number.NaN;
    }
  }

  const pixelsPerUnit = () => (Math.min(width, height) / 2) * (inSpace() ? 0.68 : 0.92) * seen.zoom;

  function nearest({ offsetX, offsetY }) {
    let [closest, least] = [-1, REACH * REACH];
    for (let point = 0; point < points; point += 1) {
      const distance = (where[3 * point] - offsetX) ** 2 + (where[3 * point + 1] - offsetY) ** 2;
      if (distance < least) [closest, least] = [point, distance];
    }
    return closest;
  }

  // ---- words ------------------------------------------------------------------------------------------------

  const kindOf = (point) => (point < tokens.count ? "query" : "key");

  function nameOf(point) {
    const token = point % tokens.count;
    return `${kindOf(point)} ${tokens.position[token]} “${isolated(tokens.labels[token])}”`;
  }

  function wordsOf(point) {
    const token = point % tokens.count;
    const length = data.lengths[tokens.text[token]];
    const kind = tokens.classes[tokens.class[token]];
    return [
      nameOf(point),
      `${data.unit} ${tokens.text[token]}, position ${tokens.position[token]} of ${length}`,
      ...(kind ? [kind] : []),
      `norm ${normOf(shown?.state.block ?? 0, point).toPrecision(3)} before scaling`,
    ];
  }

  /** "Query 3 “dog” gives 61 % to 2 “the” and 20 % to 0 “<s>”." */
  function sentence() {
    if (!shown || shown.state.point < 0) return "";
    const point = shown.state.point;
    const isKey = point >= tokens.count;
    const text = tokens.text[point % tokens.count];
    const { whole, weights } = attended;
    const parts = weights.slice(0, 3).map(({ position, token, weight }) => {
      const label = token === undefined ? data.texts[text].queries[position] : tokens.labels[token];
      const words = `${position} “${isolated(label)}”${token === undefined ? " (not plotted)" : ""}`;
      return `${percent(weight)} ${isKey ? "from query" : "to"} ${words}`;
    });
    const name = nameOf(point);
    const subject = `${name[0].toUpperCase()}${name.slice(1)} of ${data.unit} ${text}`;
    const known = `For this ${data.unit}, the page stores only the two highest keys of each query, if these are plotted.`;
    if (!whole && !parts.length) return `${subject}: no weight is stored. ${known}`;
    const more = lines.length > 3 ? ` The ${Math.min(lines.length, MOST_OF_POINT)} largest weights are drawn.` : "";
    return `${subject} ${isKey ? "receives" : "gives"} ${joined(parts, "nothing")}.${more}${whole ? "" : ` ${known}`}`;
  }

  // ---- drawing ----------------------------------------------------------------------------------------------

  function radii() {
    const { state } = /** @type {NonNullable<typeof shown>} */ (shown);
    const usual = (points > 1600 ? 2 : points > 500 ? 2.6 : 3.6) * Math.min(2, seen.zoom ** 0.3);
    if (!state.bySize) return () => usual;
    return (point) => 1.2 + 1.6 * usual * (Math.min(norms[first() + point], 2 * HALF_RANGE) / (2 * HALF_RANGE));
  }

  function dot(context, point, radius) {
    const [x, y] = [where[3 * point], where[3 * point + 1]];
    if (point >= tokens.count) {
      context.fillRect(x - 0.89 * radius, y - 0.89 * radius, 1.78 * radius, 1.78 * radius);
      return;
    }
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }

  /** A patch as its picture or colour, with a border that marks query or key; other tokens are dots of that colour. */
  function patch(context, point, radius, border) {
    const images = /** @type {NonNullable<EmbeddingTokens["images"]>} */ (tokens.images);
    const [rows, columns] = images.grid;
    const token = point % tokens.count;
    const [x, y, side] = [where[3 * point], where[3 * point + 1], 5 * radius];
    const picture = patches(tokens.text[token]);
    const [row, column] = images.place.subarray(2 * token, 2 * token + 2);
    if (Number.isNaN(row)) {
      context.fillStyle = border;
      dot(context, point, radius);
      return;
    }
    const [left, top] = [x - side / 2, y - side / 2];
    if (picture) {
      const [wide, high] = [picture.naturalWidth / columns, picture.naturalHeight / rows];
      context.drawImage(picture, column * wide, row * high, wide, high, left, top, side, side);
    } else {
      context.fillStyle = `rgb(${images.colours.subarray(3 * token, 3 * token + 3).join(" ")})`;
      context.fillRect(left, top, side, side);
    }
    context.strokeStyle = border;
    context.lineWidth = 2;
    context.strokeRect(left, top, side, side);
  }

  function strokes(context, drawn, colour) {
    context.strokeStyle = colour;
    const levels = 8; // levels of opacity; each level is one path
    for (let level = 1; level <= levels; level += 1) {
      context.beginPath();
      for (const { query, key, weight } of drawn) {
        if (Math.max(1, Math.ceil(weight * levels)) !== level) continue;
        context.moveTo(where[3 * query], where[3 * query + 1]);
        context.lineTo(where[3 * (key + tokens.count)], where[3 * (key + tokens.count) + 1]);
      }
      context.globalAlpha = level / levels;
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  function label(context, point, taken, must) {
    const text = tokens.labels[point % tokens.count];
    const words = text.length > 24 ? `${text.slice(0, 23)}…` : text;
    const [x, y] = [where[3 * point] + 6, where[3 * point + 1] - 4];
    if (!(x > -40 && x < width && y > 8 && y < height + 8)) return false;
    const box = [x, y - 10, x + context.measureText(words).width, y + 3];
    const overlaps = ([left, top, right, bottom]) => box[0] < right && left < box[2] && box[1] < bottom && top < box[3];
    if (!must && taken.some(overlaps)) return false;
    taken.push(box);
    context.strokeText(words, x, y);
    context.fillText(words, x, y);
    return true;
  }

  function labels(context, important) {
    const { state } = /** @type {NonNullable<typeof shown>} */ (shown);
    const taken = [];
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeStyle = colourOf(stage, "--paper");
    context.fillStyle = colourOf(stage, "--ink");
    let made = 0;
    for (const [rank, point] of important.entries()) {
      if (made >= MOST_LABELS) return;
      if (label(context, point, taken, rank === 0)) made += 1;
    }
    if (!state.labels) return;
    for (const point of order.slice(0, 3000)) {
      if (made >= MOST_LABELS) return;
      if (label(context, point, taken, false)) made += 1;
    }
  }

  function draw() {
    if (!shown) return;
    width = element.clientWidth;
    if (!width) return;
    height = Math.round(Math.min(width, Math.max(320, 0.74 * innerHeight)));
    const { state, cloud, colouring, hits } = shown;
    const context = sizeCanvas(canvas, width, height);
    canvas.style.touchAction = seen.zoom > 1 ? "none" : "pan-y"; // until the plot is enlarged, a finger scrolls the page
    place();
    const ink = colourOf(stage, "--ink");
    const quiet = colourOf(stage, "--quiet");
    const weight = colourOf(stage, "--weight");
    const colour = cssColours(colouring, state.block, norms, points);
    const border = [colourOf(stage, "--query"), colourOf(stage, "--key")];
    const radius = radii();
    const chosen = state.point;
    const missed = (point) => hits !== null && !hits.has(point % tokens.count);

    if (state.lines && chosen < 0) {
      context.lineWidth = 1;
      const all = attention.linesOf(state.block);
      const drawn = all.filter((line) => line.weight >= LEAST_DRAWN && (hits === null || hits.has(line.query)));
      strokes(context, drawn, weight);
    }
    const pictured = tokens.images !== null && state.pictures;
    const depths = inSpace() ? order.toSorted((one, other) => where[3 * one + 2] - where[3 * other + 2]) : order;
    const passes = hits === null ? [() => true] : [missed, (point) => !missed(point)];
    for (const [pass, wanted] of passes.entries()) {
      const faint = hits !== null && pass === 0;
      for (const point of depths) {
        if (!wanted(point)) continue;
        context.globalAlpha = faint ? 0.18 : hits !== null || pictured ? 0.95 : inSpace() ? 0.55 + 0.4 * Math.max(-1, Math.min(1, where[3 * point + 2])) : 0.85;
        if (pictured && !faint) {
          patch(context, point, radius(point), border[Number(point >= tokens.count)]);
          continue;
        }
        context.fillStyle = faint ? quiet : colour(point);
        dot(context, point, radius(point) * (hits !== null && !faint ? 1.4 : 1));
      }
    }
    context.globalAlpha = 1;
    context.lineWidth = 1.6;
    if (chosen >= 0) {
      const drawn = lines.slice(0, MOST_OF_POINT);
      strokes(context, drawn, weight);
      const ends = drawn.map(({ query, key }) => (chosen < tokens.count ? key + tokens.count : query));
      for (const point of [...ends, chosen]) {
        context.fillStyle = colour(point);
        if (pictured) patch(context, point, radius(point) + 1, border[Number(point >= tokens.count)]);
        else dot(context, point, radius(point) + 1.5);
        context.strokeStyle = ink;
        context.lineWidth = point === chosen ? 2.5 : 1;
        ring(context, point, pictured ? 4 * radius(point) + 4 : radius(point) + 2.5);
      }
      labels(context, [chosen, ...ends]);
    } else {
      labels(context, hits === null || hits.size > 60 ? [] : order.filter((point) => hits.has(point % tokens.count)));
    }
    if (hovered >= 0) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      ring(context, hovered, radius(hovered) + 3);
    }
    ruler(context, cloud, quiet);
    frames += 1;
  }

  function ring(context, point, radius) {
    context.beginPath();
    context.arc(where[3 * point], where[3 * point + 1], radius, 0, 2 * Math.PI);
    context.stroke();
  }

  /** The names of the axes, and a length in the units of the projection. */
  function ruler(context, cloud, colour) {
    const step = cloud.step[shown?.state.block ?? 0];
    context.fillStyle = context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.font = "11px system-ui, sans-serif";
    if (step > 0) {
      const unit = pixelsPerUnit() / (step * HALF_RANGE); // pixels per unit length
      const rough = width / 5 / unit;
      const power = 10 ** Math.floor(Math.log10(rough));
      const length = [5, 2, 1].map((digit) => digit * power).find((step) => step <= rough) ?? power;
      context.beginPath();
      context.moveTo(10, height - 12);
      context.lineTo(10 + length * unit, height - 12);
      context.stroke();
      context.fillText(`distance ${Number(length.toPrecision(1))}`, 10, height - 18);
    }
    if (inSpace()) {
      context.fillText(`${cloud.label}, 3 axes`, 10, 18);
      return;
    }
    context.fillText(`${cloud.label} axis 2 ↑`, 10, 18);
    context.textAlign = "right";
    context.fillText(`${cloud.label} axis 1 →`, width - 10, height - 12);
    context.textAlign = "left";
  }

  // ---- moving -----------------------------------------------------------------------------------------------

  function zoom(factor, at = { offsetX: width / 2, offsetY: height / 2 }) {
    const before = pixelsPerUnit();
    const wanted = Math.min(ZOOMS[1], Math.max(ZOOMS[0], seen.zoom * factor));
    const [x, y] = [at.offsetX - width / 2, height / 2 - at.offsetY];
    seen.zoom = wanted;
    const after = pixelsPerUnit();
    seen.x += x / before - x / after;
    seen.y += y / before - y / after;
    if (wanted === 1) Object.assign(seen, { x: 0, y: 0 });
    redraw();
  }

  function reset() {
    seen = { zoom: 1, x: 0, y: 0, yaw: 0.6, pitch: 0.4 };
    redraw();
  }

  function drag(x, y, turning) {
    if (turning) {
      seen.yaw += x / 120;
      seen.pitch += y / 120;
    } else {
      seen.x -= x / pixelsPerUnit();
      seen.y += y / pixelsPerUnit();
    }
    redraw();
  }

  /** @type {Map<number, {x: number, y: number}>} */
  const fingers = new Map();
  let travelled = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    travelled = fingers.size > 1 ? Infinity : 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return hover(event);
    const after = { x: event.offsetX, y: event.offsetY };
    if (fingers.size === 2) {
      const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1] ?? after;
      const apart = ({ x, y }) => Math.max(10, Math.hypot(x - other.x, y - other.y));
      zoom(apart(after) / apart(before), { offsetX: (after.x + other.x) / 2, offsetY: (after.y + other.y) / 2 });
    } else {
      travelled += Math.abs(after.x - before.x) + Math.abs(after.y - before.y);
      if (travelled > 4) drag(after.x - before.x, after.y - before.y, inSpace() && !event.shiftKey);
    }
    fingers.set(event.pointerId, after);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (fingers.delete(event.pointerId) && travelled <= 4) pick(nearest(event));
  });
  canvas.addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.deltaY > 0 && seen.zoom === ZOOMS[0]) return; // the page scrolls on
      event.preventDefault();
      zoom(Math.exp(-event.deltaY / 400), event);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !shown) return;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const token = shown.state.point;
    if (way && inSpace()) drag(120 * TURN_STEP * way[0], 120 * TURN_STEP * way[1], true);
    else if (way) drag(-40 * way[0], -40 * way[1], false);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") reset();
    else if (event.key === "Escape") pick(-1);
    else if (event.key === "[" || event.key === "]") pick((token + (event.key === "]" ? 1 : points - 1) + (token < 0 && event.key === "[" ? 1 : 0)) % points);
    else return;
    event.preventDefault();
  });

  function hover(event) {
    const point = event ? nearest(event) : -1;
    if (point >= 0) pointed.show(event, wordsOf(point));
    else pointed.hide();
    if (point === hovered) return;
    hovered = point;
    canvas.style.cursor = point >= 0 ? "pointer" : "grab";
    redraw();
  }

  return {
    element,
    sentence,
    draw,
    /** @param {NonNullable<typeof shown>} next */
    show(next) {
      const other = shown === null || next.state.projection !== shown.state.projection || next.state.block !== shown.state.block;
      if (other) Object.assign(seen, { zoom: 1, x: 0, y: 0 });
      shown = next;
      const { block, point } = next.state;
      attended = point < 0 ? { whole: false, weights: [] } : attention.ofPoint(block, point);
      const [token, isKey] = [point % tokens.count, point >= tokens.count];
      lines = attended.weights.flatMap(({ token: other, weight }) =>
        other === undefined ? [] : [isKey ? { query: other, key: token, weight } : { query: token, key: other, weight }]);
      redraw();
    },
    /** Draws rings around the points of a token that is pointed at elsewhere; -1 for none. */
    point(at) {
      hovered = at;
      redraw();
    },
    about: () => ({ frames, seen: { ...seen }, lines, whole: attended.whole, where: Array.from(where), width, height }),
    drag,
    zoom,
  };
}
