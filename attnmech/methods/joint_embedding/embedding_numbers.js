// The numbers of one head of joint embeddings, with their meanings, and the curve by which the head's scale was chosen.

/**
 * The numbers of a head with their meanings, and the curve by which c was chosen.
 *
 * @param {EmbeddingData} data
 */
function embeddingNumbers({ about, meanings, kinds }, block) {
  const { numbers, scale, curve, kind } = about[block];
  const shown = (value) => (value === null ? "—" : with3Digits(value));
  const row = (label, value, meaning) =>
    make("tr", {}, make("th", { scope: "row", text: label }), make("td", { text: value }), make("td", { text: meaning }));
  const rows = Object.entries(numbers).map(([label, value]) => row(label, shown(value), meanings[label] ?? ""));
  if (kind >= 0) rows.unshift(row("head type", kinds[kind], "claimed by its interval"));
  rows.push(row("c", shown(scale), "queries are multiplied by c and keys divided by c, which preserves attention"));
  const table = make("table", {}, make("tbody", {}, ...rows));
  return [make("div", { className: "attnmech-embedding-numbers" }, table), ...curveOf(curve, scale)];
}

function with3Digits(value) {
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 10000) ? size.toExponential(1) : size.toPrecision(3);
  return `${value < 0 ? "−" : ""}${text}`;
}

/** The criterion over c, on a logarithmic axis. */
function curveOf([grid, criterion], scale) {
  const there = range(grid.length).filter((index) => grid[index] > 0 && criterion[index] !== null);
  if (there.length < 2) return [];
  const [WIDE, HIGH, LEFT, BELOW] = [320, 130, 44, 30];
  const logs = there.map((index) => Math.log(grid[index]));
  const values = there.map((index) => criterion[index]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (log) => LEFT + ((WIDE - LEFT - 8) * (log - logs[0])) / (logs[logs.length - 1] - logs[0] || 1);
  const y = (value) => 8 + ((HIGH - BELOW - 12) * (high - value)) / (high - low || 1);
  const path = logs.map((log, index) => `${index ? "L" : "M"}${x(log).toFixed(1)} ${y(values[index]).toFixed(1)}`).join("");
  const text = (at, words, anchor = "middle") =>
    makeSvg("text", { x: at[0], y: at[1], "text-anchor": anchor, "font-size": 11, fill: "currentColor" }, words);
  const marks = [
    makeSvg("path", { d: `M${LEFT} 4V${HIGH - BELOW}H${WIDE - 4}`, fill: "none", stroke: "currentColor", opacity: 0.4 }),
    makeSvg("path", { d: path, fill: "none", stroke: "var(--weight)", "stroke-width": 2 }),
    text([LEFT - 4, y(high) + 4], with3Digits(high), "end"),
    text([LEFT - 4, y(low) + 4], with3Digits(low), "end"),
    text([LEFT, HIGH - BELOW + 13], with3Digits(grid[there[0]])),
    text([WIDE - 18, HIGH - BELOW + 13], with3Digits(grid[there[there.length - 1]])),
    text([(LEFT + WIDE) / 2, HIGH - 4], "c (logarithmic)"),
  ];
  if (scale > 0) {
    const nearest = there.reduce((best, index) => (Math.abs(Math.log(grid[index] / scale)) < Math.abs(Math.log(grid[best] / scale)) ? index : best));
    marks.push(makeSvg("circle", { cx: x(Math.log(scale)), cy: y(criterion[nearest]), r: 5, fill: "none", stroke: "var(--other)", "stroke-width": 2.5 }));
  }
  const picture = makeSvg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "the correlation for each c" }, ...marks);
  return [make("p", { className: "attnmech-reading", text: "Correlation of distance and query-key product for each c; the ring is the c in use." }), picture];
}
