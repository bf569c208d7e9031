// The figures arrive from attnmech/draw/scores.py, ledger.py, focus.py and updates.py. This script only puts the numbers
// of the chosen layer, head, rank, query and side in their place, once a figure is in sight. Text goes into the page by
// textContent alone; `labels` are already escaped for plotly, `tokens` are not.


const FADED = 0.4; // attnmech/draw/updates.py: the opacity of heads not chosen
const MAGNITUDE_BINS_A_DECADE = 20; // attnmech/draw/updates.py
const ORIENTATION_BINS_A_UNIT = 40; // attnmech/draw/updates.py
const LEDGER_KEYS = 12; // attnmech/draw/ledger.py
const ONE_STEP = 600; // milliseconds within which steps of one control are one for the Back button
const LEDGER_PIXELS = 26; // attnmech/draw/ledger.py: of a row

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
let printing = false;
let everywhere = false; // whether figures out of sight are drawn, too
let queryChosen = false; // by the reader; until then the views show all rows
let lastStep = { what: "", at: -Infinity }; // of the reader, and when
const inSight = new Set(); // the figures on the screen or near it
const drawnWith = {}; // what each figure was last drawn with

const element = (id) => document.getElementById(id);

function range(length) {
  return Array.from({ length }, (_, index) => index);
}

// ---- the numbers of one head ----------------------------------------------------------------------------------

await attnmech.script(page.scripts.attnmech);
const { unpack, unpackPatterns, plotlyOptions, MOST_ASPECT } = attnmech.kit;
const plotlyArrives = attnmech.script(page.scripts.plotly);
const [scores, patterns, rests, rankedKey, keyTerms, rankedShare, terms, focusNumbers, attended, updateSides] =
  await Promise.all([
    unpack(page.scores),
    unpackPatterns(page.pattern, heads),
    page.rest && unpackPatterns(page.rest, heads),
    unpack(page.ranked_key),
    unpackAll(page.key_terms),
    unpackAll(page.ranked_share),
    unpackAll(page.terms),
    page.focus && unpackAll(page.focus.numbers).then((numbers) => mapValues(numbers, ofAllHeads)),
    page.updates && unpack(page.updates.attended),
    page.updates && unpackSides(page.updates.sides),
  ]);

async function unpackAll(object) {
  const entries = Object.entries(object).map(async ([name, packed]) => [name, await unpack(packed)]);
  return Object.fromEntries(await Promise.all(entries));
}

async function unpackSides(sides) {
  const entries = Object.entries(sides).map(async ([name, { log_magnitude, orientation, ...side }]) => [
    name,
    { ...side, ...(await unpackAll({ log_magnitude, orientation })) },
  ]);
  return Object.fromEntries(await Promise.all(entries));
}

function mapValues(object, change, then = (_, changed) => changed) {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, then(name, change(value))]));
}

/** The values of one layer and head as a list; NaN where there is none. */
function valuesOf(packed, block) {
  return Array.from(packed.of(block));
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
    row: rowOfQuery(scoreRows[state.query]),
  };
}

/** The terms, scores and probabilities of the chosen query. */
function rowOfQuery(score) {
  const row = (values, [rowsOfTerm, columns]) => {
    const start = rowsOfTerm === 1 ? 0 : state.query * columns;
    return queries.map((key) => values[start + (columns === 1 ? 0 : key)]);
  };
  return {
    score,
    terms: mapValues(terms, ofHead, (name, values) => row(values, page.term_shapes[name])),
    pattern: probabilitiesOf(state.query),
  };
}

function probabilitiesOf(query) {
  const pattern = patterns.of(state.layer, state.head);
  return Array.from(pattern.subarray(query * tokens.length, (query + 1) * tokens.length));
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

  "row-ledger": (figure, { row }) => fillLedger(figure, row),

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
  "row-ledger": ["layer", "head", "query"],
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

/** attnmech/draw/ledger.py: the likeliest keys of the row, the highest first. */
function fillLedger(figure, { score, terms: termsOfRow, pattern }) {
  const visible = queries.filter((key) => Number.isFinite(score[key]));
  const shown = visible.sort((a, b) => pattern[b] - pattern[a] || a - b).slice(0, LEDGER_KEYS);
  const rows = shown.map((key) => labels[key]);
  const short = (value) => (value > 0 && value < 1e-3 ? "&lt;0.001" : value ? value.toFixed(3) : "0");
  const hover = shown.map((key) =>
    [
      `key ${labels[key]}`,
      ...Object.entries(termsOfRow)
        .sort(([a], [b]) => ledgerOrder.indexOf(a) - ledgerOrder.indexOf(b))
        .map(([term, values]) => `${page.term_labels[term]} ${signed(values[key])}`),
      `score ${signed(score[key])}`,
      `probability ${short(pattern[key])}`,
    ].join("<br>"),
  );
  for (const trace of figure.data) {
    const values = { score, probability: pattern, ...termsOfRow }[trace.meta];
    Object.assign(trace, { x: shown.map((key) => values[key]), y: rows, hovertext: hover });
    if (trace.meta === "probability") trace.text = shown.map((key) => short(pattern[key]));
  }
  const together = shown.reduce((sum, key) => sum + pattern[key], 0).toFixed(3);
  const [number, ...words] = labels[state.query].split(" ");
  const { title, yaxis, xaxis2 } = figure.layout;
  const summary = `${shown.length} of its ${visible.length} visible keys, together ${together}`;
  title.text = `query ${number} “${words.join(" ")}”<br>${summary}`;
  Object.assign(yaxis, { categoryarray: rows, range: [rows.length - 0.5, -0.5] });
  xaxis2.range = [0, 1.5 * Math.max(...shown.map((key) => pattern[key]))];
  figure.layout.height += LEDGER_PIXELS * (shown.length - page.figures["row-ledger"].layout.yaxis.categoryarray.length);
}

function frameChosenRow(figure) {
  Object.assign(figure.layout.shapes[0], { y0: state.query - 0.5, y1: state.query + 0.5 });
}

const ledgerOrder = page.figures["row-ledger"]?.data.map((trace) => trace.meta);

/** Draws a figure that is in sight or to be printed, unless it already shows the choice. */
function draw(id, numbers) {
  if (!window.Plotly || !(inSight.has(id) || everywhere)) return;
  const chosen = follows[id].map((name) => state[name]);
  const ink = getComputedStyle(document.body).color;
  const key = [...chosen, element(id).clientWidth, ink].join();
  if (drawnWith[id] === key) return;
  drawnWith[id] = key;
  const figure = structuredClone(page.figures[id]);
  fill[id](figure, numbers);
  fitWidth(figure, element(id).clientWidth);
  element(id).style.minHeight = "";
  useTextColour(figure, ink);
  const isNew = !element(id).data;
  const byFinger = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom
  figure.layout.dragmode = byFinger ? false : "zoom";
  Plotly.react(id, figure.data, figure.layout, plotlyOptions(byFinger));
  element(id).picture = () => ({ name: `${chosenHead()}_${id.replaceAll("-", "_")}`, title: titleOf(id) });
  if (isNew && clicked[id]) element(id).on("plotly_click", ({ points }) => clicked[id](points[0]));
}

const chosenHead = () => `L${choices.layer[state.layer]}H${state.head}`;

/** What a picture of the figure is called: the section's heading, and what is chosen. */
function titleOf(id) {
  const heading = element(id).closest("section").querySelector("h2").textContent;
  const rank = follows[id].includes("rank") ? [`rank ${state.rank}`] : [];
  const side = follows[id].includes("side") ? [`${choices.side[state.side]} side`] : [];
  return [heading, chosenHead(), ...rank, ...side].join(", ");
}

/** As wide as the page. On a narrow screen: less height, and in the map no gaps and marks about as small as a cell. */
function fitWidth(figure, width) {
  figure.layout.width = width;
  figure.layout.height = Math.min(figure.layout.height, Math.round(width * MOST_ASPECT));
  const cell = (0.7 * width) / tokens.length;
  const largestMark = Math.max(cell + 1, 4);
  for (const trace of figure.data) {
    if (trace.meta === "scores" && cell < 8) Object.assign(trace, { xgap: 0, ygap: 0 });
    if (trace.meta in page.mark_signs) trace.marker.size = Math.min(trace.marker.size, largestMark);
  }
}

function useTextColour({ data, layout }, color) {
  layout.font = { ...layout.font, color };
  for (const shape of layout.shapes ?? []) if (shape.name !== "own colour") shape.line.color = color;
  for (const trace of data) if (trace.meta === "chosen") trace.marker.color = color;
}

// ---- the views of attention -----------------------------------------------------------------------------------

const embedded = ["model-view", "sentence-view", "token-graph"];
const kinds = { "model-view": "model", "sentence-view": "sentence", "token-graph": "token_graph" };
const begun = new Map(); // when each is drawn

/** The views of attention show all rows until a reader chooses one. */
function choiceForViews(changes) {
  const { layer, head, query } = state;
  if (changes && !("query" in changes)) return { layer, head };
  return { layer, head, query: queryChosen ? query : null };
}

/** Draws a view of attention, or CircuitsVis's, when it first comes into sight. */
function begin(id) {
  if (!begun.has(id)) begun.set(id, drawView(id));
  return begun.get(id);
}

async function drawView(id) {
  const stage = element(id);
  stage.classList.add("attnmech");
  stage.style.minHeight = "";
  if (id === "expected-tokens") {
    await attnmech.script(page.scripts.circuitsvis);
    attnmech.views.circuitsvis(stage, page.expected);
    return;
  }
  const { special } = page;
  const chosen = { layer: state.layer, head: state.head };
  const data = { layers, heads, queries: tokens, keys: tokens, special, patterns, rests, chosen };
  const options = { embedded: true, overview: true, threshold: 0.1, across: false };
  stage.control = await attnmech.views[kinds[id]](stage, { ...data, ...options });
  stage.control.choose(choiceForViews());
  stage.addEventListener("attnmech-choose", ({ detail }) => choose(detail));
}

// ---- sentences of the figures ---------------------------------------------------------------------------------

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

  "all-heads"() {
    const chosen = `Chosen: ${chosenHead()}.`;
    if (!page.focus) return `${layers.length * heads} heads. ${chosen}`;
    const count = (name) => focusNumbers[name].flat().filter((value) => value >= 0.5).length;
    return (
      `Of ${focusNumbers.self_top.flat().length} heads, in at least half of their rows ${count("first_top")} look most ` +
      `at the first token, ${count("self_top")} at the token itself, ${count("previous_top")} at the one before. ${chosen}`
    );
  },

  "row-ledger"({ row }) {
    const [best, next] = queries
      .filter((key) => Number.isFinite(row.score[key]))
      .sort((a, b) => row.pattern[b] - row.pattern[a] || a - b);
    const named = (key) => `${key} “${tokens[key]}”`;
    if (next === undefined) return `Query ${named(state.query)} sees ${named(best)} alone: it has no choice.`;
    const leads = Object.entries(row.terms)
      .map(([term, values]) => [page.term_labels[term], values[best] - values[next]])
      .filter(([, lead]) => Math.abs(lead) >= 0.0005)
      .sort(([, a], [, b]) => Math.abs(b) - Math.abs(a));
    const lead = row.score[best] - row.score[next];
    return (
      `The score of key ${named(best)} leads that of ${named(next)} by ${signed(lead)}` +
      `${leads.length ? `: ${leads.map(([term, by]) => `${term} ${signed(by)}`).join(", ")}` : ""}.`
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
    if (values.length === 0) return `${chosenHead()} has no update to show.`;
    return (
      `${chosenHead()}: median ${short(median(values))} over ${values.length} tokens, ` +
      `from ${short(values[0])} to ${short(values.at(-1))}.`
    );
  },

  orientation({ updates }) {
    const values = rising(updates.orientation[state.head]);
    if (values.length === 0) return `${chosenHead()} has no update to show.`;
    const against = values.filter((value) => value < 0).length;
    return (
      `${chosenHead()}: median ${signed(median(values))}; ` +
      `${against} of ${values.length} updates point against the stream (below 0).`
    );
  },

  "orientation-by-magnitude"({ updates }) {
    const magnitude = updates.magnitude[state.head];
    const shown = queries.filter((query) => Number.isFinite(magnitude[query]));
    if (shown.length === 0) return `${chosenHead()} has no update to show.`;
    const largest = shown.reduce((a, b) => (magnitude[b] > magnitude[a] ? b : a));
    return (
      `${chosenHead()} is largest at token ${largest} “${tokens[largest]}”: magnitude ` +
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
  for (const [name, words] of sidesOf) words.textContent = name === "magnitude" ? sideWords[side] : shownSide(side);
}

const shownSide = (side) => `Shown: the ${side} side (see figure 7).`;

/** In each section about updates, the place that says which side is shown. */
const sidesOf = ["magnitude", "orientation", "orientation-by-magnitude", "magnitude-by-position"]
  .filter(() => page.updates)
  .map((name) => {
    const words = document.createElement("span");
    element(`${name}-section`).querySelector(".reading").append(" ", words);
    return [name, words];
  });

function focusOfHead(name) {
  return focusNumbers[name][page.focus.layers.indexOf(choices.layer[state.layer])][state.head];
}

/** Of figures 4 to 6: where the chosen head stands, and which head of all stands highest. */
function describeFocus(name, share, what) {
  const own = focusOfHead(name);
  const all = focusNumbers[name].flatMap((values, index) =>
    values.map((value, head) => ({ value, words: `L${page.focus.layers[index]}H${head}` })),
  );
  const defined = all.filter(({ value }) => Number.isFinite(value));
  if (defined.length === 0) return "No row counts.";
  const highest = Math.max(...defined.map(({ value }) => value));
  const [first, ...others] = defined.filter(({ value }) => value === highest);
  const many = defined.filter(({ value }) => value >= 0.5).length;
  const chosen = Number.isFinite(own) ? share(own) : "undefined";
  return (
    `${chosenHead()}: ${chosen}. Highest: ${share(highest)}, ${first.words}` +
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
  const probabilities = probabilitiesOf(query);
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

/** Take new indices into `choices`, moved into their range, show what they select, and let Back undo it. */
function choose(changes) {
  for (const [name, index] of Object.entries(changes)) {
    state[name] = Math.min(Math.max(index, 0), choices[name].length - 1);
    queryChosen ||= name === "query";
  }
  show(changes);
  const step = { what: Object.keys(changes).join(), at: performance.now() };
  const same = step.what === lastStep.what && step.at - lastStep.at < ONE_STEP;
  lastStep = step;
  if (address().href !== location.href) remember(same ? "replaceState" : "pushState");
}

function remember(how) {
  history[how]({ queryChosen }, "", address());
}

function show(changes) {
  drawnFor = innerWidth;
  const numbers = chosenNumbers();
  shadeTokens(state.query);
  drawInSight(numbers);
  for (const [id, sentence] of Object.entries(findings)) {
    if (element(`${id}-finding`)) element(`${id}-finding`).textContent = sentence(numbers);
  }
  for (const id of embedded) element(id).control?.choose(choiceForViews(changes));
  for (const name of controls) element(name).value = choices[name][state[name]];
  if (page.updates) describeSide(choices.side[state.side]);
  for (const code of document.querySelectorAll("[data-call]")) code.textContent = callOf(code.dataset);
}

function drawInSight(numbers) {
  for (const id of Object.keys(page.figures)) draw(id, numbers);
}

/** A head of figures 4 to 6; the other figures may hold fewer layers. */
function chooseFocusPoint({ x, customdata: [head] }) {
  if (layers.includes(x)) choose({ layer: layers.indexOf(x), head });
}

function callOf({ result, call: figure }) {
  const values = { figure, ...chosenValues() };
  return page.calls[result].replace(/\{(figure|layer|head|rank|query|side)\}/g, (_, name) => values[name]);
}

function chosenValues() {
  return Object.fromEntries(Object.entries(state).map(([name, index]) => [name, choices[name][index]]));
}

function address() {
  return new URL(`#${new URLSearchParams(chosenValues())}`, location.href); // inside a frame, "#…" alone is refused
}

/** What the address says, and else what is chosen; after Back, too. */
function chooseFromAddress() {
  const named = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const index = Object.hasOwn(choices, name) ? choices[name].map(String).indexOf(value) : -1;
    if (index >= 0) named[name] = index;
  }
  Object.assign(state, named);
  queryChosen = history.state?.queryChosen ?? "query" in named;
  show({ query: state.query });
  lastStep = { what: "", at: -Infinity };
  remember("replaceState");
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

/**
 * Figures have a width in pixels, so they are drawn again for the paper's, all of them. The views that nobody has
 * scrolled to begin here: they wait for nothing but promises already kept, which is done before paper is laid out.
 */
function setPrinting(now) {
  if (now === printing) return;
  printing = now;
  document.documentElement.classList.toggle("printing", printing);
  everywhere = true;
  show();
  everywhere = printing;
  for (const id of embedded) begin(id).then(() => element(id).control.print(printing));
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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
addEventListener("hashchange", chooseFromAddress);
addEventListener("resize", fitWindow);
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));

/** What a click on a figure chooses, where it chooses anything. */
const chooseQuery = ({ y }) => choose({ query: labels.indexOf(y) });
const clicked = {
  "attention-map": chooseQuery,
  "share-bars": chooseQuery,
  "self-focus": chooseFocusPoint,
  "first-focus": chooseFocusPoint,
  concentration: chooseFocusPoint,
  magnitude: ({ data }) => choose({ head: data.meta }),
  orientation: ({ data }) => choose({ head: data.meta }),
  "orientation-by-magnitude": ({ customdata: [head] }) => choose({ head }),
  "magnitude-by-position": ({ customdata: [head] }) => choose({ head }),
};
for (const [id, layersOfMap] of Object.entries(page.maps)) {
  clicked[id] = ({ pointIndex: [row, head] }) => {
    if (layers.includes(layersOfMap[row])) choose({ layer: layers.indexOf(layersOfMap[row]), head });
  };
}

/** Figures are drawn when they are near the screen, and only then: a page opens as fast as its first screen. */
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) inSight.delete(target.id);
      else if (target.id in page.figures) inSight.add(target.id);
      else begin(target.id);
    }
    drawInSight(chosenNumbers());
  },
  { rootMargin: "600px" },
);

/** In the contents, the section that is read. */
const reader = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const link = document.querySelector(`a[data-section="${target.id.replace(/-section$/, "")}"]`);
      if (isIntersecting) {
        for (const other of document.querySelectorAll("nav a[aria-current]")) other.removeAttribute("aria-current");
        link.setAttribute("aria-current", "true");
      }
    }
  },
  { rootMargin: "-30% 0px -60% 0px" },
);

/** A contents' link moves to its section; the address stays that of the choice. */
function goToSection(event) {
  const name = event.target.closest("a")?.dataset.section;
  if (!name) return;
  event.preventDefault();
  element(`${name}-section`).scrollIntoView();
  if (matchMedia("(max-width: 1100px)").matches) element("contents").open = false;
}

element("contents").addEventListener("click", goToSection);
if (matchMedia("(max-width: 1100px)").matches) element("contents").open = false;
for (const section of document.querySelectorAll("[id$='-section']")) reader.observe(section);
for (const figure of document.querySelectorAll(".figure")) {
  figure.style.minHeight = `${Math.min(page.figures[figure.id]?.layout.height ?? 300, 800)}px`;
  watcher.observe(figure);
}
for (const [name, value] of Object.entries(page.start ?? {})) state[name] = choices[name].indexOf(value);
chooseFromAddress();
await plotlyArrives;
drawInSight(chosenNumbers());
if (page.expected) await begin("expected-tokens"); // CircuitsVis draws later than it is told to: too late for paper
document.documentElement.dataset.ready = "yes";
for (const id of embedded) await new Promise((proceed) => setTimeout(proceed, 200)).then(() => begin(id));
document.documentElement.dataset.whole = "yes";
