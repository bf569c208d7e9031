"use strict";

// Draws the figures that the page carries, as wide as the page, in its colours.

const figures = JSON.parse(document.getElementById("data").textContent);
const themes = ["system", "light", "dark"];

function draw() {
  const { color } = getComputedStyle(document.body);
  for (const [id, figure] of Object.entries(figures)) {
    const { data, layout } = structuredClone(figure);
    Object.assign(layout, { width: document.getElementById(id).clientWidth, font: { ...layout.font, color } });
    Plotly.react(id, data, layout, { displaylogo: false });
  }
}

document.getElementById("theme").addEventListener("click", ({ target }) => {
  const root = document.documentElement;
  const theme = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  root.dataset.theme = theme;
  target.textContent = `Theme: ${theme}`;
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
draw();
