// The sentence view (attnmech/draw/sentence.py): query tokens on the left, key tokens on the right, a line where one
// attends to the other. The canvas covers the visible part, and only lines with an end there are drawn.

{
  const ROW = 24; // CSS pixels a token
  const MOST_LINES = 600; // the largest number of lines in view; more cannot be told apart, and take longer than a frame
  const FAINTEST = 0.07; // the opacity at which a thin line can still be seen
  const LISTED = 8; // tokens in the box at the pointer
  const LEAST = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
  const [ONE, ALL, MEAN] = [0, 1, 2];
  const MODES = ["one head", "all heads", "mean of the heads"];
  const COLOURS = range(7).map((number) => `--head-${number}`); // view.css
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

  views.sentence = async (stage, data) => {
    suitBackground(stage);
    const { queries, keys, special, nouns } = data;
    const weights = await attentionWeights(data);
    const usual = { mode: ONE, hideFirst: false, hideSpecial: false, least: 0.02 };
    const state = { ...data.chosen, ...usual, ...data.options };
    /** @type {boolean[]} */
    let hidden = []; // for each key, whether it is hidden
    /** @type {{head: number | null, weights: Float32Array | Float64Array}[]} */
    let shown = []; // the heads whose lines are drawn; of their mean, head is null
    const off = new Set(); // heads that the reader switched off; they stay off in other layers
    let place = /** @type {Place | null} */ (null); // the token whose lines alone are drawn
    /** @type {Line[]} */
    let drawn = [];
    /** @type {{colour: string, dashes: number[]}[]} */
    let pens = []; // of each head, or of the only lines
    const redraw = inNextFrame(draw);

    // ---- elements ---------------------------------------------------------------------------------------------

    const selectors = headSelectors(data, chosen);
    const mode = selector("Lines of", MODES, state.mode, (index) => setOption({ mode: index }));
    const first = checkbox(`hide the ${nouns.first}`, state.hideFirst, (ticked) => setOption({ hideFirst: ticked }));
    const others = checkbox("hide special tokens", state.hideSpecial, (ticked) => setOption({ hideSpecial: ticked }));
    const steps = { min: 0, max: LEAST.length - 1, step: 1, value: LEAST.indexOf(state.least) };
    const least = slider("Minimum weight shown", { ...steps, words: (at) => percent(LEAST[at]) }, (at) => {
      setOption({ least: LEAST[at] });
    });
    const controls = make("div", { className: "attnmech-controls" });
    if (!data.embedded) controls.append(selectors.layer, selectors.head);
    if (data.heads > 1) controls.append(mode.element);
    controls.append(first.element);
    if (special.some(Boolean)) controls.append(others.element);
    controls.append(least.element);

    const finding = make("p", { className: "attnmech-finding" });
    const opacities = make("span", {});
    const switches = range(data.heads).map(headSwitch);
    const heads = make("span", { role: "group", "aria-label": "heads" }, "Heads:", ...switches);
    const legend = make("div", { className: "attnmech-sentence-legend" }, opacities, heads);
    const cut = make("p", { className: "attnmech-reading" });
    const list = make("p", { className: "attnmech-reading attnmech-list" });
    const buttons = { query: queries.map((token, index) => tokenButton(token, (data.first ?? 0) + index)), key: keys.map(tokenButton) };
    const canvas = make("canvas", { "aria-hidden": "true" });
    const middle = make("div", { className: "attnmech-sentence-lines" }, canvas);
    const attend = make("span", { text: `${nouns.queries} attend …` });
    const attended = make("span", { text: `… to ${nouns.keys}` });
    const heading = make("div", { className: "attnmech-sentence-heading" }, attend, attended);
    const box = make("div", { className: "attnmech-sentence-box", style: `--row: ${ROW}px`, onscroll: scrolled });
    box.append(heading, side("query", nouns.queries), middle, side("key", nouns.keys));
    stage.append(make("div", { className: "attnmech-sentence" }, controls, finding, legend, box, cut, list));

    function side(name, label) {
      const className = `attnmech-sentence-${name}`;
      return make("div", { className, role: "group", "aria-label": label }, ...buttons[name]);
    }

    /** A button that switches a head's lines off and on again. */
    function headSwitch(head) {
      const button = make("button", { type: "button", "aria-pressed": "true", "aria-label": `head ${head}` });
      button.addEventListener("click", () => {
        if (!off.delete(head)) off.add(head);
        button.setAttribute("aria-pressed", String(!off.has(head)));
        update();
      });
      return button;
    }

    const picker = tokenPicker(stage, buttons, {
      lines: listed,
      show(at) {
        place = at;
        shade();
        redraw();
      },
      pinned(at) {
        tell();
        if (at?.side === "query") announce(stage, { query: at.index });
      },
    });

    // ---- what is chosen ---------------------------------------------------------------------------------------

    const isThere = (head) => !data.missing?.includes(state.layer * data.heads + head);
    const headsOn = () => (state.mode === ONE ? [state.head] : range(data.heads).filter((head) => !off.has(head) && isThere(head)));

    function set(changes) {
      Object.assign(state, changes);
      update();
    }

    /** Sets options, and tells the page which of them differ from the defaults. */
    function setOption(changes) {
      set(changes);
      const unusual = Object.entries(usual).filter(([name, value]) => state[name] !== value);
      const detail = Object.fromEntries(unusual.map(([name]) => [name, state[name]]));
      stage.dispatchEvent(new CustomEvent("attnmech-options", { detail }));
    }

    function chosen(changes) {
      set(changes);
      announce(stage, changes);
    }

    function update() {
      hidden = keys.map((_, key) => (state.hideFirst && key === 0) || (state.hideSpecial && special[key]));
      const on = headsOn();
      shown =
        state.mode === MEAN && on.length
          ? [{ head: null, weights: weights.meanOf(state.layer, on, hidden) }]
          : on.map((head) => ({ head, weights: weights.ofHead(state.layer, head, hidden) }));
      selectors.head.hidden = state.mode !== ONE;
      for (const [key, button] of buttons.key.entries()) button.classList.toggle("attnmech-sentence-hidden", hidden[key]);
      tell();
      shade();
      restyle();
    }

    // ---- lines ------------------------------------------------------------------------------------------------

    /** All lines of one token, the heaviest first. @param {Place} at */
    function linesOf({ side: end, index }) {
      /** @type {Line[]} */
      const candidates = [];
      for (const { head, weights: values } of shown) {
        for (let other = 0; other < (end === "query" ? keys : queries).length; other += 1) {
          const [query, key] = end === "query" ? [index, other] : [other, index];
          const weight = values[query * keys.length + key];
          if (weight > 0) candidates.push({ head, query, key, weight });
        }
      }
      return candidates.sort(heaviestFirst);
    }

    const drawnOf = (at) => linesOf(at).filter(({ weight }) => weight >= state.least);

    /** The lines of at least the minimum weight with an end among these rows, the heaviest first, and their number. */
    function linesBetween(from, to) {
      /** @type {Line[]} */
      const candidates = [];
      for (const { head, weights: values } of shown) {
        for (let query = 0; query < queries.length; query += 1) {
          const whole = query >= from && query < to; // else only the keys among these rows
          const last = whole ? keys.length : Math.min(to, keys.length);
          for (let key = whole ? 0 : from; key < last; key += 1) {
            const weight = values[query * keys.length + key];
            if (weight >= state.least) candidates.push({ head, query, key, weight });
          }
        }
      }
      if (candidates.length <= MOST_LINES) return { lines: candidates.sort(heaviestFirst), total: candidates.length };
      const lightest = Float64Array.from(candidates, ({ weight }) => weight).sort()[candidates.length - MOST_LINES];
      const lines = candidates.filter(({ weight }) => weight >= lightest).sort(heaviestFirst).slice(0, MOST_LINES);
      return { lines, total: candidates.length };
    }

    /** The number of lines of at least the minimum weight, their share of the attention, and the queries without any key. */
    function counted() {
      const blank = queries.map(() => shown.length > 0);
      let [lines, sum, rows] = [0, 0, 0];
      for (const { weights: values } of shown) {
        for (let query = 0; query < queries.length; query += 1) {
          let some = false;
          for (let at = query * keys.length; at < (query + 1) * keys.length; at += 1) {
            if (values[at] > 0) some = true;
            if (!(values[at] >= state.least)) continue;
            lines += 1;
            sum += values[at];
          }
          if (!some) continue;
          rows += 1;
          blank[query] = false;
        }
      }
      return { lines, share: rows ? sum / rows : 0, blank: range(queries.length).filter((query) => blank[query]) };
    }

    // ---- words ------------------------------------------------------------------------------------------------

    function described(side, line) {
      return `${objectOf(side, line, data)}${state.mode === ALL ? ` (L${data.layers[state.layer]}H${line.head})` : ""}`;
    }

    /** The lines of the box at the pointer. */
    function listed(at) {
      const lines = linesOf(at);
      const more = lines.length - LISTED;
      return [
        `${subjectOf(at, data)}${lines.length ? "" : " nothing"}`,
        ...lines.slice(0, LISTED).map((line) => described(at.side, line)),
        ...(more > 0 ? [`and ${counting(more, "smaller weight")}`] : []),
      ];
    }

    function listOf(at) {
      return listedBelow(at.index, drawnOf(at), (line) => described("query", line), data);
    }

    /** The heads whose lines are drawn. */
    function ofHeads() {
      const [on, number] = [headsOn(), data.layers[state.layer]];
      const mean = state.mode === MEAN ? "Mean of " : "";
      if (state.mode !== ONE && on.length === data.heads) return `${mean ? "Mean of the" : "All"} ${data.heads} heads of layer ${number}`;
      if (on.length > 3) return `${mean}${on.length} of the ${data.heads} heads of layer ${number}`;
      return mean + joined(on.map((head) => `L${number}H${head}`));
    }

    /** The sentence that the numbers support. */
    function tell() {
      const { lines, share, blank } = counted();
      for (const button of buttons.query) button.classList.remove("attnmech-sentence-blank");
      for (const query of blank) buttons.query[query].classList.add("attnmech-sentence-blank");
      const had = weights.ofHidden(state.layer, headsOn(), hidden);
      const left = `of the ${hidden.some(Boolean) ? "remaining " : ""}${data.words.whole}`;
      const pinned = picker.pinned;
      const what = pinned
        ? `${subjectOf(pinned, data)} ${joined(linesOf(pinned).slice(0, 3).map((line) => described(pinned.side, line)), "nothing")}`
        : `${counting(lines, "line")} of at least ${percent(state.least)}, carrying ${percent(share)} ${left}`;
      list.textContent = pinned?.side === "query" ? listOf(pinned) : "";
      finding.textContent = shown.length
        ? `${ofHeads()}${data.words.mark}: ${what}.${omissions(hidden, blank, had, data)}`
        : `All heads of layer ${data.layers[state.layer]} are switched off.`;
    }

    // ---- drawing ----------------------------------------------------------------------------------------------

    /** Shades the tokens at the other ends of the lines of `place`. */
    function shade() {
      for (const button of [...buttons.query, ...buttons.key]) if (button.style.length) button.removeAttribute("style");
      if (!place) return;
      const other = place.side === "query" ? "key" : "query";
      for (const line of drawnOf(place).reverse()) {
        buttons[other][line[other]].style.setProperty("--depth", String(Math.sqrt(line.weight))); // the heaviest line comes last
      }
    }

    /** Takes the colours of the surroundings, and explains them in the legend. */
    function restyle() {
      const weightColour = colourOf(stage, "--weight");
      const colours = COLOURS.map((name) => colourOf(stage, name));
      pens = range(state.mode === ALL ? data.heads : 1).map((head) => ({
        colour: state.mode === ALL ? colours[head % colours.length] : weightColour,
        dashes: DASHES[Math.floor(head / colours.length) % DASHES.length],
      }));
      const weightsShown = [0.1, 0.5, 1].map((weight) => make("span", {}, swatch(pens[0], weight), ` ${100 * weight}\u00a0%`));
      opacities.replaceChildren("Opacity is the weight:", ...weightsShown);
      opacities.hidden = state.mode === ALL;
      for (const [head, button] of switches.entries()) {
        button.hidden = !isThere(head);
        button.replaceChildren(...(state.mode === ALL ? [swatch(pens[head], 1)] : []), String(head));
      }
      heads.hidden = state.mode === ONE;
      redraw();
    }

    function swatch(pen, weight) {
      const line = make("canvas", { "aria-hidden": "true" });
      stroke(sizeCanvas(line, 28, 10), pen, weight, [0, 5, 28, 5]);
      return line;
    }

    function stroke(context, { colour, dashes }, weight, [fromX, fromY, toX, toY]) {
      context.strokeStyle = colour;
      context.setLineDash(dashes);
      context.globalAlpha = Math.min(1, Math.max(FAINTEST, weight));
      context.lineWidth = state.mode === ALL ? 1.5 : 2;
      context.beginPath();
      context.moveTo(fromX, fromY);
      context.lineTo(toX, toY);
      context.stroke();
    }

    /**
     * The visible part of a line across the canvas: dashes far outside are slow to draw.
     *
     * @returns {[number, number, number, number]}
     */
    function withinHeight(fromY, toY, width, height) {
      const rise = toY - fromY || 1e-9;
      const [one, other] = [-ROW, height + ROW].map((y) => Math.min(1, Math.max(0, (y - fromY) / rise)));
      const [from, to] = one < other ? [one, other] : [other, one];
      return [from * width, fromY + from * rise, to * width, fromY + to * rise];
    }

    function scrolled() {
      picker.hideBox();
      redraw();
    }

    function draw() {
      const [top, width] = [box.scrollTop, middle.clientWidth];
      const height = Math.min(box.clientHeight - heading.offsetHeight, middle.offsetHeight);
      const [from, to] = [Math.floor(top / ROW), Math.ceil((top + height) / ROW)];
      const { lines, total } = place ? ofPlace(place) : linesBetween(from, to);
      const apart = Math.min(3, (0.75 * ROW) / pens.length); // lines of several heads lie side by side
      const context = sizeCanvas(canvas, width, height);
      canvas.style.top = `${top}px`;
      for (let at = lines.length - 1; at >= 0; at -= 1) {
        const { head, query, key, weight } = lines[at];
        const number = state.mode === ALL ? Number(head) : 0;
        const shift = 0.5 * ROW - top + (number - (pens.length - 1) / 2) * apart;
        const ends = withinHeight(query * ROW + shift, key * ROW + shift, width, height);
        stroke(context, pens[number], weight, ends);
      }
      drawn = lines;
      cut.textContent = total > lines.length ? `Only the heaviest ${lines.length} of the ${total.toLocaleString("en")} lines in view are drawn.` : "";
    }

    function ofPlace(at) {
      const lines = drawnOf(at);
      return { lines, total: lines.length };
    }

    update();
    onChange(stage, restyle);
    new ResizeObserver(redraw).observe(box); // its height follows the window's

    return {
      choose({ layer: toLayer = state.layer, head: toHead = state.head, query, key }) {
        Object.assign(state, { layer: toLayer, head: toHead });
        selectors.show(state);
        if (query !== undefined) picker.pin("query", query);
        if (key !== undefined) picker.pin("key", key);
        const row = query ?? key;
        if (typeof row === "number") {
          const inView = box.scrollTop <= row * ROW && (row + 2) * ROW <= box.scrollTop + box.clientHeight;
          if (!inView) box.scrollTop = (row + 0.5) * ROW - box.clientHeight / 2;
        }
        update();
      },
      /** Sets the options; those not passed get their defaults. */
      options(changes) {
        Object.assign(state, usual, changes);
        mode.select.selectedIndex = state.mode;
        first.box.checked = state.hideFirst;
        others.box.checked = state.hideSpecial;
        least.input.value = String(LEAST.indexOf(state.least));
        least.element.querySelector("output")?.replaceChildren(percent(state.least));
        update();
      },
      /** Print does not scroll: shows all rows, drawn before the page is laid out. */
      print(printing) {
        box.classList.toggle("attnmech-printing", printing);
        draw();
      },
      /** The weights shown, [query key] by head; NaN in a row where no key is left. */
      weights: () => shown.map(({ weights: values }) => rowsOf(values, keys.length)),
      /** The lines as last drawn, the heaviest first. */
      lines: () => drawn,
    };
  };
}
