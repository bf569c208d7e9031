// A plotly figure as wide as its place and in its colours.

views.plotly = (stage, figure) => {
  suitBackground(stage);
  const { title = "" } = figure;
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "") || "figure";
  const place = Object.assign(make("div", { className: "attnmech-figure" }), { picture: () => ({ name, title }) });
  stage.append(place);

  function draw() {
    const { data, layout } = structuredClone(figure);
    const width = place.clientWidth;
    const height = Math.min(layout.height ?? 450, Math.max(260, Math.round(width * MOST_ASPECT)));
    Object.assign(layout, { width, height, font: { ...layout.font, color: getComputedStyle(stage).color } });
    return drawPlotly(place, { data, layout });
  }
  onChange(stage, draw);
  return draw();
};
