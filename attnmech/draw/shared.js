// Shared by all views: elements, colours of the surroundings, a box at the pointer, controls.
// Text enters a page only through textContent.

const { views } = window.attnmech;

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

/** Tells the page what the reader chose in a view: indices of layer, head or query. */
function announce(stage, detail) {
  stage.dispatchEvent(new CustomEvent("attnmech-choose", { detail, bubbles: true }));
}

if (!document.getElementById("attnmech-style")) {
  document.head.append(make("style", { id: "attnmech-style", text: STYLE }));
}
