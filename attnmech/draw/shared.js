// Shared by all views: decoding of numbers, colours of the surroundings, a box at the pointer, controls.
// Text enters a page only through textContent.

const { views } = window.attnmech;

function range(length) {
  return Array.from({ length }, (_, index) => index);
}

/**
 * A new element with its class, text and attributes; `on…` attributes are listeners.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {{className?: string, text?: string | number, [attribute: string]: any}} [attributes]
 * @param {(Node | string)[]} children
 */
function make(tag, { className = "", text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = String(text);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/**
 * A new element of an SVG with its attributes.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {(Node | string)[]} children
 */
function makeSvg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** Calls `draw` once in the next frame, however often it was requested. */
function inNextFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

// ---- numbers (attnmech/draw/packing.py) -----------------------------------------------------------------------

const NO_VALUE = 65535;

/**
 * Packed numbers, unzipped: `slice(start, count)` gives some of them as a Float32Array, NaN where there is none.
 *
 * @type {Shared["unpack"]}
 */
async function unpack({ low, step, codes, scale }) {
  const narrow = scale === "root";
  const numbers = narrow ? await window.attnmech.unzip(codes) : await codesOf(codes);
  const size = numbers.length / low.length;
  const meaning = { logarithm: Math.exp, root: (value) => value * value, plain: (value) => value }[scale ?? "plain"];

  function slice(start, count) {
    const values = new Float32Array(count);
    for (let index = 0, at = start; index < count; index += 1, at += 1) {
      const block = Math.floor(at / size);
      values[index] = !narrow && numbers[at] === NO_VALUE ? NaN : meaning(low[block] + step[block] * numbers[at]);
    }
    return values;
  }
  return { slice, of: (block) => slice(block * size, size) };
}

/** The 16-bit codes; all high bytes come first. @param {string} packed */
async function codesOf(packed) {
  const bytes = await window.attnmech.unzip(packed);
  const codes = new Uint16Array(bytes.length / 2);
  for (let index = 0; index < codes.length; index += 1) codes[index] = (bytes[index] << 8) | bytes[index + codes.length];
  return codes;
}

/** A compressed list of texts. @type {Shared["unpackTexts"]} */
async function unpackTexts(codes) {
  return JSON.parse(new TextDecoder().decode(await window.attnmech.unzip(codes)));
}

/** Probabilities by layer and head, with 0 where there is none. @type {Shared["patternsOf"]} */
function patternsOf(values, heads) {
  /** @type {Map<number, Float32Array>} */
  const kept = new Map();
  return {
    of(layer, head) {
      const block = layer * heads + head;
      const unpacked = kept.get(block);
      if (unpacked) return unpacked;
      const pattern = values.of(block);
      for (let index = 0; index < pattern.length; index += 1) if (Number.isNaN(pattern[index])) pattern[index] = 0;
      for (const oldest of kept.keys()) if (kept.size >= 32) kept.delete(oldest); // a screen's worth stays unpacked
      kept.set(block, pattern);
      return pattern;
    },
  };
}

/**
 * Probabilities as a report gives them, or as Python packed them.
 *
 * @type {(patterns: Packed | Patterns, heads: number) => Promise<Patterns>}
 */
const patternsIn = async (patterns, heads) => ("of" in patterns ? patterns : patternsOf(await unpack(patterns), heads));

/** A number with its sign, below 0 with the sign for minus. @type {Shared["signed"]} */
const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

/** @type {Shared["percent"]} */
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.001 ? 3 : 1)}\u00a0%`;

// ---- colours --------------------------------------------------------------------------------------------------

/** What a CSS variable of the stage is as "rgb(…)", for a canvas. */
function colourOf(stage, variable) {
  const probe = make("span", { style: `color: var(${variable})` });
  stage.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/** The numbers of "rgb(…)". @type {(colour: string) => number[]} */
const numbersIn = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);

/** Light or dark to match the background of the view: a notebook's theme need not be the system's. */
function suitBackground(stage) {
  if (document.documentElement.dataset.attnmechPage !== undefined) return; // attnmech's pages set it themselves
  const [red, green, blue] = backgroundOf(stage);
  setScheme(stage, 0.3 * red + 0.59 * green + 0.11 * blue < 128 ? "dark" : "light");
}

/** The red, green and blue of an element's background; white if none is set. */
function backgroundOf(stage) {
  for (let behind = stage.parentElement; behind; behind = behind.parentElement) {
    const [red, green, blue, alpha = 1] = numbersIn(getComputedStyle(behind).backgroundColor);
    if (alpha >= 0.5) return [red, green, blue];
  }
  return [255, 255, 255];
}

function setScheme(stage, scheme) {
  for (let view = stage; view; view = view.parentElement?.closest(".attnmech")) view.style.colorScheme = scheme;
}

/** Calls `redraw` when the colours or the width of the stage may have changed. */
function onChange(stage, redraw) {
  let width = stage.clientWidth;
  new ResizeObserver(() => {
    if (!stage.clientWidth || stage.clientWidth === width) return;
    width = stage.clientWidth;
    redraw();
  }).observe(stage);
  const recolour = () => {
    suitBackground(stage);
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  new MutationObserver(recolour).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

/** Where a canvas is drawn on. @param {HTMLCanvasElement} canvas */
const contextOf = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

/** A canvas as sharp as the screen, and its context in CSS pixels. */
function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = contextOf(canvas);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// ---- a box at the pointer -------------------------------------------------------------------------------------

/** One box a stage; `show(event, lines)` puts lines of text beside the pointer. */
function pointerBox(stage) {
  const box = make("div", { className: "attnmech-box", hidden: true, role: "status" });
  stage.append(box);
  return {
    show({ clientX, clientY }, lines) {
      box.replaceChildren(...lines.map((text) => make("div", { text })));
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      box.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - width - 8))}px`;
      box.style.top = `${Math.max(4, clientY + 18 + height > innerHeight ? clientY - height - 12 : clientY + 18)}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

// ---- plotly ---------------------------------------------------------------------------------------------------

const MOST_ASPECT = 1.5; // greatest height over width, so that a figure fits a phone

/**
 * Draws a figure with few buttons, none of which uploads it; in steps if `pause` is set.
 *
 * @type {Shared["drawPlotly"]}
 */
function drawPlotly(place, { data, layout }, pause) {
  place.pause = pause;
  breakTitles(layout);
  const byFinger = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom
  return Plotly.react(place, data, { ...layout, dragmode: byFinger ? false : "zoom" }, {
    displaylogo: false,
    plotlyServerURL: "",
    displayModeBar: byFinger ? false : "hover",
    setBackground: takePause,
    modeBarButtonsToAdd: pictureButtons,
    modeBarButtonsToRemove: ["toImage", "sendChartToCloud", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  });
}

const TEXT_BESIDE = 110; // CSS pixels that the labels of rows may take beside a figure's horizontal axes
const LINE_OF_TITLE = 17; // CSS pixels

/**
 * Breaks titles that are wider than their figure into lines, and makes room for these; plotly would cut them off.
 *
 * @param {any} layout
 */
function breakTitles(layout) {
  const broken = (holder, width, size) => {
    const font = `${holder.font?.size ?? size}px system-ui, sans-serif`;
    const before = holder.text.split("<br>");
    const lines = before.flatMap((line) => linesWithin(line, width, font));
    holder.text = lines.join("<br>");
    return LINE_OF_TITLE * (lines.length - before.length);
  };
  const margin = { ...layout.margin };
  const grow = (side, more) => {
    margin[side] = (margin[side] ?? 10) + more;
    layout.height += more;
  };
  for (const [name, part] of Object.entries(layout)) {
    const { width } = layout;
    if (name === "title" && part.text) grow("t", broken(part, width - 20, 17));
    if (/^legend\d*$/.test(name) && part.title?.text) grow("t", broken(part.title, (1 - (part.x ?? 0)) * (width - 40), 13));
    if (/^xaxis\d*$/.test(name) && part.title?.text) {
      const [from, to] = part.domain ?? [0, 1];
      broken(part.title, (to - from) * (width - TEXT_BESIDE), 14); // the axis makes room for its title
    }
    if (name === "annotations") {
      for (const note of part) if (note.xref === "paper" && note.text) grow(note.y < 0 ? "b" : "t", broken(note, width - 20, 12));
    }
  }
  layout.margin = margin;
}

/**
 * Plotly calls this once it has laid a figure out, and draws axes and data when what is in `_promises` is kept; where
 * labels need more room than it gave them, it does both again. The page's own background shows.
 *
 * @param {PlotlyDrawn} plot
 */
function takePause({ pause, _promises }) {
  if (pause) _promises.push(pause());
}

const PNG_SCALE = 3; // pixels of a picture for each of the figure's
const TITLE_SIZE = 14; // CSS pixels
const TITLE_FONT = `600 ${TITLE_SIZE}px system-ui, sans-serif`;

/** One button a format; always the same objects, or plotly would take the figure for a new one. */
const pictureButtons = ["svg", "png"].map((format) => {
  const name = format.toUpperCase();
  const letters = '<text x="10" y="14" text-anchor="middle" font-size="9" font-weight="700" fill="#757575">';
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">${letters}${name}</text></svg>`;
  const click = (plot) => savePicture(plot, format);
  return { name: `picture-${format}`, title: `Save as ${name}`, icon: { width: 20, height: 20, svg }, click };
});

/**
 * Saves a figure with its title, on the background of the page; `plot.picture()` gives the file's name and the title.
 *
 * @param {PlotlyDrawn} plot
 * @param {string} format
 */
async function savePicture(plot, format) {
  const { name, title } = plot.picture();
  const { width, height, font } = plot._fullLayout;
  const drawn = await Plotly.toImage(plot, { format: "svg", width, height, imageDataOnly: true });
  const picture = titled(drawn, { title, width, height, ink: font.color, background: backgroundOf(plot) });
  const svg = new XMLSerializer().serializeToString(picture);
  const blob = format === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await pixelsOf(svg, picture);
  const link = make("a", { href: URL.createObjectURL(blob), download: `${name}.${format}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // the browser may first ask where to save it
}

/** A figure's SVG below its title, with nothing transparent behind it. */
function titled(drawn, { title, width, height, ink, background }) {
  const lines = linesWithin(title, width - 2 * TITLE_SIZE);
  const above = lines.length && Math.ceil((lines.length + 0.8) * 1.3 * TITLE_SIZE);
  const figure = new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement;
  figure.setAttribute("y", String(above));
  const whole = { width, height: height + above };
  return makeSvg(
    "svg",
    { ...whole, viewBox: `0 0 ${width} ${height + above}` },
    makeSvg("rect", { ...whole, fill: `rgb(${background})` }),
    ...lines.map((line, index) =>
      makeSvg("text", { x: TITLE_SIZE, y: (index + 1.2) * 1.3 * TITLE_SIZE, fill: ink, style: `font: ${TITLE_FONT}` }, line),
    ),
    figure,
  );
}

/** Words in lines of at most this many CSS pixels, where no word is longer. */
function linesWithin(words, width, font = TITLE_FONT) {
  const context = contextOf(make("canvas"));
  context.font = font;
  /** @type {string[]} */
  const lines = [];
  for (const word of words.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** A picture of an SVG as a PNG. @returns {Promise<Blob>} */
async function pixelsOf(svg, { width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = make("canvas");
  canvas.width = Math.round(PNG_SCALE * width.baseVal.value);
  canvas.height = Math.round(PNG_SCALE * height.baseVal.value);
  contextOf(canvas).drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((proceed, refuse) => {
    canvas.toBlob((blob) => (blob ? proceed(blob) : refuse(new Error("too large for a PNG"))), "image/png");
  });
}

// ---- controls -------------------------------------------------------------------------------------------------

/** A labelled choice; `choose` is called with the index. */
function selector(label, options, chosen, choose) {
  const select = make("select", { onchange: ({ target }) => choose(target.selectedIndex) });
  for (const option of options) select.add(new Option(option));
  select.selectedIndex = chosen;
  return { element: make("label", { className: "attnmech-control", text: `${label} ` }, select), select };
}

/** The selectors of a layer and a head; `choose` is called with both, `show` sets them. @param {HeadsData} data */
function headSelectors({ layers, heads, chosen }, choose) {
  const layer = selector("Layer", layers, chosen.layer, () => choose(both()));
  const head = selector("Head", range(heads), chosen.head, () => choose(both()));
  const both = () => ({ layer: layer.select.selectedIndex, head: head.select.selectedIndex });
  return {
    layer: layer.element,
    head: head.element,
    show(place) {
      layer.select.selectedIndex = place.layer;
      head.select.selectedIndex = place.head;
    },
  };
}

/** A labelled box to tick; `choose` is called with whether it is ticked. */
function checkbox(label, ticked, choose) {
  const box = make("input", { type: "checkbox", onchange: ({ target }) => choose(target.checked) });
  box.checked = ticked;
  return { element: make("label", { className: "attnmech-control" }, box, ` ${label}`), box };
}

/** A labelled range; `choose` is called with the number while it moves. */
function slider(label, { min, max, step, value, words }, choose) {
  const shown = make("output", { text: words(value) });
  const input = make("input", { type: "range", min, max, step });
  input.value = value;
  input.addEventListener("input", () => {
    shown.textContent = words(Number(input.value));
    choose(Number(input.value));
  });
  return { element: make("label", { className: "attnmech-control", text: `${label} ` }, input, " ", shown), input };
}

// ---- weights between tokens ------------------------------------------------------------------------------------

/**
 * The weights that a view draws, [query key] flat: those of one head or the mean of several, without hidden keys.
 *
 * @param {LinesData} data
 */
async function attentionWeights({ pattern, rest, heads, queries, keys, floor = 0 }) {
  const patterns = await patternsIn(pattern, heads);
  const unseen = rest && (await patternsIn(rest, heads));

  /**
   * Without the hidden keys. For probabilities this is the softmax over the other keys: a_j / (their sum + the share of
   * a sink), which stays accurate when one key has nearly all, unlike a_j / (1 − a_hidden). A row is NaN if its
   * remaining sum is at most `floor`: the stored precision then does not determine its weights.
   */
  function ofHead(layer, head, hidden) {
    const all = patterns.of(layer, head);
    if (!hidden.some(Boolean)) return all;
    const left = new Float32Array(all.length);
    const beside = unseen?.of(layer, head);
    for (let query = 0, row = 0; query < queries.length; query += 1, row += keys.length) {
      let total = beside ? beside[query] : 0;
      for (let key = 0; key < keys.length; key += 1) if (!hidden[key]) total += all[row + key];
      if (total <= floor) total = 0;
      for (let key = 0; key < keys.length; key += 1) left[row + key] = total ? (hidden[key] ? 0 : all[row + key]) / total : NaN;
    }
    return left;
  }

  /** The mean over some heads, each normalised first; a head counts in the rows where it has keys left. */
  function meanOf(layer, chosen, hidden) {
    const mean = new Float64Array(queries.length * keys.length);
    const counted = new Uint16Array(queries.length);
    for (const head of chosen) {
      const weights = ofHead(layer, head, hidden);
      for (let query = 0, row = 0; query < queries.length; query += 1, row += keys.length) {
        if (Number.isNaN(weights[row])) continue;
        counted[query] += 1;
        for (let at = row; at < row + keys.length; at += 1) mean[at] += weights[at];
      }
    }
    for (let at = 0; at < mean.length; at += 1) mean[at] /= counted[Math.floor(at / keys.length)];
    return mean;
  }

  /** The share of these heads' attention on the hidden keys, before hiding. */
  function ofHidden(layer, chosen, hidden) {
    let sum = 0;
    for (const head of chosen) {
      const all = patterns.of(layer, head);
      for (let at = 0; at < all.length; at += 1) if (hidden[at % keys.length]) sum += all[at];
    }
    return sum / (chosen.length * queries.length);
  }
  return { ofHead, meanOf, ofHidden };
}

/** Flat weights, [query key]. @type {(values: Float32Array | Float64Array, keys: number) => number[][]} */
const rowsOf = (values, keys) =>
  range(values.length / keys).map((query) => Array.from(values.subarray(query * keys, (query + 1) * keys)));

/** Tells the page what the reader chose in a view: indices of layer, head or query. */
function announce(stage, detail) {
  stage.dispatchEvent(new CustomEvent("attnmech-choose", { detail, bubbles: true }));
}

const MOST_LISTED_BELOW = 60;

/** @type {(one: {weight: number}, other: {weight: number}) => number} */
const heaviestFirst = (one, other) => other.weight - one.weight;

const isolated = (text) => `\u2068${text}\u2069`; // a right-to-left token leaves its surroundings alone

/** A token in a sentence: its position, if that of the first is `first`, and its text. */
const named = (tokens, index, first = 0) => `${first + index} “${isolated(tokens[index])}”`;

const counting = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** "a, b and c"; `none` where there is nothing. */
function joined(parts, none = "") {
  return parts.length < 2 ? (parts[0] ?? none) : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}

/** Some tokens by name, many by their number: "key 0 “<s>”", "12 keys". */
function enumerated(indices, tokens, noun, first = 0) {
  if (indices.length > 3) return `${indices.length} ${noun === "query" ? "queries" : `${noun}s`}`;
  return joined(indices.map((index) => `${noun} ${named(tokens, index, first)}`));
}

/** "query 12 “anchor” gives", or "key 3 “old” receives". */
function subjectOf({ side, index }, { queries, keys, first = 0 }) {
  return side === "query" ? `query ${named(queries, index, first)} gives` : `key ${named(keys, index)} receives`;
}

/** What it gives or receives: "61 % to 3 “old”", or "61 % from query 12 “anchor”". */
function objectOf(side, { query, key, weight }, { queries, keys, first = 0 }) {
  return `${percent(weight)} ${side === "query" ? `to ${named(keys, key)}` : `from query ${named(queries, query, first)}`}`;
}

/** All weights drawn from a pinned query, including those to tokens out of view: "Query 12 “anchor”: 61 % to 3 “old”, …". */
function listedBelow(query, lines, described, { queries, first = 0 }) {
  const words = lines.slice(0, MOST_LISTED_BELOW).map(described);
  if (lines.length > words.length) words.push(`and ${counting(lines.length - words.length, "smaller weight")}`);
  return `Query ${named(queries, query, first)}: ${words.join(", ") || "no weight this large"}.`;
}

/** Sentences about the hidden keys, the weight that they had, and the queries without any remaining key. */
function omissions(hidden, blank, had, { queries, keys, words, first = 0 }) {
  const out = range(keys.length).filter((key) => hidden[key]);
  return (
    (out.length ? ` Hidden: ${enumerated(out, keys, "key")}, which had ${percent(had)} of the ${words.whole}.` : "") +
    (blank.length ? ` No key remains for ${enumerated(blank, queries, "query", first)}.` : "")
  );
}

/** A button for a token; its text is isolated for bidirectional layout. */
function tokenButton(token, index) {
  const text = make("bdi", { text: token });
  return make("button", { type: "button", title: token, "aria-pressed": "false" }, make("span", { text: index }), text);
}

/**
 * Lets token buttons be pointed at, focused and pinned. `sides` holds lists of them by name; a place is {side, index}.
 * `lines(place)` gives the lines of the box at the pointer, `show(place)` draws a place (null: everything), and
 * `pinned(place)` is called when the user pins or unpins by click or Enter. Arrow keys move along a side.
 *
 * @param {Stage} stage
 * @param {Record<string, HTMLButtonElement[]>} sides
 * @param {{lines(at: Place): string[], show(at: Place | null): void, pinned(at: Place | null): void}} listeners
 */
function tokenPicker(stage, sides, { lines, show, pinned }) {
  const box = pointerBox(stage);
  /** @type {Map<Element | null, Place>} */
  const places = new Map();
  /** @type {Record<string, HTMLButtonElement>} */
  const stops = {}; // the button of each side that Tab reaches
  let pin = /** @type {Place | null} */ (null);
  for (const [side, buttons] of Object.entries(sides)) {
    buttons.forEach((button, index) => {
      places.set(button, { side, index });
      button.tabIndex = -1;
    });
    stop(side, buttons[0]);
  }
  /** @type {(event: Event) => Place | undefined} */
  const placeOf = ({ target }) => places.get(/** @type {Element} */ (target).closest("button"));

  function stop(side, button) {
    if (stops[side]) stops[side].tabIndex = -1;
    stops[side] = button;
    button.tabIndex = 0;
  }

  function press(pressed) {
    if (pin) sides[pin.side][pin.index].setAttribute("aria-pressed", pressed);
  }

  function pinTo(place) {
    press("false");
    pin = place;
    press("true");
    show(pin);
  }

  function leave() {
    box.hide();
    show(pin);
  }

  stage.addEventListener("pointerover", (event) => {
    const place = placeOf(event);
    if (!place) return;
    show(place);
    box.show(event, lines(place));
  });
  stage.addEventListener("pointerout", (event) => placeOf(event) && leave());
  stage.addEventListener("focusin", (event) => {
    const place = placeOf(event);
    if (!place) return;
    const button = sides[place.side][place.index];
    stop(place.side, button);
    if (!button.matches(":focus-visible")) return;
    const { right, top } = button.getBoundingClientRect();
    show(place);
    box.show({ clientX: right, clientY: top }, lines(place));
  });
  stage.addEventListener("focusout", (event) => placeOf(event) && leave());
  stage.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (!place) return;
    pinTo(place === pin ? null : place);
    pinned(pin);
  });
  stage.addEventListener("keydown", (event) => {
    const place = placeOf(event);
    if (event.key === "Escape" && (place || pin)) {
      box.hide();
      pinTo(null);
      pinned(null);
    }
    if (!place) return;
    const { side, index } = place;
    const last = sides[side].length - 1;
    const goal = {
      ArrowUp: index - 1, ArrowLeft: index - 1, ArrowDown: index + 1, ArrowRight: index + 1, Home: 0, End: last,
    }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    sides[side][Math.max(0, Math.min(last, goal))].focus();
  });

  return {
    /** Pins a token without telling `pinned`; null unpins. */
    pin(side, index) {
      pinTo(index === null ? null : (places.get(sides[side][index]) ?? null));
    },
    get pinned() {
      return pin;
    },
    hideBox: box.hide,
  };
}

if (!document.getElementById("attnmech-style")) {
  document.head.append(make("style", { id: "attnmech-style", text: STYLE }));
}
