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

views.head_picker = async (stage, { title, choices, chosen, changes, data, layout }) => {
  const differing = await unpackTexts(changes);
  const state = { ...chosen };
  const selectors = Object.entries(choices).map(([name, numbers]) => {
    const { element, select } = selector(name[0].toUpperCase() + name.slice(1), numbers, chosen[name], () => {
      state[name] = select.selectedIndex;
      control.draw();
    });
    return element;
  });
  stage.append(make("div", { className: "attnmech-controls" }, ...selectors));

  /** The figure that was shown first, with the changes for the current choice. */
  function figureNow() {
    const figure = structuredClone({ data, layout });
    const index = Object.entries(choices).reduce((before, [name, numbers]) => before * numbers.length + state[name], 0);
    for (const [path, value] of JSON.parse(differing[index])) {
      const [last, ...way] = [...path].reverse();
      way.reduceRight((place, step) => place[step], figure)[last] = value;
    }
    return figure;
  }
  const place = () => Object.entries(choices).map(([name, numbers]) => `${name} ${numbers[state[name]]}`);
  const control = plotlyIn(stage, figureNow, () => [title, ...place()].join(", "));
  await control.draw();
  return control;
};
