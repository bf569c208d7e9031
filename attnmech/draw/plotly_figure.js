// A plotly figure with the width and colours of its surroundings, optionally with selectors for the head.

/** Draws what `figureNow` gives whenever the colours or the width change, also on paper; returns its control. */
function plotlyIn(stage, figureNow, titleNow) {
  suitBackground(stage);
  function picture() {
    const title = titleNow();
    return { name: title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "") || "figure", title };
  }
  const place = Object.assign(make("div", { className: "attnmech-figure" }), { picture });
  stage.append(place);

  function draw() {
    const { data, layout } = figureNow();
    const width = place.clientWidth;
    const height = Math.min(layout.height ?? 450, Math.max(260, Math.round(width * MOST_ASPECT)));
    Object.assign(layout, { width, height, font: { ...layout.font, color: getComputedStyle(stage).color } });
    return drawPlotly(place, { data, layout });
  }
  onChange(stage, draw);
  return { draw, print: draw };
}

views.plotly = async (stage, { title = "", ...figure }) => {
  const control = plotlyIn(stage, () => structuredClone(figure), () => title);
  await control.draw();
  return control;
};

views.head_picker = async (stage, { title, layers, heads, chosen, changes, data, layout }) => {
  const differing = await unpackTexts(changes);
  const state = { ...chosen };
  const selectors = headSelectors({ layers, heads, chosen }, (choice) => {
    Object.assign(state, choice);
    control.draw();
  });
  stage.append(make("div", { className: "attnmech-controls" }, selectors.layer, selectors.head));

  /** The figure of the head that was shown first, with the changes for the selected one. */
  function figureNow() {
    const figure = structuredClone({ data, layout });
    for (const [path, value] of JSON.parse(differing[state.layer * heads + state.head])) {
      const [last, ...way] = [...path].reverse();
      way.reduceRight((place, step) => place[step], figure)[last] = value;
    }
    return figure;
  }
  const control = plotlyIn(stage, figureNow, () => `${title}, layer ${layers[state.layer]}, head ${state.head}`);
  await control.draw();
  return control;
};
