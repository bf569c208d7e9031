// The heads of a page: a map of layers × heads or a scatter of two numbers, coloured by type or by a number; one head is
// chosen by a click, the arrow keys or a search.

const NO_TYPE = "no type claimed";
const SVG_SIZE = { width: 320, height: 270, left: 56, bottom: 40, top: 8, right: 12 };
const MOST_FOUND = 8; // heads that a search for a token lists
const OUTERMOST = 4; // labelled heads at each end of a scatter's axes

views.heads = (stage, { layers, heads, types, letters, numbers, sentences, attended }) => {
  const count = layers.length * heads;
  const nameOf = (at) => `L${layers[Math.floor(at / heads)]}H${at % heads}`;
  const state = { layer: 0, head: 0, colour: "", across: "map", up: "" };
  const typesOf = (at) => types[at] ?? [];
  let sought = "";
  let isFound = true; // whether any head is what the reader looks for

  const pick = (at) => announce({ layer: Math.floor(at / heads), head: at % heads });
  const announce = (detail) => stage.dispatchEvent(new CustomEvent("attnmech-choose", { detail }));

  // ---- colours

  const known = (values) => values.filter((value) => value !== null);
  const ends = Object.fromEntries(
    Object.entries(numbers).map(([name, { values }]) => {
      const [low, high] = [Math.min(0, ...known(values)), Math.max(0, ...known(values))];
      const reach = Math.max(-low, high);
      return [name, low < 0 ? [-reach, reach] : [0, reach]];
    }),
  );

  /** The colour of a head: of its first type, or how far its number is along the scale. */
  function colourOf(at) {
    if (!(state.colour in numbers)) return letters[typesOf(at)[0]]?.[1] ?? "var(--heads-none)";
    const value = numbers[state.colour].values[at];
    if (value === null) return "var(--heads-none)";
    const [low, high] = ends[state.colour];
    const share = high ? Math.abs(value) / high : 0;
    return `color-mix(in oklab, var(${low < 0 && value < 0 ? "--heads-below" : "--heads-above"}) ${Math.round(100 * share)}%, var(--heads-zero))`;
  }

  const isPale = (at) => numbers[state.colour]?.clear?.[at] === false;
  const letterOf = (at) => (state.colour in numbers ? "" : (letters[typesOf(at)[0]]?.[0] ?? ""));
  const rounded = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
  const written = (value) => (value === null ? "undefined" : rounded(value).replaceAll("-", "−"));

  /** A head in one sentence, with the numbers that are on the screen. */
  function describe(at) {
    const shown = [...new Set([state.colour, state.across === "map" ? "" : state.across, state.across === "map" ? "" : state.up])];
    const values = shown.filter((name) => name in numbers).map((name) => {
      const { label, values, clear } = numbers[name];
      return `${label}: ${written(values[at])}${clear && !clear[at] ? " (not clear)" : ""}`;
    });
    return `${[(sentences[at] ?? `${nameOf(at)}${types.length ? `: ${typesOf(at).join(", ") || NO_TYPE}` : ""}`).replace(/\.$/, ""), ...values].join("; ")}.`;
  }

  /** The rows in which a head attends to a token that begins with a text. */
  const rowsWith = (at, text) => Math.max(0, ...Object.entries(attended[at] ?? {}).filter(([token]) => token.startsWith(text)).map(([, rows]) => rows));

  /** Whether a head is what the reader looks for: its name, one of its types, or a token that it attends to. */
  function isSought(at) {
    const text = sought.trim().toLowerCase();
    if (!text) return true;
    return nameOf(at).toLowerCase() === text || `${layers[Math.floor(at / heads)]}.${at % heads}` === text || typesOf(at).some((name) => name.includes(text)) || rowsWith(at, text) > 0;
  }

  /** A search without a match dims nothing. */
  const isDimmed = (at) => isPale(at) || (isFound && !isSought(at));

  // ---- the map

  const cells = range(count).map((at) =>
    make("button", { type: "button", className: "heads-cell", role: "gridcell", tabindex: -1, onclick: () => pick(at) }),
  );
  const grid = make("div", { className: "heads-grid", role: "grid", "aria-label": "heads: rows are layers, columns heads" });
  grid.style.setProperty("--heads", String(heads));
  grid.style.setProperty("--layers", String(layers.length));
  grid.append(
    make("div", { className: "heads-row", role: "row" }, make("span", { role: "columnheader", className: "heads-label", text: "layer" }),
      ...range(heads).map((head) => make("span", { role: "columnheader", className: "heads-label", text: head % (heads > 16 ? 4 : 1) ? "" : head, "aria-label": `head ${head}` }))),
    ...layers.map((layer, row) =>
      make("div", { className: "heads-row", role: "row" }, make("span", { role: "rowheader", className: "heads-label", text: layer }), ...cells.slice(row * heads, (row + 1) * heads))),
  );
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads }[event.key];
    const at = state.layer * heads + state.head + (step ?? 0);
    if (!step || at < 0 || at >= count) return;
    event.preventDefault();
    pick(at);
    cells[at].focus();
  });

  // ---- the scatter

  const plot = makeSvg("svg", { viewBox: `0 0 ${SVG_SIZE.width} ${SVG_SIZE.height}`, class: "heads-scatter", role: "img" });

  function drawScatter() {
    const { width, height, left, bottom, top, right } = SVG_SIZE;
    const [x, y] = [numbers[state.across], numbers[state.up]];
    const both = range(count).filter((at) => x.values[at] !== null && y.values[at] !== null);
    const scale = (values, from, to) => {
      const shown = both.length ? both.map((at) => values[at]) : [0];
      const [low, high] = [Math.min(...shown), Math.max(...shown)];
      const spread = high - low || 1;
      return { low, high, of: (value) => from + ((to - from) * (value - low)) / spread };
    };
    const across = scale(x.values, left + 6, width - right);
    const up = scale(y.values, height - bottom - 6, top + 6);
    const place = (at) => [across.of(x.values[at]), up.of(y.values[at])];
    const text = (words, attributes) => makeSvg("text", attributes, words);
    const axis = [
      makeSvg("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "heads-axis" }),
      text(written(across.low), { x: left + 6, y: height - bottom + 14 }),
      text(written(across.high), { x: width - right, y: height - bottom + 14, "text-anchor": "end" }),
      text(x.label, { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }),
      text(written(up.low), { x: left - 4, y: height - bottom - 2, "text-anchor": "end" }),
      text(written(up.high), { x: left - 4, y: top + 10, "text-anchor": "end" }),
      text(y.label, { transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }),
    ];
    const points = both.map((at) => {
      const [cx, cy] = place(at);
      const point = makeSvg("circle", { cx, cy, r: count > 300 ? 3 : 4.5, class: "heads-point" });
      point.style.fill = colourOf(at);
      point.classList.toggle("heads-pale", isDimmed(at));
      point.addEventListener("click", () => pick(at));
      point.addEventListener("pointerenter", () => say(at));
      point.addEventListener("pointerleave", () => say());
      return point;
    });
    const chosen = state.layer * heads + state.head;
    const far = (values) => [...both].sort((one, other) => values[one] - values[other]);
    const outer = new Set([x.values, y.values].flatMap((values) => [...far(values).slice(0, 1), ...far(values).slice(-OUTERMOST)]));
    if (both.includes(chosen)) outer.add(chosen);
    const taken = [];
    const names = [...outer].sort((one, other) => Number(other === chosen) - Number(one === chosen)).flatMap((at) => {
      const [cx, cy] = place(at);
      const isLeft = cx > width - 60;
      const box = [isLeft ? cx - 50 : cx + 6, cy - 6];
      if (taken.some(([a, b]) => Math.abs(a - box[0]) < 46 && Math.abs(b - box[1]) < 13)) return [];
      taken.push(box);
      return [text(nameOf(at), { x: isLeft ? cx - 6 : cx + 6, y: cy + 4, "text-anchor": isLeft ? "end" : "start", class: "heads-name" })];
    });
    const ring = both.includes(chosen) ? [makeSvg("circle", { cx: place(chosen)[0], cy: place(chosen)[1], r: 8, class: "heads-ring" })] : [];
    plot.setAttribute("aria-label", `${count} heads: ${x.label} against ${y.label}`);
    plot.replaceChildren(...axis, ...points, ...ring, ...names);
  }

  // ---- what the reader chooses

  const groups = [...new Set(Object.values(numbers).map(({ group }) => group))];
  function numberList(name, first) {
    const list = make("select", { id: name, "aria-label": name, onchange: () => announce({ [name]: list.selectedIndex }) });
    if (first) list.append(make("option", { value: first[0], text: first[1] }));
    for (const group of groups) {
      const named = Object.entries(numbers).filter(([, number]) => number.group === group);
      list.append(make("optgroup", { label: group }, ...named.map(([value, { label }]) => make("option", { value, text: label }))));
    }
    return list;
  }

  const colour = numberList("colour", Object.keys(letters).length ? ["type", "type of head"] : null);
  const across = numberList("across", ["map", "map of layers and heads"]);
  const up = numberList("up", null);
  const upRow = make("label", {}, "against ", up);
  const searched = [...(types.length ? ["a type"] : []), ...(attended.length ? ["a token", "punctuation"] : [])];
  const search = make("input", { type: "search", placeholder: [nameOf(count - 1), ...searched].join(", "), "aria-label": `find a head by ${["name", ...searched].join(", ")}` });
  search.addEventListener("input", () => {
    sought = search.value;
    draw();
  });
  search.addEventListener("keydown", ({ key }) => {
    const first = range(count).find(isSought);
    if (key === "Enter" && sought.trim() && first !== undefined) pick(first);
  });

  const legend = make("div", { className: "heads-legend" });
  function drawLegend() {
    if (state.colour in numbers) {
      const [low, high] = ends[state.colour];
      const pale = numbers[state.colour].clear ? [make("span", { text: "pale: not told from 0" })] : [];
      const bar = make("i", { className: `heads-scale ${low < 0 ? "heads-two-sided" : ""}` });
      legend.replaceChildren(make("span", { text: written(low) }), bar, make("span", { text: written(high) }), ...pale);
      return;
    }
    const counts = Object.fromEntries(Object.keys(letters).map((name) => [name, types.filter((of) => of.includes(name)).length]));
    legend.replaceChildren(
      ...Object.entries(letters).filter(([name]) => counts[name]).map(([name, [letter, fill]]) => {
        const square = make("i", { className: "heads-square", style: `background: ${fill}`, text: letter });
        const find = () => {
          search.value = sought = sought === name ? "" : name;
          draw();
        };
        return make("button", { type: "button", "aria-pressed": String(sought === name), onclick: find }, square, ` ${name} ${counts[name]}`);
      }),
    );
  }

  const list = make("p", { className: "heads-found", "aria-live": "polite" });

  /** Lists the heads whose example rows attend to the sought token, those with most rows first. */
  function drawFound() {
    const text = sought.trim().toLowerCase();
    const rows = text ? range(count).map((at) => [at, rowsWith(at, text)]).filter(([, of]) => of).sort(([, one], [, other]) => other - one) : [];
    const buttons = rows.slice(0, MOST_FOUND).flatMap(([at, of]) => [make("button", { type: "button", text: nameOf(at), onclick: () => pick(at) }), ` ${counting(of, "row")} `]);
    const nothing = isFound ? [] : [`No ${["head", ...searched].map((words) => words.replace("a ", "")).join(" or ")} matches “${isolated(sought.trim())}”.`];
    const more = rows.length > MOST_FOUND ? [`and ${counting(rows.length - MOST_FOUND, "other head")}`] : [];
    list.replaceChildren(...(rows.length ? [`Attend to “${isolated(sought.trim())}”: `, ...buttons, ...more] : nothing));
  }

  const sentence = make("p", { className: "heads-sentence" });
  const say = (at = state.layer * heads + state.head) => {
    sentence.textContent = describe(at);
  };
  cells.forEach((cell, at) => {
    cell.addEventListener("pointerenter", () => say(at));
    cell.addEventListener("pointerleave", () => say());
  });

  function draw() {
    const isMap = state.across === "map";
    isFound = range(count).some(isSought);
    grid.hidden = !isMap;
    plot.classList.toggle("heads-hidden", isMap);
    upRow.hidden = isMap;
    colour.value = state.colour;
    across.value = state.across;
    up.value = state.up;
    if (isMap) {
      const chosen = state.layer * heads + state.head;
      cells.forEach((cell, at) => {
        cell.style.background = colourOf(at);
        cell.textContent = letterOf(at);
        cell.className = `heads-cell${isDimmed(at) ? " heads-pale" : ""}`;
        cell.tabIndex = at === chosen ? 0 : -1;
        cell.setAttribute("aria-selected", String(at === chosen));
        cell.setAttribute("aria-label", `${nameOf(at)}, ${typesOf(at).join(", ") || NO_TYPE}`);
      });
    } else drawScatter();
    drawLegend();
    drawFound();
    say();
  }

  stage.append(
    make("div", { className: "heads-controls" }, make("label", {}, "Colour ", colour), make("label", {}, "Show ", across), upRow, make("label", {}, "Find ", search)),
    list, grid, plot, legend, sentence,
  );
  return {
    choose(chosen) {
      Object.assign(state, chosen);
      draw();
    },
  };
};
