"use strict";

// The figures arrive from attnmech/draw/scores.py, focus.py and updates.py. This script only puts the numbers of the
// chosen layer, head, rank and side in their place. Text goes into the page by textContent alone; `labels` are already
// escaped for plotly, `tokens` are not.

const NO_VALUE = 65535; // attnmech/draw/packing.py
const MAX_ASPECT = 1.5; // no figure stands higher than this times its width, so that it fits a phone

const FADED = 0.4; // attnmech/draw/updates.py: the opacity of heads not chosen
const MAGNITUDE_BINS_A_DECADE = 20; // attnmech/draw/updates.py
const ORIENTATION_BINS_A_UNIT = 40; // attnmech/draw/updates.py

const page = JSON.parse(document.getElementById("data").textContent);
const { tokens, labels, layers, heads, ranks } = page;
const queries = tokens.map((_, position) => position);
const choices = { layer: layers, head: range(heads), rank: range(ranks), query: queries };
const state = { layer: 0, head: 0, rank: 0, query: tokens.length - 1 }; // indices into choices
if (page.updates) {
  choices.side = Object.keys(page.updates.sides);
  state.side = 0;
}
const controls = Object.keys(state).filter((name) => name !== "query");
let drawnFor = 0; // the window's width that the figures were made for
const drawnWith = {}; // what each figure was last drawn with

const element = (id) => document.getElementById(id);

function range(length) {
  return Array.from({ length }, (_, index) => index);
}

// ---- the numbers of one head ----------------------------------------------------------------------------------

function decode(base64) {
  return new Uint16Array(Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)).buffer);
}

const scores = unpack(page.scores);
const pattern = unpack(page.pattern);
const keyTerms = mapValues(page.key_terms, unpack);
const rankedShare = mapValues(page.ranked_share, unpack);
const rankedKey = unpack(page.ranked_key);
const focusNumbers = page.focus && mapValues(page.focus.numbers, (packed) => ofAllHeads(unpack(packed)));
const attended = page.updates && unpack(page.updates.attended);
const updateSides =
  page.updates &&
  mapValues(page.updates.sides, (side) => ({
    ...side,
    log_magnitude: unpack(side.log_magnitude),
    orientation: unpack(side.orientation),
  }));

function unpack(packed) {
  return { ...packed, codes: decode(packed.codes) };
}

function mapValues(object, change) {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));
}

/** The values of one block, which has a low and a step of its own; NaN where there is none. */
function valuesOf(packed, block) {
  const size = packed.codes.length / packed.low.length;
  const codes = packed.codes.subarray(block * size, (block + 1) * size);
  return Array.from(codes, (code) => (code === NO_VALUE ? NaN : packed.low[block] + packed.step[block] * code));
}

/** Of every layer of figures 4 to 6, the one value of each head. */
function ofAllHeads(packed) {
  return page.focus.layers.map((_, layer) => range(heads).map((head) => valuesOf(packed, layer * heads + head)[0]));
}

/** The values of the chosen layer and head. */
function ofHead(packed) {
  return valuesOf(packed, state.layer * heads + state.head);
}

/** The values of every head of the chosen layer. */
function ofLayer(packed) {
  return range(heads).map((head) => valuesOf(packed, state.layer * heads + head));
}

function rows(values) {
  const length = values.length / tokens.length;
  return queries.map((query) => values.slice(query * length, (query + 1) * length));
}

/** The key of the given rank in each row; NaN where the row has none. */
function keysOfRank(rank) {
  return rows(ofHead(rankedKey)).map((row) => row[rank]);
}

/** The numbers that all figures of the chosen layer, head and rank take. */
function chosenNumbers() {
  const scoreRows = rows(ofHead(scores));
  const highest = keysOfRank(0);
  const hasChoice = scoreRows.map((row) => row.filter(Number.isFinite).length > 1);
  return {
    scores: scoreRows,
    highest: highest.map((key, query) => (hasChoice[query] ? key : NaN)),
    keys: keysOfRank(state.rank),
    shares: mapValues(rankedShare, (packed) => rows(ofHead(packed)).map((row) => row[state.rank])),
    keyTerms: mapValues(keyTerms, ofHead),
    updates: page.updates && chosenUpdates(),
  };
}

/** What the heads of the chosen layer write, on the chosen side: of every head, a number for each token. */
function chosenUpdates() {
  const side = updateSides[choices.side[state.side]];
  return {
    magnitude: ofLayer(side.log_magnitude).map((row) => row.map((logarithm) => 10 ** logarithm)),
    orientation: ofLayer(side.orientation),
    attended: ofLayer(attended),
  };
}

function markOf(query, key) {
  return key === query ? "self" : key === 0 ? "first" : "other";
}

function queriesByMark(keys) {
  const marked = { self: [], first: [], other: [] };
  for (const query of queries) if (Number.isFinite(keys[query])) marked[markOf(query, keys[query])].push(query);
  return marked;
}

// ---- numbers into figures -------------------------------------------------------------------------------------

const fill = {
  "attention-map"(figure, numbers) {
    const marked = queriesByMark(numbers.highest);
    for (const trace of figure.data) {
      if (trace.meta === "scores") {
        trace.z = numbers.scores;
      } else {
        trace.x = marked[trace.meta].map((query) => labels[numbers.highest[query]]);
        trace.y = marked[trace.meta].map((query) => labels[query]);
      }
    }
    frameChosenRow(figure);
  },

  "share-triangle"(figure, numbers) {
    const defined = numbers.keys.map((key, query) =>
      Object.values(numbers.shares).every((share) => Number.isFinite(share[query])) ? key : NaN,
    );
    const marked = queriesByMark(defined);
    for (const trace of figure.data) {
      const shown = marked[trace.meta];
      for (const [corner, term] of Object.entries(figure.layout.meta)) {
        trace[corner] = shown.map((query) => (term in numbers.shares ? numbers.shares[term][query] : 0));
      }
      trace.customdata = shown.map((query) => [labels[query], labels[numbers.keys[query]]]);
    }
  },

  "share-bars"(figure, numbers) {
    for (const trace of figure.data) {
      trace.x = numbers.shares[trace.meta];
      trace.customdata = numbers.keys.map((key) => labels[key] ?? "");
    }
    frameChosenRow(figure);
  },

  "key-terms"(figure, numbers) {
    for (const trace of figure.data) {
      const mean = average(numbers.keyTerms[trace.meta]);
      trace.y = numbers.keyTerms[trace.meta].map((value) => value - mean);
    }
  },

  "self-focus": (figure) => moveRing(figure, "self_top"),
  "first-focus": (figure) => moveRing(figure, "first_top"),
  concentration: (figure) => moveRing(figure, "concentration"),

  magnitude(figure, { updates }) {
    const step = (value) => MAGNITUDE_BINS_A_DECADE * Math.log10(value);
    fillHistograms(figure, updates.magnitude, step, (steps) => 10 ** (steps / MAGNITUDE_BINS_A_DECADE));
    showSide(figure);
  },

  orientation(figure, { updates }) {
    const step = (value) => ORIENTATION_BINS_A_UNIT * Math.min(Math.max(value, -1), 1 - 1e-9);
    fillHistograms(figure, updates.orientation, step, (steps) => steps / ORIENTATION_BINS_A_UNIT);
    showSide(figure);
  },

  "orientation-by-magnitude"(figure, { updates }) {
    fillPoints(figure, updates.magnitude, updates.orientation, updates.attended);
    showSide(figure);
  },

  "magnitude-by-position"(figure, { updates }) {
    const position = updates.magnitude.map(() => queries);
    fillPoints(figure, position, updates.magnitude, updates.attended);
    showSide(figure);
  },
};

/** Which choices a figure follows. */
const follows = {
  "attention-map": ["layer", "head", "query"],
  "share-triangle": ["layer", "head", "rank"],
  "share-bars": ["layer", "head", "rank", "query"],
  "key-terms": ["layer", "head"],
  "self-focus": ["layer", "head"],
  "first-focus": ["layer", "head"],
  concentration: ["layer", "head"],
  magnitude: ["layer", "head", "side"],
  orientation: ["layer", "head", "side"],
  "orientation-by-magnitude": ["layer", "head", "side"],
  "magnitude-by-position": ["layer", "head", "side"],
};

for (const id of Object.keys(page.maps)) {
  fill[id] = (figure) => frameChosenHead(figure, page.maps[id]);
  follows[id] = ["layer", "head"];
}

/** A frame around the cell of the chosen head, in maps of layers and heads. */
function frameChosenHead(figure, layersOfMap) {
  const row = layersOfMap.indexOf(choices.layer[state.layer]);
  const frame = { type: "rect", name: "own colour", line: { width: 3, color: "#d55e00" }, x0: state.head - 0.5, x1: state.head + 0.5 };
  figure.layout.shapes = row < 0 ? [] : [{ ...frame, y0: row - 0.5, y1: row + 0.5 }];
}

/** The ring of figures 4 to 6 goes to the chosen head. */
function moveRing(figure, name) {
  const ring = figure.data.at(-1);
  ring.x = [choices.layer[state.layer]];
  ring.y = [focusOfHead(name)];
}

/** One histogram a head: counts of the bins from the first to the last filled one, with an empty one at either end. */
function fillHistograms(figure, values, step, edge) {
  for (const trace of figure.data) {
    const head = trace.meta;
    const bins = values[head].map((value) => Math.floor(step(value))).filter(Number.isFinite);
    const first = Math.min(...bins) - 1;
    const counts = bins.length ? Array(Math.max(...bins) - first + 2).fill(0) : [];
    for (const bin of bins) counts[bin - first] += 1;
    const most = Math.max(...counts);
    trace.x = counts.map((_, bin) => edge(first + bin + 0.5));
    trace.y = counts.map((count) => head - (0.9 * count) / most);
    trace.customdata = counts.map((count, bin) => [count, edge(first + bin), edge(first + bin + 1)]);
    trace.opacity = head === state.head ? 1 : FADED;
  }
}

/** One point a head and token: traces are "others self", "chosen first" and so on, by group and mark. */
function fillPoints(figure, x, y, attendedKeys) {
  const drawn = figure.data.filter((trace) => !trace.meta.startsWith("legend "));
  for (const trace of drawn) Object.assign(trace, { x: [], y: [], customdata: [] });
  const traces = Object.fromEntries(drawn.map((trace) => [trace.meta, trace]));
  for (const head of range(heads)) {
    const group = head === state.head ? "chosen" : "others";
    for (const query of queries) {
      if (!Number.isFinite(x[head][query]) || !Number.isFinite(y[head][query])) continue;
      const key = attendedKeys[head][query];
      const trace = traces[`${group} ${Number.isFinite(key) ? markOf(query, key) : "none"}`];
      const attends = Number.isFinite(key) ? `attends most to ${labels[key]}` : "one key";
      trace.x.push(x[head][query]);
      trace.y.push(y[head][query]);
      trace.customdata.push([head, `head ${head}, query ${labels[query]}<br>${attends}`]);
    }
  }
}

/** The axes' words for the chosen side, and for all layers one range of magnitudes. */
function showSide(figure) {
  const { titles, log_range } = updateSides[choices.side[state.side]];
  for (const [quantity, axis] of Object.entries(figure.layout.meta)) {
    figure.layout[axis].title.text = titles[quantity];
    if (quantity === "magnitude") figure.layout[axis].range = log_range;
  }
}

function frameChosenRow(figure) {
  Object.assign(figure.layout.shapes[0], { y0: state.query - 0.5, y1: state.query + 0.5 });
}

function draw(id, numbers) {
  const chosen = follows[id].map((name) => state[name]);
  const ink = getComputedStyle(document.body).color;
  const key = [...chosen, element(id).clientWidth, ink].join();
  if (drawnWith[id] === key) return;
  drawnWith[id] = key;
  const figure = structuredClone(page.figures[id]);
  fill[id](figure, numbers);
  fitWidth(figure, element(id).clientWidth);
  useTextColour(figure, ink);
  const byFinger = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom
  figure.layout.dragmode = byFinger ? false : "zoom";
  Plotly.react(id, figure.data, figure.layout, {
    displaylogo: false,
    displayModeBar: byFinger ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  });
}

/** As wide as the page. On a narrow screen: less height, and in the map no gaps and marks about as small as a cell. */
function fitWidth(figure, width) {
  figure.layout.width = width;
  figure.layout.height = Math.min(figure.layout.height, Math.round(width * MAX_ASPECT));
  const cell = (0.7 * width) / tokens.length;
  const largestMark = Math.max(cell + 1, 4);
  for (const trace of figure.data) {
    if (trace.meta === "scores" && cell < 8) Object.assign(trace, { xgap: 0, ygap: 0 });
    if (trace.meta in page.mark_signs) trace.marker.size = Math.min(trace.marker.size, largestMark);
  }
}

function useTextColour({ data, layout }, color) {
  layout.font = { color };
  for (const shape of layout.shapes ?? []) if (shape.name !== "own colour") shape.line.color = color;
  for (const trace of data) if (trace.meta === "chosen") trace.marker.color = color;
}

// ---- sentences ------------------------------------------------------------------------------------------------

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const short = (value) => (value < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(2))));
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

const findings = {
  "attention-map"({ highest }) {
    const count = mapValues(queriesByMark(highest), (found) => found.length);
    const all = count.self + count.first + count.other;
    return (
      `Of the ${all} rows with a choice, ${count.self} score highest at the token itself, ` +
      `${count.first} at the first token, ${count.other} at another token.`
    );
  },

  "score-shares"({ shares }) {
    const counted = Object.values(shares)[0].filter(Number.isFinite).length;
    if (counted === 0) return `No row has a share to show at rank ${state.rank}.`;
    const means = Object.entries(shares).map(
      ([term, share]) => `${page.term_labels[term]} ${percent(average(share.filter(Number.isFinite)))}`,
    );
    return `Mean share at rank ${state.rank} over ${counted} rows: ${means.join(", ")}.`;
  },

  "key-terms"({ keyTerms: terms }) {
    const spreads = Object.entries(terms).map(
      ([term, values]) => `${page.term_labels[term]} by ${(Math.max(...values) - Math.min(...values)).toFixed(2)}`,
    );
    return spreads.length ? `From the lowest to the highest key, the score changes: ${spreads.join(", ")}.` : "";
  },

  "self-focus"() {
    const before = focusOfHead("previous_top");
    const sentence = describeFocus("self_top", percent, "look at the token itself in at least half of the rows");
    if (!Number.isFinite(before)) return sentence;
    return `${sentence} The chosen head looks at the previous token in ${percent(before)}.`;
  },

  "first-focus": () => describeFocus("first_top", percent, "look at the first token in at least half of the rows"),
  concentration: () => describeFocus("concentration", (value) => value.toFixed(3), "reach 0.5"),

  magnitude({ updates }) {
    const values = rising(updates.magnitude[state.head]);
    if (values.length === 0) return `Head ${state.head} has no update to show.`;
    return (
      `Head ${state.head}: median ${short(median(values))} over ${values.length} tokens, ` +
      `from ${short(values[0])} to ${short(values.at(-1))}.`
    );
  },

  orientation({ updates }) {
    const values = rising(updates.orientation[state.head]);
    if (values.length === 0) return `Head ${state.head} has no update to show.`;
    const against = values.filter((value) => value < 0).length;
    return (
      `Head ${state.head}: median ${signed(median(values))}; ` +
      `${against} of ${values.length} updates point against the stream (below 0).`
    );
  },

  "orientation-by-magnitude"({ updates }) {
    const magnitude = updates.magnitude[state.head];
    const shown = queries.filter((query) => Number.isFinite(magnitude[query]));
    if (shown.length === 0) return `Head ${state.head} has no update to show.`;
    const largest = shown.reduce((a, b) => (magnitude[b] > magnitude[a] ? b : a));
    return (
      `Head ${state.head} is largest at token ${largest} “${tokens[largest]}”: magnitude ` +
      `${short(magnitude[largest])}, orientation ${signed(updates.orientation[state.head][largest])}.`
    );
  },

  "magnitude-by-position"({ updates }) {
    const byMark = { self: [], first: [], other: [] };
    for (const head of range(heads)) {
      for (const [mark, marked] of Object.entries(queriesByMark(updates.attended[head]))) {
        byMark[mark].push(...rising(marked.map((query) => updates.magnitude[head][query])));
      }
    }
    const parts = Object.entries(byMark)
      .filter(([, values]) => values.length)
      .map(([mark, values]) => `${short(median(values))} at ${page.mark_labels[mark]} (${values.length})`);
    if (parts.length === 0) return "No head has an update to show.";
    return `Median magnitude over all heads of the layer, by where they attend most (points): ${parts.join(", ")}.`;
  },
};

const sideWords = {
  query:
    "On the query side, u = Σ p v W_O over the keys is what the head adds at the query token, and x is the residual " +
    "stream that enters the block there.",
  target:
    "On the target side, u = v W_O of the key that the query attends most, without its probability, and x is the " +
    "residual stream that enters the block at that key; a key counts once for each such query.",
};

function describeSide(side) {
  element("side-words").textContent = sideWords[side];
  for (const note of document.querySelectorAll(".side")) note.textContent = `Shown: the ${side} side (see figure 7).`;
}

function focusOfHead(name) {
  return focusNumbers[name][page.focus.layers.indexOf(choices.layer[state.layer])][state.head];
}

/** Of figures 4 to 6: where the chosen head stands, and which head of all stands highest. */
function describeFocus(name, share, what) {
  const layer = choices.layer[state.layer];
  const own = focusOfHead(name);
  const all = focusNumbers[name].flatMap((values, index) =>
    values.map((value, head) => ({ value, words: `head ${head} of layer ${page.focus.layers[index]}` })),
  );
  const defined = all.filter(({ value }) => Number.isFinite(value));
  if (defined.length === 0) return "No row counts.";
  const highest = Math.max(...defined.map(({ value }) => value));
  const [first, ...others] = defined.filter(({ value }) => value === highest);
  const many = defined.filter(({ value }) => value >= 0.5).length;
  const chosen = Number.isFinite(own) ? share(own) : "undefined";
  return (
    `Head ${state.head} of layer ${layer}: ${chosen}. Highest: ${share(highest)}, ${first.words}` +
    `${others.length ? ` and ${others.length} more` : ""}. ${many} of ${defined.length} heads ${what}.`
  );
}

/** The numbers among these, in rising order. */
function rising(values) {
  return values.filter(Number.isFinite).sort((a, b) => a - b);
}

function median(values) {
  const sorted = rising(values);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function describeRow(query, probabilities) {
  const visible = queries.filter((key) => probabilities[key] > 0);
  const top = visible.sort((a, b) => probabilities[b] - probabilities[a]).slice(0, 3);
  const parts = top.map((key) => `${percent(probabilities[key])} to ${key} “${tokens[key]}”`);
  return `Query ${query} “${tokens[query]}” attends ${parts.join(", ")}${visible.length > 3 ? ", …" : "."}`;
}

// ---- tokens ---------------------------------------------------------------------------------------------------

const chips = tokens.map((token, position) => {
  const chip = document.createElement("button");
  chip.type = "button";
  chip.className = "token";
  chip.textContent = token;
  chip.addEventListener("click", () => choose({ query: position }));
  chip.addEventListener("pointerenter", () => shadeTokens(position));
  return chip;
});

function shadeTokens(query) {
  const probabilities = rows(ofHead(pattern))[query];
  chips.forEach((chip, key) => {
    const mark = markOf(query, key);
    if (mark === "other") {
      delete chip.dataset.mark;
      delete chip.dataset.sign;
    } else {
      Object.assign(chip.dataset, { mark, sign: page.mark_signs[mark] });
    }
    chip.style.setProperty("--depth", Math.sqrt(probabilities[key])); // the root keeps small ones visible
    chip.title = `token ${key}: attention ${percent(probabilities[key])}`;
    chip.setAttribute("aria-pressed", key === state.query);
    chip.tabIndex = key === state.query ? 0 : -1;
  });
  element("row-finding").textContent = describeRow(query, probabilities);
  element("reason").textContent = page.reasons.length ? page.reasons[state.layer][state.head][query] : "";
}

const tokenSteps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

function moveAlongTokens(event) {
  if (!(event.key in tokenSteps)) return;
  event.preventDefault();
  choose({ query: state.query + tokenSteps[event.key] });
  chips[state.query].focus();
}

// ---- choosing -------------------------------------------------------------------------------------------------

/** Take new indices into `choices`, moved into their range, and show what they select. */
function choose(changes) {
  for (const [name, index] of Object.entries(changes)) {
    state[name] = Math.min(Math.max(index, 0), choices[name].length - 1);
  }
  show();
}

function show() {
  drawnFor = innerWidth;
  const numbers = chosenNumbers();
  shadeTokens(state.query);
  for (const id of Object.keys(page.figures)) draw(id, numbers);
  for (const [id, sentence] of Object.entries(findings)) {
    if (element(`${id}-finding`)) element(`${id}-finding`).textContent = sentence(numbers);
  }
  for (const name of controls) element(name).value = choices[name][state[name]];
  if (page.updates) describeSide(choices.side[state.side]);
  for (const code of document.querySelectorAll("[data-call]")) code.textContent = callOf(code.dataset);
  history.replaceState(null, "", new URL(`#${hash()}`, location.href)); // inside a frame, "#…" alone is refused
}

/** A head of figures 4 to 6; the other figures may hold fewer layers. */
function chooseFocusPoint({ x, customdata: [head] }) {
  if (layers.includes(x)) choose({ layer: layers.indexOf(x), head });
}

function callOf({ result, call: figure }) {
  const values = { figure, ...chosenValues() };
  return page.calls[result].replace(/\{(figure|layer|head|rank|side)\}/g, (_, name) => values[name]);
}

function chosenValues() {
  return Object.fromEntries(Object.entries(state).map(([name, index]) => [name, choices[name][index]]));
}

function hash() {
  return new URLSearchParams(chosenValues()).toString();
}

function chooseFromHash() {
  const changes = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const index = name in choices ? choices[name].map(String).indexOf(value) : -1;
    if (index >= 0) changes[name] = index;
  }
  choose(changes);
}

// ---- light, dark and paper ------------------------------------------------------------------------------------

const themes = ["system", "light", "dark"];

function nextTheme() {
  const root = document.documentElement;
  const theme = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  root.dataset.theme = theme;
  element("theme").textContent = `Theme: ${theme}`;
  show();
}

/** A phone's scrolling changes the window's height all the time; only the width matters to the figures. */
function fitWindow() {
  if (innerWidth !== drawnFor) show();
}

/** Figures have a width in pixels, so they are drawn again for the paper's. */
function setPrinting(printing) {
  document.documentElement.classList.toggle("printing", printing);
  show();
}

// ---- start ----------------------------------------------------------------------------------------------------

for (const name of controls) {
  for (const value of choices[name]) element(name).add(new Option(name === "side" ? `${value} side` : value, value));
  element(name).addEventListener("change", (event) => choose({ [name]: event.target.selectedIndex }));
  if (name !== "side") element(`${name}-range`).textContent = `${choices[name][0]}–${choices[name].at(-1)}`;
}
element("side-control").hidden = !page.updates;
for (const button of document.querySelectorAll("[data-control]")) {
  const { control, step } = button.dataset;
  button.addEventListener("click", () => choose({ [control]: state[control] + Number(step) }));
}
element("tokens").append(...chips);
element("tokens").addEventListener("keydown", moveAlongTokens);
element("tokens").addEventListener("pointerleave", () => shadeTokens(state.query));
element("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
addEventListener("hashchange", chooseFromHash);
addEventListener("resize", fitWindow);
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));

chooseFromHash();
for (const id of ["attention-map", "share-bars"]) {
  element(id).on("plotly_click", ({ points }) => choose({ query: labels.indexOf(points[0].y) }));
}
const chooseHeadOf = {
  "self-focus": chooseFocusPoint,
  "first-focus": chooseFocusPoint,
  concentration: chooseFocusPoint,
  magnitude: ({ data }) => choose({ head: data.meta }),
  orientation: ({ data }) => choose({ head: data.meta }),
  "orientation-by-magnitude": ({ customdata: [head] }) => choose({ head }),
  "magnitude-by-position": ({ customdata: [head] }) => choose({ head }),
};
for (const [id, layersOfMap] of Object.entries(page.maps)) {
  chooseHeadOf[id] = ({ pointIndex: [row, head] }) => {
    if (layers.includes(layersOfMap[row])) choose({ layer: layers.indexOf(layersOfMap[row]), head });
  };
}
for (const [id, chooseHead] of Object.entries(chooseHeadOf)) {
  if (id in page.figures) element(id).on("plotly_click", ({ points }) => chooseHead(points[0]));
}
