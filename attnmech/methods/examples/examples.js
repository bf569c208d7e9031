// The example rows of one head as running text: the strongest, those of each fifth of its rows, and rows at random.

const SHEETS = ["Strongest", "Top fifth", "60–80 %", "40–60 %", "20–40 %", "Lowest fifth", "At random"];
const LEAST = 0.01; // the least attention of a key that is listed because the tokens shown do not hold it

views.examples = (stage, { layers, heads, chosen, meaning, sample, packed, files, embedded }) => {
  suitBackground(stage);
  const state = { ...chosen, sheet: 0 };
  const opened = new Map(); // the rows of a layer, by its place
  const finding = make("p", { className: "attnmech-finding", "aria-live": "polite" });
  const list = make("ol", { className: "attnmech-examples" });
  const tabs = SHEETS.map((name, sheet) => make("button", { type: "button", role: "tab", text: name, onclick: () => choose({ sheet }) }));
  const bar = make("div", { className: "attnmech-examples-sheets", role: "tablist", "aria-label": "which rows" }, ...tabs);
  bar.addEventListener("keydown", ({ key }) => {
    const next = state.sheet + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? NaN);
    if (!tabs[next]) return;
    choose({ sheet: next });
    tabs[next].focus();
  });

  /** The packed rows of a layer: in the page, or in a file beside it. */
  function packedRows(layer) {
    if (!files.length) return packed[layer];
    return new Promise((proceed, fail) => {
      const loaded = () => proceed(/** @type {any} */ (window).attnmechPieces[files[layer]]);
      const missing = () => fail(new Error(`${files[layer]} is missing; keep it beside the page.`));
      document.head.append(make("script", { src: files[layer], onload: loaded, onerror: missing }));
    });
  }

  async function rowsOf(layer) {
    const [tokens, ...ofHeads] = await unpackTexts(await packedRows(layer));
    return { tokens: JSON.parse(tokens), heads: ofHeads.map((head) => JSON.parse(head)) };
  }

  const number = (value) => (value === null ? "undefined" : value.toPrecision(3).replace("-", "−"));

  /** What the rows of a sheet are. */
  function sentence({ rows, share, quantiles, sheets }) {
    const name = `L${layers[state.layer]}H${state.head}`;
    const shown = sheets[state.sheet].length;
    if (!shown) return `${name} has no such row.`;
    if (state.sheet === 0) {
      const from = rows > sample ? `, estimated from ${sample.toLocaleString("en")} of them` : "";
      const like = `Rows at least as strong make up ${share} of its ${rows.toLocaleString("en")} rows${from}.`;
      return `${name}: ${shown} of its strongest rows, one of a text. ${like}`;
    }
    if (state.sheet === SHEETS.length - 1) return `${name}: ${shown} of ${rows.toLocaleString("en")} rows at random.`;
    const band = 5 - state.sheet; // counted from the lowest values
    const ends = [band && `at least ${number(quantiles[band - 1])}`, band < 4 && `below ${number(quantiles[band])}`];
    return `${name}: ${shown} rows of the fifth of its rows${rows > sample ? ` (estimated from ${sample.toLocaleString("en")})` : ""} with values ${ends.filter(Boolean).join(" and ")}.`;
  }

  function lineOf({ value, text, position, query, tokens, keys }, table) {
    const first = position - query; // the position of the first token shown
    const weights = new Map(keys.map(([key, , weight]) => [key, weight]));
    const strongest = keys[0]?.[0];
    const inside = (key) => key >= first && key < first + tokens.length;
    const token = (words, weight, marks) => {
      const bare = words.startsWith(" ") ? words.slice(1) : words; // the space stays outside the mark
      const made = make("span", { className: `attnmech-examples-token ${marks}`, title: weight === undefined ? null : `attention ${percent(weight)}` }, make("bdi", { text: bare }));
      made.style.setProperty("--depth", String(Math.sqrt(weight ?? 0))); // the root keeps small weights visible
      return bare === words ? [made] : [" ", made];
    };
    const marksOf = (key) => (key === strongest ? "attnmech-examples-top" : "");
    const running = tokens.flatMap((at, place) => {
      const mark = place === query ? "attnmech-examples-query" : "";
      return token(table[at], weights.get(first + place), `${mark} ${marksOf(first + place)}`);
    });
    const outside = keys.filter(([key, , weight]) => !inside(key) && weight >= LEAST).flatMap(([key, at, weight]) => [
      ...token(table[at] || `key ${key}`, weight, marksOf(key)), make("small", { text: ` ${percent(weight)}, ${Math.abs(position - key)} ${key < position ? "back" : "ahead"}; ` }),
    ]);
    const words = make("p", { className: "attnmech-examples-text" }, ...(outside.length ? ["outside: ", ...outside, "… "] : []), ...running);
    const place = make("span", { className: "attnmech-examples-place", text: `text ${text}, token ${position}` });
    return make("li", {}, make("b", { text: number(value), title: meaning }), words, place);
  }

  async function draw() {
    tabs.forEach((tab, sheet) => {
      tab.setAttribute("aria-selected", String(sheet === state.sheet));
      tab.tabIndex = sheet === state.sheet ? 0 : -1;
    });
    const { layer } = state;
    if (!opened.has(layer)) opened.set(layer, rowsOf(layer));
    try {
      const { tokens, heads: ofHeads } = await opened.get(layer);
      if (layer !== state.layer) return; // another layer was chosen meanwhile
      const head = ofHeads[state.head];
      finding.textContent = sentence(head);
      list.replaceChildren(...head.sheets[state.sheet].map((row) => lineOf(row, tokens)));
    } catch (error) {
      opened.delete(layer);
      finding.textContent = error instanceof Error ? error.message : String(error);
      list.replaceChildren();
    }
  }

  function choose(changes) {
    Object.assign(state, changes);
    selectors?.show(state);
    return draw();
  }

  const selectors = embedded ? null : headSelectors({ layers, heads, chosen }, choose);
  if (selectors) stage.append(make("div", { className: "attnmech-controls" }, selectors.layer, selectors.head));
  stage.append(bar, finding, make("p", { className: "attnmech-reading", text: `Value: ${meaning}.` }), list);
  const first = embedded ? Promise.resolve() : draw(); // a page around the view chooses the first head
  return first.then(() => ({ choose: ({ layer, head }) => choose({ layer, head }) }));
};
