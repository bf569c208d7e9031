// Python makes a page's figures and sentences (attnmech/draw/page.py). This script fills their slots for the current
// choices, first on the screen and then, while nothing moves, elsewhere; Back and the address keep the choices. Text
// enters the page only through textContent; `labels` are already escaped for plotly, `tokens` are not.

const ONE_STEP = 600; // milliseconds within which the Back button undoes all steps of one control together
const LEAST_WIDTH = 160; // CSS pixels of a figure; in a narrower box it waits
const LEAST_HEIGHT = 300; // CSS pixels of a figure that is lower on a narrow screen
const QUIET = 100; // milliseconds without scrolling or choosing, after which figures are drawn ahead

/** @type {(id: string) => Stage & PlotlyDrawn} */
const element = (id) => /** @type {any} */ (document.getElementById(id));
const allOf = (selector) => /** @type {HTMLElement[]} */ ([...document.querySelectorAll(selector)]);
/** @type {PageData} */
const page = JSON.parse(element("data").textContent);
const { tokens, labels, choices, marks } = page; // a page about a corpus has no tokens
const keys = page.keys ?? tokens; // in cross-attention, the tokens of another text
const names = Object.keys(choices);
const optional = new Set(page.optional); // in the address only if changed
const ofViews = new Set(Object.values(page.others).flatMap(({ data }) => data.inAddress ?? [])); // what views add to the address
const selectors = /** @type {HTMLSelectElement[]} */ (allOf("select[data-choice]"));
const tabs = allOf("[data-choose-tab]");
const state = Object.fromEntries(names.map((name) => [name, 0])); // indices into choices
const viewIds = [...Object.keys(page.views), ...Object.keys(page.others)];
let drawnFor = 0; // the window's width at the last drawing
let printing = false;
let everywhere = false; // whether figures off the screen are drawn at once too
let drawsAhead = false;
/** The figure that is drawn in steps. @type {{ id: string, drawn: Promise<unknown> | undefined, hurry(): void } | undefined} */
let underWay;
let lastMoved = -Infinity; // the time at which the reader last scrolled or chose
let queryChosen = false; // by the reader; until then the views show all rows
let lastStep = { what: "", at: -Infinity }; // the reader's last step and its time
const terms = new Map(allOf("dfn").map((term) => [term.textContent ?? "", term]));
const anyTerm = new RegExp(`\\b(${[...terms.keys()].join("|")})\\b`);
const ofQuery = ["row-finding", "reason"];
const textsApart = new Set(["headline", ...ofQuery]);
const onScreen = new Set(); // ids of figures
const drawnWith = {}; // for each figure, the key of `shownIn` at its last drawing
const begun = new Map(); // for each view, the promise of its drawing

const chosenValue = (name) => choices[name][state[name]];
const inCall = (name) => (page.inCalls[name] ?? choices[name])[state[name]];
const chosenHead = () => `L${chosenValue("layer")}H${chosenValue("head")}`;

// ---- numbers and sentences of the current choices --------------------------------------------------------------------

await attnmech.script(page.scripts.attnmech);
const { unpack, unpackTexts, patternsOf, drawPlotly, percent, signed, MOST_ASPECT } = attnmech.shared;
const heads = choices.head.length;
const arrays = await unpackArrays(page.arrays);
const patterns = patternsOf(arrays[page.pattern ?? ""], heads);
const carried = page.norms ? patternsOf({ of: (block) => weightedBy(arrays[page.norms ?? ""], block) }, heads) : undefined;
const isWeighted = () => carried !== undefined && chosenValue("weight") === "value";
/** The weights that the views draw: probabilities, or value-weighted attention. @type {Patterns} */
const shown = { of: (layer, head) => (isWeighted() && carried ? carried : patterns).of(layer, head) };
const left = page.rest ? patternsOf(arrays[page.rest], heads) : undefined;
const none = new Float32Array(tokens.length); // a sink carries nothing
/** @type {Patterns | undefined} */
const rest = left && { of: (layer, head) => (isWeighted() ? none : left.of(layer, head)) };
const words = { ...page.words[0] }; // names of the weights; the views keep this object

/** A head's probabilities times the norm of what each key would write, as shares of their rows. */
function weightedBy(norms, block) {
  const pattern = patterns.of(Math.floor(block / heads), block % heads);
  return normalised(pattern, norms.of(block));
}

/** Rows times weights of their columns, divided by their sums; NaN counts as 0. */
function normalised(values, weights) {
  const products = Float32Array.from(values, (value, at) => value * (weights[at % weights.length] || 0));
  for (let row = 0; row < products.length; row += weights.length) {
    let total = 0;
    for (let at = row; at < row + weights.length; at += 1) total += products[at] || 0;
    if (total) for (let at = row; at < row + weights.length; at += 1) products[at] /= total;
  }
  return products;
}

/** Every array by its name, as something with `slice(start, count)`. */
async function unpackArrays(packed) {
  const opened = Object.entries(packed).map(async ([name, packing]) => {
    if (packing.texts) return [name, listed(await unpackTexts(packing.texts))];
    return [name, packing.plain ? listed(packing.plain.map((value) => value ?? NaN)) : await unpack(packing)];
  });
  return Object.fromEntries(await Promise.all(opened));
}

function listed(values) {
  return { slice: (start, count) => values.slice(start, start + count) };
}

/** The place of a head among those that the page holds in detail; -1 if it is none of them. @param {any} at */
const detailedAt = ({ layer, head }) => (page.detailed ?? []).indexOf(layer * heads + head);

/** Whether the page holds this column for the chosen head. */
const isHeld = ({ over }, at = state) => !over.includes("detailed") || detailedAt(at) >= 0;

/** The part of an array that the choices select, flat: its leading axes are choices, `shape` is the rest. @param {Column} column */
function chosen({ array, over, shape, fixed }, at = state) {
  const made = { ...at, ...fixed };
  const step = (name) => (name === "detailed" ? [page.detailed?.length ?? 0, detailedAt(made)] : [choices[name].length, made[name]]);
  const index = over.map(step).reduce((before, [count, place]) => before * count + place, 0);
  const count = shape.reduce((product, length) => product * length, 1);
  return Array.from(arrays[array].slice(index * count, count));
}

/** One column of a slot: numbers, perhaps weighted or reduced by others, or the texts that they index. */
function columnOf(column, less, kept, weights) {
  let values = chosen(column);
  if (weights) values = Array.from(normalised(values, chosen(weights)));
  if (less) {
    const subtracted = chosen(less);
    const run = values.length / subtracted.length;
    values = values.map((value, index) => value - subtracted[Math.floor(index / run)]);
  }
  if (kept) values = values.filter((_, index) => kept[index]);
  const { table, digits, shape } = column;
  if (table) values = values.map((value) => page.tables[table][value] ?? null);
  if (digits !== undefined) values = values.map((value) => signed(value, digits));
  if (shape.length === 0) return values[0];
  const width = shape.length === 2 ? shape[1] : 0;
  return width ? Array.from({ length: shape[0] }, (_, row) => values.slice(row * width, (row + 1) * width)) : values;
}

/** The values of a slot, as attnmech/draw/chart.py defines it. */
function inSlot({ columns, less, where, equals, weights }) {
  const kept = where && chosen(where).map((code) => (equals === null ? !Number.isNaN(code) : code === equals));
  const filledColumns = columns.map((column) => columnOf(column, less, kept, weights));
  if (filledColumns.length === 1) return filledColumns[0];
  return filledColumns[0].map((_, row) => filledColumns.map((values) => values[row]));
}

/** A figure with its slots filled for the current choices; a hidden trace stays empty. */
function filled({ figure, slots }) {
  const copy = structuredClone(figure);
  const fill = (slot) => {
    const last = slot.path.at(-1);
    slot.path.slice(0, -1).reduce((place, step) => (place[step] ??= {}), copy)[last] = inSlot(slot);
  };
  const isSwitch = ({ path: [, , property] }) => property === "visible";
  slots.filter(isSwitch).forEach(fill);
  const isHidden = ({ path: [root, at] }) => root === "data" && copy.data[at].visible === false;
  slots.filter((slot) => !isSwitch(slot) && !isHidden(slot)).forEach(fill);
  return copy;
}

const textOf = (id, at = state) => (isHeld(page.texts[id], at) ? chosen(page.texts[id], at)[0] : "");

function weightsOf(query) {
  return shown.of(state.layer, state.head).subarray(query * keys.length, (query + 1) * keys.length);
}

// ---- figures ----------------------------------------------------------------------------------------------------

const ink = () => getComputedStyle(document.body).color;

/** Whether the page holds a figure for the chosen head. */
const isDrawable = (id) => !page.figures[id]?.inDetail || detailedAt(state) >= 0;

/** Whether a figure has room: a window that opens may have no width yet, and plotly throws where margins leave none. */
const isWide = (id) => element(id).clientWidth >= LEAST_WIDTH;

/** Everything that a figure depends on, as a key. */
function shownIn(id) {
  return [...page.figures[id].follows.map((name) => state[name]), element(id).clientWidth, ink()].join();
}

/**
 * Draws a figure, unless it already shows the choice; in steps, if there is a `pause` between them.
 *
 * @param {string} id
 * @param {() => Promise<unknown>} [pause]
 * @returns {Promise<unknown> | undefined}
 */
function draw(id, pause) {
  if (underWay?.id === id) {
    underWay.hurry();
    return underWay.drawn?.then(() => draw(id));
  }
  const key = shownIn(id);
  if (drawnWith[id] === key || !isDrawable(id) || !isWide(id)) return;
  drawnWith[id] = key;
  const { clicks } = page.figures[id];
  const figure = filled(page.figures[id]);
  fitWidth(figure, element(id).clientWidth);
  element(id).style.minHeight = "";
  element(id).classList.remove("stale");
  useTextColour(figure, ink());
  if (figure.data[0]?.type === "table") {
    drawTable(element(id), figure);
    return;
  }
  const isNew = !element(id).data;
  const drawn = drawPlotly(element(id), figure, pause);
  element(id).picture = () => ({ name: `${chosenHead()}_${id.replaceAll("-", "_")}`, title: titleOf(id) });
  if (isNew && Object.keys(clicks).length) element(id).on("plotly_click", ({ points }) => click(clicks, points[0]));
  return drawn;
}

/** Draws a figure in steps, each of which waits until the page is quiet; the figure stays hidden until the last. */
async function drawInSteps(id) {
  let hurry = () => {};
  const hurried = new Promise((proceed) => {
    hurry = () => proceed(undefined);
  });
  const drawn = draw(id, () => Promise.race([quiet(), hurried]));
  element(id).classList.add("stale");
  underWay = { id, drawn, hurry };
  await drawn;
  underWay = undefined;
  element(id).pause = undefined;
  element(id).classList.toggle("stale", drawnWith[id] !== shownIn(id)); // the choices may have changed meanwhile
}

/** A table that readers can search and copy; the page's build of plotly has no tables. */
function drawTable(place, { data }) {
  const [{ header, cells }] = data;
  const head = document.createElement("tr");
  head.append(...header.values.map((text) => cellOf("th", text)));
  const table = document.createElement("table");
  table.className = "dataframe";
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const row of cells.values[0].keys()) {
    body.insertRow().append(...cells.values.map((column) => cellOf("td", column[row])));
  }
  const box = document.createElement("div");
  box.className = "table";
  box.append(table);
  place.replaceChildren(box);
  place.data = data; // as plotly keeps it
}

/** A cell with a text that is escaped for plotly, perhaps all of it bold. */
function cellOf(tag, text) {
  const written = new DOMParser().parseFromString(String(text), "text/html").body;
  const cell = document.createElement(tag);
  cell.textContent = [...written.childNodes].map((node) => node.textContent || " ").join("");
  if (written.firstElementChild?.tagName === "B") cell.style.fontWeight = "700";
  return cell;
}

/** Makes the choice of a click on a point, if the page offers it. */
function click(clicks, point) {
  const changes = {};
  for (const [name, path] of Object.entries(clicks)) {
    const clicked = path.reduce((place, step) => place?.[step], point);
    const index = name === "query" ? labels.indexOf(clicked) : choices[name].indexOf(clicked);
    if (index < 0) return;
    changes[name] = index;
  }
  choose(changes);
}

/** The title of a figure's picture: the section's heading and the current choices. */
function titleOf(id) {
  const heading = element(id).closest("section")?.querySelector("h2")?.textContent;
  const others = page.figures[id].follows.filter((name) => !["layer", "head", "query"].includes(name));
  const shown = (name) => selectors.find(({ id: own }) => own === name)?.selectedOptions[0].textContent;
  const words = others.map((name) => (name === "rank" ? `rank ${shown(name)}` : shown(name)));
  return [heading, chosenHead(), ...words].join(", ");
}

/** Fits a figure to the page's width; on a narrow screen it is lower, and a map has no gaps and smaller marks. */
function fitWidth(figure, width) {
  figure.layout.width = width;
  figure.layout.height = heightOf(figure, width);
  const cell = (0.7 * width) / keys.length;
  const largestMark = Math.max(cell + 1, 4);
  const hasCells = figure.data.some(({ z }) => z); // only a map of keys has a column for each
  for (const trace of figure.data) {
    if (trace.z && cell < 8) Object.assign(trace, { xgap: 0, ygap: 0 });
    if (hasCells && trace.meta in marks) trace.marker.size = Math.min(trace.marker.size, largestMark);
  }
}

/** Low enough for a phone, high enough for the legend and the labels. */
const heightOf = ({ layout }, width) => Math.min(layout.height, Math.max(LEAST_HEIGHT, Math.round(width * MOST_ASPECT)));

function useTextColour({ data, layout }, color) {
  layout.font = { ...layout.font, color };
  for (const shape of layout.shapes ?? []) if (shape.name !== "own colour") shape.line.color = color;
  for (const trace of data) if (trace.meta === "chosen") trace.marker.color = color;
}

/** Draws the figures on the screen, or all of them; outdated figures stay hidden until they are redrawn. */
function drawFigures() {
  if (page.scripts.plotly && !window.Plotly) return;
  for (const id of Object.keys(page.figures)) {
    if (element(id).closest("[hidden], .not-held")) continue;
    if (everywhere || onScreen.has(id)) draw(id);
    else if (id !== underWay?.id) element(id).classList.toggle("stale", id in drawnWith && drawnWith[id] !== shownIn(id));
  }
  drawAhead();
}

/** Draws the waiting figures one at a time, in steps of about a frame, while nothing moves. */
async function drawAhead() {
  if (drawsAhead) return;
  drawsAhead = true;
  for (let id = nextWaiting(); id; id = nextWaiting()) {
    if (!(await isQuiet())) continue; // after a move, another figure may be nearer
    await (id in page.figures ? drawInSteps(id) : begin(id));
  }
  drawsAhead = false;
  document.documentElement.dataset.whole = "yes";
}

/** The figure of this tab nearest to the middle of the screen that does not show the current choices, if there is one. */
function nextWaiting() {
  const isOutdated = (id) => isWide(id) && drawnWith[id] !== shownIn(id);
  const waits = (id) => (id in page.figures ? isOutdated(id) : !begun.has(id));
  const distance = ({ top, bottom }) => Math.max(top - innerHeight / 2, innerHeight / 2 - bottom, 0);
  const waiting = allOf(".figure").filter((figure) => !figure.closest("[hidden], .not-held") && waits(figure.id));
  const far = new Map(waiting.map((figure) => [figure, distance(figure.getBoundingClientRect())]));
  return waiting.sort((one, other) => Number(far.get(one)) - Number(far.get(other)))[0]?.id;
}

/** Waits until the browser is idle; resolves to whether the page has not moved for a while. */
async function isQuiet() {
  const rest = lastMoved + QUIET - performance.now();
  await new Promise((proceed) => (rest > 0 ? setTimeout(proceed, rest) : whenIdle(proceed)));
  return performance.now() - lastMoved >= QUIET;
}

async function quiet() {
  while (!(await isQuiet()));
}

const whenIdle = window.requestIdleCallback ?? setTimeout; // Safari lacks it

function moved() {
  lastMoved = performance.now();
}

// ---- views of attention, and other views -------------------------------------------------------------------------

/** The choices for the views of attention, which show all rows until the reader selects one. */
function choiceForViews(changes) {
  const { layer, head, query } = state;
  if (changes && !("query" in changes)) return { layer, head };
  return { layer, head, query: queryChosen ? query : null };
}

/** The layers that a view shows. */
const layersOf = (id) => page.others[id]?.data.layers ?? choices.layer;

/** Makes the choice in a view, unless the view lacks the chosen layer. */
function chooseIn(id, changes) {
  const layer = layersOf(id).indexOf(chosenValue("layer"));
  return layer < 0 ? undefined : element(id).control?.choose?.({ ...choiceForViews(changes), layer });
}

/** Follows the choices that the reader makes in a view. */
function follow(id) {
  element(id).addEventListener("attnmech-choose", ({ detail }) => {
    const { layer } = detail;
    choose(layer === undefined ? detail : { ...detail, layer: choices.layer.indexOf(layersOf(id)[layer]) });
  });
}

/** Draws a view, once. */
function begin(id) {
  if (!begun.has(id)) begun.set(id, id in page.views ? drawPattern(id) : drawOther(id));
  return begun.get(id);
}

function stageOf(id) {
  element(id).classList.add("attnmech");
  element(id).style.minHeight = "";
  return element(id);
}

async function drawOther(id) {
  const { kind, data, scripts } = page.others[id];
  const stage = stageOf(id);
  for (const name of scripts) await attnmech.script(page.scripts[name]);
  stage.control = await attnmech.views[kind](stage, data);
  follow(id);
  return chooseIn(id);
}

async function drawPattern(id) {
  const stage = stageOf(id);
  const { layer, head } = state;
  const axes = { layers: choices.layer, heads, words, nouns: page.nouns, queries: tokens, keys, first: choices.query[0], special: page.special };
  const options = { chosen: { layer, head }, embedded: true, overview: true, threshold: 0.1, across: keys !== tokens };
  const viewData = { ...axes, ...options, remarks: page.remarks[id], pattern: shown, rest };
  stage.control = await attnmech.views[page.views[id]](stage, viewData);
  chooseIn(id);
  follow(id);
}

// ---- tokens -----------------------------------------------------------------------------------------------------

/** Writes a token on its chip; a patch's chip is small, without text, since a picture has hundreds. */
function label(chip, token) {
  if (/^<(img|video) \d.*>$/.test(token)) {
    chip.classList.add("patch");
    chip.ariaLabel = token;
  } else chip.textContent = token;
}

const chips = tokens.map((token, position) => {
  const chip = document.createElement("button");
  chip.type = "button";
  chip.className = "token";
  label(chip, token);
  chip.classList.toggle("written", position >= tokens.length - page.written);
  chip.addEventListener("click", () => choose({ query: position }));
  chip.addEventListener("pointerenter", () => shadeTokens(position));
  return chip;
});

/** The keys: the same tokens or, in cross-attention, those of the other text, which cannot be queries. */
const keyChips = !page.keys ? chips : keys.map((token) => {
  const chip = document.createElement("span");
  chip.className = "token";
  label(chip, token);
  return chip;
});

/** The mark of a key; in cross-attention, no key is the query itself. */
function markOf(key, query) {
  if (key === query && keys === tokens) return "self";
  if (key === 0) return "first";
  return keys !== tokens && key === keys.length - 1 ? "last" : undefined;
}

function shadeTokens(query) {
  const weights = weightsOf(query);
  keyChips.forEach((chip, key) => {
    const mark = markOf(key, query);
    if (mark) Object.assign(chip.dataset, { mark, sign: marks[mark] });
    else for (const name of ["mark", "sign"]) delete chip.dataset[name];
    chip.style.setProperty("--depth", String(Math.sqrt(weights[key]))); // the root keeps small weights visible
    chip.title = `${chip.ariaLabel ?? `${page.nouns.key} ${key}`}: ${words.whole} ${percent(weights[key])}`;
  });
  chips.forEach((chip, position) => {
    chip.setAttribute("aria-pressed", String(position === state.query));
    chip.tabIndex = position === state.query ? 0 : -1;
  });
  for (const id of ofQuery) if (id in page.texts) element(id).textContent = textOf(id, { ...state, query });
}

const tokenSteps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

function moveAlongTokens(event) {
  if (!(event.key in tokenSteps)) return;
  event.preventDefault();
  choose({ query: state.query + tokenSteps[event.key] });
  chips[state.query].focus();
}

// ---- choosing ---------------------------------------------------------------------------------------------------

/** Sets indices into `choices`, clamped to their range, shows the result and lets Back undo it. */
function choose(changes) {
  for (const [name, index] of Object.entries(changes)) {
    if (!(name in choices)) continue; // such as the query of a view on a page about a corpus
    state[name] = Math.min(Math.max(index, 0), choices[name].length - 1);
    queryChosen ||= name === "query";
  }
  moved();
  show(changes);
  const step = { what: Object.keys(changes).join(), at: performance.now() };
  const same = step.what === lastStep.what && step.at - lastStep.at < ONE_STEP;
  lastStep = step;
  if (address().href !== location.href) remember(same ? "replaceState" : "pushState");
}

function remember(how) {
  history[how]({ queryChosen }, "", address());
}

/** The headline of the chosen head, with the meanings of terms; it keeps its height, so that nothing below it moves. */
function showHeadline() {
  const [headline, sentence] = [element("headline"), textOf("headline")];
  if (headline.textContent === sentence) return;
  headline.style.minHeight = innerWidth === drawnFor ? `${headline.offsetHeight}px` : "";
  headline.replaceChildren(...sentence.split(anyTerm).map((part) => terms.get(part)?.cloneNode(true) ?? part));
}

function show(changes) {
  if ("headline" in page.texts) showHeadline();
  drawnFor = innerWidth;
  Object.assign(words, page.words[isWeighted() ? 1 : 0]);
  for (const select of selectors) select.selectedIndex = state[select.id];
  showTab();
  for (const name of allOf("#head-name, .head-name")) name.textContent = chosenHead();
  headMap?.choose(choiceForHeads());
  if (tokens.length) shadeTokens(state.query);
  drawFigures();
  for (const id of Object.keys(page.texts)) if (!textsApart.has(id)) element(id).textContent = textOf(id);
  for (const id of viewIds) chooseIn(id, changes);
  for (const code of allOf("[data-call]")) {
    code.textContent = withChoices(withChoices(String(code.dataset.call))); // the value of a choice may be a call with other choices
  }
}

/** Shows the sections of the chosen tab and the choices that they follow; on paper, all of them. */
function showTab() {
  const tab = chosenValue("tab");
  const isWhole = tab === "all";
  for (const part of allOf("[data-tabs]")) part.hidden = !isWhole && !part.dataset.tabs?.split(" ").includes(tab);
  for (const part of allOf("section[data-tabs]")) part.classList.toggle("not-held", !figuresIn(part).every(isDrawable));
  for (const button of tabs) {
    const isChosen = button.dataset.chooseTab === tab;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
  }
}

const figuresIn = (section) => [...section.querySelectorAll(".figure")].map(({ id }) => id);

/** The choices that the map of heads follows, with numbers by their names. */
function choiceForHeads() {
  const { layer, head } = state;
  return { layer, head, ...Object.fromEntries(["colour", "across", "up"].map((name) => [name, chosenValue(name)])) };
}

const chooseTab = (tab) => choose({ tab: choices.tab.indexOf(tab) });

function moveAlongTabs({ key, target }) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  const next = step && tabs[tabs.indexOf(target) + step];
  if (!next) return;
  chooseTab(next.dataset.chooseTab);
  next.focus();
}

/** Puts a text on the clipboard, and says so on the button. */
async function copy(button, text) {
  const before = button.textContent;
  const copied = navigator.clipboard ? await navigator.clipboard.writeText(text).then(() => true, () => false) : false;
  button.textContent = copied ? "Copied" : "Select the text and copy it";
  setTimeout(() => (button.textContent = before), 1500);
}

function withChoices(call) {
  return call.replace(/\{(\w+)\}/g, (all, name) => (names.includes(name) ? inCall(name) : all));
}

function address() {
  const parameters = names.filter((name) => !optional.has(name) || state[name]).map((name) => [name, chosenValue(name)]);
  parameters.unshift(...Object.entries(page.part ?? {}));
  parameters.push(...[...new URLSearchParams(location.hash.slice(1))].filter(([name]) => ofViews.has(name)));
  return new URL(`#${new URLSearchParams(parameters)}`, location.href); // inside a frame, "#…" alone is refused
}

/** Takes the choices from the address, also after Back; choices that it lacks stay. */
function chooseFromAddress() {
  const named = {};
  const unknown = [];
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const index = Object.hasOwn(choices, name) ? choices[name].map(String).indexOf(value) : -1;
    if (index >= 0) named[name] = index;
    else if (!ofViews.has(name) && String(page.part?.[name]) !== value) unknown.push(`${name} ${value}`);
  }
  element("unknown").textContent = unknown.length ? `This page has no ${unknown.join(", no ")}; it shows the next best.` : "";
  for (const name of optional) state[name] = 0;
  Object.assign(state, named);
  queryChosen = history.state?.queryChosen ?? "query" in named;
  show(tokens.length ? { query: state.query } : {});
  lastStep = { what: "", at: -Infinity };
  remember("replaceState");
}

// ---- screen and paper -------------------------------------------------------------------------------------------

/** Only the width matters to the figures; scrolling on a phone changes the window's height all the time. */
function fitWindow() {
  if (innerWidth !== drawnFor) show();
}

/**
 * Figures have a width in pixels, so all are redrawn for the paper's width. Views that were never scrolled into view
 * begin here: they await only resolved promises, which settle before the page is laid out.
 */
function setPrinting(now) {
  if (now === printing) return;
  printing = now;
  document.documentElement.classList.toggle("printing", printing);
  everywhere = true;
  show();
  everywhere = printing;
  for (const id of viewIds) begin(id).then(() => element(id).control?.print?.(printing));
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) onScreen.add(target.id);
    else onScreen.delete(target.id);
  }
  if (lastStep.what === "tab") drawFigures();
});

/** Scrolls to the section of a link in the contents; the address keeps the choices. */
function goToSection(event) {
  const name = event.target.closest("a")?.dataset.section;
  if (!name) return;
  event.preventDefault();
  chooseTab(element(`${name}-section`).dataset.tabs);
  element(`${name}-section`).scrollIntoView();
}

// ---- start ------------------------------------------------------------------------------------------------------

for (const [name, value] of Object.entries(page.start)) state[name] = choices[name].indexOf(value);
await attnmech.script(page.scripts.heads);
const headMap = await attnmech.views.heads(element("head-map"), { layers: choices.layer, heads, ...page.heads });
element("head-map").addEventListener("attnmech-choose", ({ detail }) => choose(detail));
for (const select of selectors) {
  select.addEventListener("change", () => choose({ [select.id]: select.selectedIndex }));
}
for (const button of allOf("[data-control]")) {
  const { control = "", step } = button.dataset;
  button.addEventListener("click", () => choose({ [control]: state[control] + Number(step) }));
}
element("tokens")?.append(...chips);
if (page.keys) element("key-tokens").append(...keyChips);
element("tokens")?.addEventListener("keydown", moveAlongTokens);
element("tokens")?.addEventListener("pointerleave", () => shadeTokens(state.query));
new MutationObserver(() => show()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
addEventListener("hashchange", chooseFromAddress);
addEventListener("resize", fitWindow);
for (const motion of ["scroll", "wheel"]) addEventListener(motion, moved, { passive: true, capture: true }); // also in boxes
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));
element("contents").addEventListener("click", goToSection);
for (const tab of tabs) tab.addEventListener("click", () => chooseTab(tab.dataset.chooseTab));
element("tabs").addEventListener("keydown", moveAlongTabs);
element("copy-link").addEventListener("click", ({ target }) => copy(target, location.href));
for (const code of allOf("[data-call]")) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "copy", textContent: "Copy Python" });
  button.addEventListener("click", () => copy(button, code.textContent ?? ""));
  code.after(button);
}
for (const figure of allOf(".figure")) {
  const chart = page.figures[figure.id]?.figure;
  figure.style.minHeight = `${chart ? heightOf(chart, figure.clientWidth) : 300}px`;
  watcher.observe(figure);
}
chooseFromAddress();
await new Promise((proceed) => setTimeout(proceed)); // text and controls appear before plotly loads
if (page.scripts.plotly) await attnmech.script(page.scripts.plotly);
for (const id of Object.keys(page.others)) await begin(id); // CircuitsVis draws asynchronously, too late for printing
for (const id of onScreen) await (id in page.figures ? draw(id) : begin(id));
document.documentElement.dataset.ready = "yes";
drawAhead();
