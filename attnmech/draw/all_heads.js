// All heads as small maps, and the selected one large. A colour's opacity is the square root of the weight.

/** The legend of the scale: one square per weight; `name` says what the weights are. */
function scaleLegend(name) {
  const squares = [0, 0.01, 0.1, 0.25, 0.5, 1].map((share) => {
    const square = make("i", { style: `--opacity: ${100 * Math.sqrt(share)}%` });
    return make("span", {}, square, `${100 * share}\u00a0%`);
  });
  return make("div", { className: "attnmech-model-scale" }, name, ...squares);
}

function markLegend(aligned) {
  const words = { self: "itself", first: "the first token", other: "another token" };
  const shown = Object.entries(words).filter(([mark]) => aligned || mark !== "self");
  const items = shown.map(([mark, text]) =>
    make("span", {}, make("b", { style: `color: var(--${mark})`, text: SIGNS[mark] }), ` ${text}`),
  );
  return make("span", { className: "attnmech-model-marks" }, ...items);
}

views.model = async (stage, data) => {
  suitBackground(stage);
  const { layers, heads, queries, overview, embedded, remarks } = data;
  const patterns = await patternsIn(data.pattern, heads);
  const facts = overview ? null : await factsOf(/** @type {LayersData & Facts} */ (data));
  const state = { query: queries.length - 1, ...data.chosen };
  const parts = []; // functions called after each choice

  function choose(changes) {
    Object.assign(state, changes);
    scaleName.textContent = data.words.weight;
    for (const part of parts) part(state);
  }

  /** Shows the user's choice, and announces it to the page if it changed. */
  function pick(changes) {
    const news = Object.fromEntries(Object.entries(changes).filter(([name, index]) => state[name] !== index));
    if (!Object.keys(news).length) return;
    choose(news);
    announce(stage, news);
  }

  const scaleName = make("span");
  const root = make("div", { className: `attnmech-model ${overview ? "attnmech-model-alone" : ""}` });
  const nameOf = ({ layer, head }) => `L${layers[layer]}H${head}${remarks ? `: ${remarks[layer * heads + head]}` : ""}`;
  const describe = facts ? facts.sentence : nameOf;
  const small = smallMaps(stage, data, patterns, { pick, describe, follow: !overview });
  parts.push(small.choose);
  const redraws = [small.redraw];
  if (facts) redraws.push(addLarge(facts));
  else root.append(small.element, scaleLegend(scaleName));
  stage.append(root);
  for (const redraw of redraws) redraw();
  choose({});
  onChange(stage, () => {
    for (const redraw of redraws) redraw();
  });
  return { choose, print: small.print };

  function addLarge(facts) {
    const large = largeMap(stage, data, patterns, facts, { pick: (query) => pick({ query }) });
    const finding = make("p", { className: "attnmech-finding", "aria-live": "polite" });
    const marks = checkbox("mark each row's maximum:", false, (ticked) => large.markAll(ticked));
    const enlarge = make("button", { type: "button", onclick: () => zoom(!zoomed()) });
    const zoomed = () => root.classList.contains("attnmech-model-zoomed");

    function zoom(on) {
      root.classList.toggle("attnmech-model-zoomed", on);
      enlarge.textContent = on ? "Show all heads" : "Enlarge this head";
      redrawLarge();
      if (!on) small.redraw();
    }

    function redrawLarge() {
      large.redraw();
      marks.box.checked = large.allMarked();
    }

    root.addEventListener("keydown", ({ key }) => {
      if (key !== "Escape" || !zoomed()) return;
      zoom(false);
      small.focus();
    });
    const controls = make("div", { className: "attnmech-controls" }, enlarge);
    if (!embedded) {
      const selectors = headSelectors(data, pick);
      controls.prepend(selectors.layer, selectors.head);
      parts.push(selectors.show);
    }
    root.append(
      controls,
      finding,
      make("div", { className: "attnmech-controls" }, scaleLegend(scaleName), marks.element, markLegend(facts.aligned)),
      make("div", { className: "attnmech-model-panes" }, small.element, large.element),
    );
    enlarge.textContent = "Enlarge this head";
    parts.push(large.choose, (chosen) => (finding.textContent = facts.sentence(chosen)));
    return redrawLarge;
  }
};
