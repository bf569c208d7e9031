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
if (element("live-data")) for (const name of ["edit", "prompt", "at"]) ofViews.add(name);
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
