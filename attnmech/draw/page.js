"use strict";

// The figures arrive whole from attnmech/draw/scores.py, with the first head's numbers in them. This script only
// puts the chosen layer's, head's and rank's numbers in their place. Text goes into the page by textContent alone;
// `labels` are already escaped for plotly, `tokens` are not.

const NO_VALUE = 65535; // attnmech/draw/packing.py
const MAX_ASPECT = 1.5; // no figure stands higher than this times its width, so that it fits a phone

const page = JSON.parse(document.getElementById("data").textContent);
const { tokens, labels, layers, heads, ranks } = page;
const queries = tokens.map((_, position) => position);
const choices = { layer: layers, head: range(heads), rank: range(ranks), query: queries };
const state = { layer: 0, head: 0, rank: 0, query: tokens.length - 1 }; // indices into choices
let drawnFor = 0; // the window's width that the figures were made for

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

function unpack(packed) {
  return { ...packed, codes: decode(packed.codes) };
}

function mapValues(object, change) {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));
}

/** The values of the chosen layer and head; NaN where there is none. */
function ofHead(packed) {
  const size = packed.codes.length / (layers.length * heads);
  const block = state.layer * heads + state.head;
  const codes = packed.codes.subarray(block * size, (block + 1) * size);
  return Array.from(codes, (code) => (code === NO_VALUE ? NaN : packed.low[block] + packed.step[block] * code));
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
};

function frameChosenRow(figure) {
  Object.assign(figure.layout.shapes[0], { y0: state.query - 0.5, y1: state.query + 0.5 });
}

function draw(id, numbers) {
  const figure = structuredClone(page.figures[id]);
  fill[id](figure, numbers);
  fitWidth(figure, element(id).clientWidth);
  useTextColour(figure.layout);
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
    if (trace.mode === "markers") trace.marker.size = Math.min(trace.marker.size, largestMark);
  }
}

function useTextColour(layout) {
  const { color } = getComputedStyle(document.body);
  layout.font = { color };
  for (const shape of layout.shapes ?? []) shape.line.color = color;
}

// ---- sentences ------------------------------------------------------------------------------------------------

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
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
};

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
  for (const id of Object.keys(fill)) draw(id, numbers);
  for (const [id, sentence] of Object.entries(findings)) element(`${id}-finding`).textContent = sentence(numbers);
  for (const name of ["layer", "head", "rank"]) element(name).value = choices[name][state[name]];
  for (const code of document.querySelectorAll("[data-call]")) code.textContent = callOf(code.dataset.call);
  history.replaceState(null, "", new URL(`#${hash()}`, location.href)); // inside a frame, "#…" alone is refused
}

function callOf(figure) {
  const values = { figure, layer: choices.layer[state.layer], head: state.head, rank: state.rank };
  return page.call.replace(/\{(figure|layer|head|rank)\}/g, (_, name) => values[name]);
}

function hash() {
  return Object.entries(state)
    .map(([name, index]) => `${name}=${choices[name][index]}`)
    .join("&");
}

function chooseFromHash() {
  const changes = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const index = name in choices ? choices[name].indexOf(Number(value)) : -1;
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

for (const name of ["layer", "head", "rank"]) {
  for (const value of choices[name]) element(name).add(new Option(value, value));
  element(name).addEventListener("change", (event) => choose({ [name]: event.target.selectedIndex }));
  element(`${name}-range`).textContent = `${choices[name][0]}–${choices[name].at(-1)}`;
}
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
