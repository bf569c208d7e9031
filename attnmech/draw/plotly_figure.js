"use strict";

// A plotly figure as wide as its place and in its colours.

views.plotly = (stage, figure) => {
  suitBackground(stage);
  const place = make("div", { className: "attnmech-figure" });
  const { title = "" } = figure;
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "") || "figure";
  place.picture = () => ({ name, title });
  stage.append(place);

  function draw() {
    const { data, layout } = structuredClone(figure);
    const width = place.clientWidth;
    const height = Math.min(layout.height ?? 450, Math.max(260, Math.round(width * MOST_ASPECT)));
    Object.assign(layout, { width, height, font: { ...layout.font, color: getComputedStyle(stage).color } });
    const byFinger = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom
    if (byFinger) layout.dragmode = false;
    return Plotly.react(place, data, layout, plotlyOptions(byFinger));
  }
  onChange(stage, draw);
  return draw();
};
