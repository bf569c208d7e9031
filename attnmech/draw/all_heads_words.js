// What the view of all heads says of tokens and heads.

const SIGNS = { self: "●", first: "◆", other: "■" }; // attnmech/draw/style.py

const labelOf = (tokens, position) => `${position} ${isolated(tokens[position])}`;

/** The label, cut to the width; whole characters go, not halves of an emoji. */
function fitted(context, tokens, position, width) {
  const whole = labelOf(tokens, position);
  if (context.measureText(whole).width <= width) return whole;
  const characters = [...new Intl.Segmenter().segment(tokens[position].slice(0, 80))].map(({ segment }) => segment);
  for (let count = characters.length - 1; count > 0; count -= 1) {
    const cut = `${position} ${isolated(`${characters.slice(0, count).join("")}…`)}`;
    if (context.measureText(cut).width <= width) return cut;
  }
  return String(position);
}

/**
 * Python's numbers for each head: `sentence` states them, `top` is each row's highest key or NaN.
 *
 * @param {LayersData & Facts} data
 */
async function factsOf({ layers, heads, means, rows, top, words }) {
  const tops = await unpack(top);
  const aligned = "self" in means;
  const markOf = (query, key) => (aligned && key === query ? "self" : key === 0 ? "first" : "other");

  function sentence({ layer, head }) {
    const where = `L${layers[layer]}H${head}`;
    if (rows === 0) return `Every row of ${where} sees only one key.`;
    const block = layer * heads + head;
    const highest = tops.of(block);
    const mean = (name) => percent(means[name][block]);
    const count = (wanted) => highest.reduce((sum, key, query) => sum + (key === wanted(query) ? 1 : 0), 0);
    const first = `In ${where}, the highest weight is on the first ${aligned ? "" : "key "}token in ${count(() => 0)} of ${rows} rows with several keys`;
    if (!aligned) return `${first}; on average it receives ${mean("first")} of the ${words.whole}.`;
    return (
      `${first}, on the token itself in ${count((query) => query)} and on the previous one in ${count((query) => query - 1)}; ` +
      `on average these receive ${mean("first")}, ${mean("self")} and ${mean("previous")} of the ${words.whole}.`
    );
  }
  return { sentence, markOf, top: ({ layer, head }) => tops.of(layer * heads + head), aligned };
}
