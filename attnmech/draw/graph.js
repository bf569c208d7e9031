// The token graph (attnmech/draw/graph.py): tokens on a line, or on two where queries and keys differ, and an
// arrow from a query to each key that receives at least the threshold. In print, a line is folded into several.

{
  const MOST_EDGES = 2000;
  const LEAST_THRESHOLD = 0.01;
  const NODE = 26; // height, in CSS pixels
  const GAP = 8; // between nodes
  const WIDEST = 130; // node
  const LISTED = 8; // weights in the box at the pointer
  const HIGHEST = 240; // arc
  const LOOP = 34; // height of an arrow from a token to itself
  const BESIDE = 4; // from a node's middle to where arrows leave on one side and arrive on the other
  const ACROSS = 200; // between the two lines
  const PAPER = 700; // greatest width in print, as in page.css
  const BETWEEN = 20; // least space above and below each of several lines
  const FLATTER = 0.6; // share of their height that arcs keep in print
  const [ONE, MEAN] = [0, 1];
  const MODES = ["one head", "mean of the heads"];

  const thickness = (weight) => 0.75 + 5 * weight;
  const tipSize = (weight) => 6 + thickness(weight);

  /** How wide each token's button must be. */
  function widthsOf(tokens) {
    const context = contextOf(make("canvas"));
    context.font = "13.6px ui-monospace, monospace";
    const widthOf = (token, index) => 18 + 9 * String(index).length + Math.ceil(context.measureText(token).width);
    return tokens.map((token, index) => Math.min(WIDEST, widthOf(token, index)));
  }

  /** Puts buttons on lines of at most this width; returns the middle and line of each, and where the lines end. */
  function inLines(buttons, widths, most) {
    let [left, line, end] = [GAP, 0, 0];
    const places = buttons.map((button, index) => {
      const width = widths[index];
      if (left > GAP && left + width + GAP > most) [left, line] = [GAP, line + 1];
      Object.assign(button.style, { left: `${left}px`, width: `${width}px`, height: `${NODE}px` });
      left += width + GAP;
      end = Math.max(end, left);
      return { x: left - GAP - width / 2, line };
    });
    return { places, count: line + 1, end };
  }

  /** An arrow's path, which ends where its tip begins. */
  function arrow(weight, path, [x, y], down) {
    const [size, width] = [tipSize(weight), tipSize(weight) / 2];
    const foot = down ? y - size : y + size;
    return [
      makeSvg("path", { d: `${path} ${x} ${foot}`, "stroke-width": thickness(weight) }),
      makeSvg("path", { d: `M ${x} ${y} L ${x - width} ${foot} L ${x + width} ${foot} Z`, class: "attnmech-graph-tip" }),
    ];
  }

  views.token_graph = async (stage, data) => {
    suitBackground(stage);
    const { queries, keys, across, nouns } = data;
    const weights = await attentionWeights(data);
    const state = { ...data.chosen, mode: ONE, hideFirst: false, threshold: data.threshold };
    /** @type {boolean[]} */
    let hidden = []; // for each key, whether it is hidden
    /** @type {Float32Array | Float64Array} */
    let values = new Float32Array(); // the weights shown, [query key] flat
    /** @type {Line[]} */
    let edges = []; // those of at least the threshold; none where they are too many to draw
    let edgeCount = 0; // including edges that are too many to draw
    let share = 0; // of the attention, carried by the edges
    /** @type {number[]} */
    let blank = []; // queries for which no key is left
    let place = /** @type {Place | null} */ (null); // the token whose edges alone are drawn
    /** @type {Line[]} */
    let drawn = [];
    /** @type {{x: number, top: number}[]} */
    let ofQueries = []; // where their nodes are: the middle and the upper edge
    let ofKeys = ofQueries;
    let printing = false;
    const redraw = inNextFrame(draw);

    // ---- elements ---------------------------------------------------------------------------------------------

    const selectors = headSelectors(data, chosen);
    const mode = selector("Edges of", MODES, state.mode, (index) => set({ mode: index }));
    const first = checkbox(`hide the ${nouns.first}`, false, (ticked) => set({ hideFirst: ticked }));
    const bounds = { min: Math.min(LEAST_THRESHOLD, state.threshold), max: 1, step: "any", value: state.threshold };
    const threshold = slider("Threshold", { ...bounds, words: percent }, (value) => {
      state.threshold = value;
      listEdges();
    });
    const controls = make("div", { className: "attnmech-controls" });
    if (!data.embedded) controls.append(selectors.layer, selectors.head);
    if (data.heads > 1) controls.append(mode.element);
    controls.append(first.element, threshold.element);

    const finding = make("p", { className: "attnmech-finding" });
    /** @type {{query: HTMLButtonElement[], key?: HTMLButtonElement[]}} */
    const nodes = { query: queries.map((token, index) => tokenButton(token, (data.first ?? 0) + index)) };
    if (across) nodes.key = keys.map(tokenButton);
    const keyNodes = nodes.key ?? nodes.query;
    const picture = makeSvg("svg", { "aria-hidden": "true" });
    const plot = make("div", { className: "attnmech-graph-plot" }, picture);
    const box = make("div", { className: "attnmech-graph-box" }, plot);
    const list = make("p", { className: "attnmech-reading attnmech-list" });
    if (across) {
      box.prepend(make("div", { className: "attnmech-graph-side", text: nouns.queries }));
      box.append(make("div", { className: "attnmech-graph-side", text: nouns.keys }));
    }
    plot.append(make("div", { role: "group", "aria-label": across ? nouns.queries : nouns.tokens }, ...nodes.query));
    if (nodes.key) plot.append(make("div", { role: "group", "aria-label": nouns.keys }, ...nodes.key));
    stage.append(make("div", { className: "attnmech-graph" }, controls, finding, box, list));
    const widths = { query: widthsOf(queries), key: widthsOf(keys) };

    const picker = tokenPicker(stage, nodes, {
      lines: listed,
      show(at) {
        place = at;
        redraw();
      },
      pinned(at) {
        tell();
        if (at?.side === "query") announce(stage, { query: at.index });
      },
    });

    // ---- what is chosen ---------------------------------------------------------------------------------------

    function set(changes) {
      Object.assign(state, changes);
      update();
    }

    function chosen(changes) {
      set(changes);
      announce(stage, changes);
    }

    function update() {
      hidden = keys.map((_, key) => state.hideFirst && key === 0);
      values =
        state.mode === MEAN
          ? weights.meanOf(state.layer, range(data.heads), hidden)
          : weights.ofHead(state.layer, state.head, hidden);
      selectors.head.hidden = state.mode === MEAN;
      blank = range(queries.length).filter((query) => !edgesOf({ side: "query", index: query }).length);
      for (const [key, button] of keyNodes.entries()) button.classList.toggle("attnmech-graph-hidden", hidden[key]);
      layOut();
      listEdges();
    }

    // ---- edges ------------------------------------------------------------------------------------------------

    const edgeAt = (at) => ({ query: Math.floor(at / keys.length), key: at % keys.length, weight: values[at] });

    function listEdges() {
      const places = range(values.length).filter((at) => values[at] >= state.threshold);
      edgeCount = places.length;
      share = places.reduce((sum, at) => sum + values[at], 0) / Math.max(1, queries.length - blank.length);
      edges = edgeCount > MOST_EDGES ? [] : places.map(edgeAt).sort(heaviestFirst);
      tell();
      redraw();
    }

    /** What a token gives as a query, or receives as a key, the heaviest first. @param {Place} at */
    function edgesOf({ side, index }) {
      const cells =
        side === "query"
          ? range(keys.length).map((key) => index * keys.length + key)
          : range(queries.length).map((query) => query * keys.length + index);
      return cells.filter((at) => values[at] > 0).map(edgeAt).sort(heaviestFirst);
    }

    /** The ends of a token's edges: on a shared line, a token is both query and key. */
    function placesOf(at) {
      return across ? [at] : ["query", "key"].map((side) => ({ side, index: at.index }));
    }

    // ---- words ------------------------------------------------------------------------------------------------

    /** The lines of the box at the pointer. */
    function listed(at) {
      const places = placesOf(at);
      return places.flatMap((end) => {
        const list = edgesOf(end);
        const more = list.length - LISTED / places.length;
        return [
          `${subjectOf(end, data)}${list.length ? "" : " nothing"}`,
          ...list.slice(0, LISTED / places.length).map((edge) => objectOf(end.side, edge, data)),
          ...(more > 0 ? [`and ${counting(more, "smaller weight")}`] : []),
        ];
      });
    }

    /** The sentence that the numbers support. */
    function tell() {
      const number = data.layers[state.layer];
      const heads = state.mode === ONE ? `L${number}H${state.head}` : `Mean of the ${data.heads} heads of layer ${number}`;
      const had = weights.ofHidden(state.layer, state.mode === ONE ? [state.head] : range(data.heads), hidden);
      const what = picker.pinned ? placesOf(picker.pinned).map(ofToken).join("; ") : ofWhole();
      list.textContent = picker.pinned?.side === "query" ? listOf(picker.pinned) : "";
      finding.textContent = `${heads}${data.words.mark}: ${what}.${omissions(hidden, blank, had, data)}`;
    }

    function ofWhole() {
      const whole = `${counting(edgeCount, "edge")} of at least ${percent(state.threshold)}, carrying ${percent(share)} of the ${data.words.whole}`;
      return edgeCount > MOST_EDGES ? `${whole}; too many to draw: raise the threshold, or hover over a ${nouns.token}` : whole;
    }

    function listOf(at) {
      const edgesDrawn = edgesOf(at).filter(({ weight }) => weight >= state.threshold);
      return listedBelow(at.index, edgesDrawn, (edge) => objectOf("query", edge, data), data);
    }

    function ofToken(at) {
      const most = edgesOf(at).slice(0, across ? 3 : 2).map((edge) => objectOf(at.side, edge, data));
      return `${subjectOf(at, data)} ${joined(most, "nothing")}`;
    }

    // ---- drawing ----------------------------------------------------------------------------------------------

    /** Puts the tokens on one line, in print on as many as needed; keys with a line of their own go below the queries. */
    function layOut() {
      const most = printing ? Math.min(box.clientWidth || PAPER, PAPER) : Infinity;
      const lines = inLines(nodes.query, widths.query, most);
      if (!nodes.key) {
        const { tops, height } = underArcs(lines);
        ofQueries = placed(nodes.query, lines, tops);
        ofKeys = ofQueries;
        return resize(lines.end, height);
      }
      const below = inLines(nodes.key, widths.key, most);
      const step = NODE + BETWEEN;
      const first = lines.count * step - BETWEEN + ACROSS;
      ofQueries = placed(nodes.query, lines, range(lines.count).map((line) => line * step));
      ofKeys = placed(nodes.key, below, range(below.count).map((line) => first + line * step));
      resize(Math.max(lines.end, below.end), first + below.count * step - BETWEEN);
    }

    function resize(width, height) {
      picture.setAttribute("width", String(width));
      picture.setAttribute("height", String(height));
    }

    /** The height of an arc across this many tokens. */
    function rise(distance) {
      return Math.min(HIGHEST, 14 + 26 * Math.sqrt(distance)) * (printing ? FLATTER : 1);
    }

    /** The upper edge of each line, with room for its arcs; on screen, for the arcs of the lowest threshold. */
    function underArcs({ places, count }) {
      const lowest = printing ? state.threshold : bounds.min;
      const rooms = range(count).map(() => ({ above: count > 1 ? BETWEEN : 8, below: count > 1 ? BETWEEN : 8 }));
      for (let at = 0; at < values.length; at += 1) {
        const { query, key } = edgeAt(at);
        if (!(values[at] >= lowest) || places[query].line !== places[key].line) continue;
        const room = rooms[places[query].line];
        const needed = (query === key ? LOOP : rise(Math.abs(query - key))) + 8;
        if (key <= query) room.above = Math.max(room.above, needed);
        else room.below = Math.max(room.below, needed);
      }
      let height = 0;
      const tops = rooms.map(({ above, below }) => {
        height += above + NODE + below;
        return height - below - NODE;
      });
      return { tops, height };
    }

    function placed(buttons, { places }, tops) {
      for (const [index, button] of buttons.entries()) button.style.top = `${tops[places[index].line]}px`;
      return places.map(({ x, line }) => ({ x, top: tops[line] }));
    }

    function draw() {
      drawn = place ? ofPlace(place) : edges;
      picture.replaceChildren(...drawn.toReversed().flatMap(arrowOf));
    }

    function ofPlace(at) {
      const all = placesOf(at).flatMap((end, second) =>
        edgesOf(end).filter(({ query, key }) => !second || query !== key), // a loop belongs to both ends
      );
      return all.filter(({ weight }) => weight >= state.threshold).sort(heaviestFirst).slice(0, MOST_EDGES);
    }

    function arrowOf({ query, key, weight }) {
      const [from, to] = [ofQueries[query], ofKeys[key]];
      return from.top === to.top ? arc({ query, key, weight }) : straight(from, to, weight);
    }

    /** From one line down or up to another. */
    function straight(from, to, weight) {
      const down = from.top < to.top;
      const [start, end] = down ? [from.top + NODE, to.top] : [from.top, to.top + NODE];
      const half = (start + end) / 2;
      return arrow(weight, `M ${from.x} ${start} C ${from.x} ${half}, ${to.x} ${half},`, [to.x, end], down);
    }

    /** Over the line to an earlier token or to itself, under it to a later one. */
    function arc({ query, key, weight }) {
      const over = key <= query;
      const { top } = ofQueries[query];
      const base = over ? top : top + NODE;
      const way = over ? -1 : 1;
      let [from, to] = [ofQueries[query].x, ofKeys[key].x];
      let [bend, spread] = [base + (way * rise(Math.abs(query - key)) * 4) / 3, 0];
      if (query === key) [from, to, bend, spread] = [from - 8, to + 8, base - (LOOP * 4) / 3, 14];
      else [from, to] = [from + way * BESIDE, to - way * BESIDE];
      return arrow(weight, `M ${from} ${base} C ${from - spread} ${bend}, ${to + spread} ${bend},`, [to, base], over);
    }

    update();
    onChange(stage, redraw);

    return {
      choose({ layer: toLayer = state.layer, head: toHead = state.head, query }) {
        Object.assign(state, { layer: toLayer, head: toHead });
        selectors.show(state);
        if (query !== undefined) picker.pin("query", query);
        if (typeof query === "number") {
          const middle = ofQueries[query].x;
          const inView = box.scrollLeft <= middle && middle <= box.scrollLeft + box.clientWidth;
          if (!inView) box.scrollLeft = middle - box.clientWidth / 2;
        }
        update();
      },
      /** Print does not scroll: the tokens take as many lines as they need. */
      print(now) {
        printing = now;
        box.classList.toggle("attnmech-printing", printing);
        layOut();
        draw();
      },
      /** The weights shown, [query key]; NaN in a row where no key is left. */
      weights: () => rowsOf(values, keys.length),
      /** The edges as last drawn, the heaviest first. */
      edges: () => drawn,
    };
  };
}
