// The figures of a page: filled for the current choices, drawn when they are on the screen, or ahead.

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
