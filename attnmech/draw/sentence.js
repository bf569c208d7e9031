// The sentence view (attnmech/draw/sentence.py): query tokens on the left, key tokens on the right, a line where one
// looks at the other. The canvas covers what is in view, and only lines with an end there are drawn.

{
  const ROW = 24; // CSS pixels a token
  const MOST_LINES = 600; // in view; more cannot be told apart, and take longer than a frame
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
    let hidden = []; // of each key, whether it is left out
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
    const least = slider("Least weight shown", { ...steps, words: (at) => percent(LEAST[at]) }, (at) => {
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
    const buttons = { query: queries.map(tokenButton), key: keys.map(tokenButton) };
    const canvas = make("canvas", { "aria-hidden": "true" });
    const middle = make("div", { className: "attnmech-sentence-lines" }, canvas);
    const looks = make("span", { text: `${nouns.queries} look …` });
    const seen = make("span", { text: `… at ${nouns.keys}` });
    const heading = make("div", { className: "attnmech-sentence-heading" }, looks, seen);
    const box = make("div", { className: "attnmech-sentence-box", style: `--row: ${ROW}px`, onscroll: scrolled });
    box.append(heading, side("query", nouns.queries), middle, side("key", nouns.keys));
    stage.append(make("div", { className: "attnmech-sentence" }, controls, finding, legend, box, cut, list));

    function side(name, label) {
      const className = `attnmech-sentence-${name}`;
      return make("div", { className, role: "group", "aria-label": label }, ...buttons[name]);
    }

    /** A button that switches a head's lines off and on again. */
    function headSwitch(each) {
      const button = make("button", { type: "button", "aria-pressed": "true", "aria-label": `head ${each}` });
      button.addEventListener("click", () => {
        if (!off.delete(each)) off.add(each);
        button.setAttribute("aria-pressed", String(!off.has(each)));
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

    const isThere = (each) => !data.missing?.includes(state.layer * data.heads + each);
    const headsOn = () => (state.mode === ONE ? [state.head] : range(data.heads).filter((each) => !off.has(each) && isThere(each)));

    function set(changes) {
      Object.assign(state, changes);
      update();
    }

    /** Tells the page, too, which options are not the usual ones. */
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
          : on.map((each) => ({ head: each, weights: weights.ofHead(state.layer, each, hidden) }));
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
      const found = [];
      for (const { head: each, weights: values } of shown) {
        for (let other = 0; other < (end === "query" ? keys : queries).length; other += 1) {
          const [query, key] = end === "query" ? [index, other] : [other, index];
          const weight = values[query * keys.length + key];
          if (weight > 0) found.push({ head: each, query, key, weight });
        }
      }
      return found.sort(heaviestFirst);
    }

    const drawnOf = (at) => linesOf(at).filter(({ weight }) => weight >= state.least);

    /** The lines of the least weight with an end among these rows, the heaviest first, and how many there are. */
    function linesBetween(from, to) {
      /** @type {Line[]} */
      const found = [];
      for (const { head: each, weights: values } of shown) {
        for (let query = 0; query < queries.length; query += 1) {
          const whole = query >= from && query < to; // else only the keys among these rows
          const last = whole ? keys.length : Math.min(to, keys.length);
          for (let key = whole ? 0 : from; key < last; key += 1) {
            const weight = values[query * keys.length + key];
            if (weight >= state.least) found.push({ head: each, query, key, weight });
          }
        }
      }
      if (found.length <= MOST_LINES) return { lines: found.sort(heaviestFirst), found: found.length };
      const lightest = Float64Array.from(found, ({ weight }) => weight).sort()[found.length - MOST_LINES];
      const lines = found.filter(({ weight }) => weight >= lightest).sort(heaviestFirst).slice(0, MOST_LINES);
      return { lines, found: found.length };
    }

    /** How many lines have the least weight, what share of the attention they carry, and which queries have none. */
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

    /** What the box at the pointer says. */
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
      return mean + joined(on.map((each) => `L${number}H${each}`));
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
      for (const each of [...buttons.query, ...buttons.key]) if (each.style.length) each.removeAttribute("style");
      if (!place) return;
      const other = place.side === "query" ? "key" : "query";
      for (const line of drawnOf(place).reverse()) {
        buttons[other][line[other]].style.setProperty("--depth", String(Math.sqrt(line.weight))); // that of the heaviest stays
      }
    }

    /** Takes the colours of the surroundings, and says in the legend what they mean. */
    function restyle() {
      const weightColour = colourOf(stage, "--weight");
      const colours = COLOURS.map((name) => colourOf(stage, name));
      pens = range(state.mode === ALL ? data.heads : 1).map((each) => ({
        colour: state.mode === ALL ? colours[each % colours.length] : weightColour,
        dashes: DASHES[Math.floor(each / colours.length) % DASHES.length],
      }));
      const weightsShown = [0.1, 0.5, 1].map((weight) => make("span", {}, swatch(pens[0], weight), ` ${100 * weight}\u00a0%`));
      opacities.replaceChildren("Opacity is the weight:", ...weightsShown);
      opacities.hidden = state.mode === ALL;
      for (const [each, button] of switches.entries()) {
        button.hidden = !isThere(each);
        button.replaceChildren(...(state.mode === ALL ? [swatch(pens[each], 1)] : []), String(each));
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
     * The part of a line across the canvas that is in view: dashes far outside take long to lay.
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
      const { lines, found } = place ? ofPlace(place) : linesBetween(from, to);
      const apart = Math.min(3, (0.75 * ROW) / pens.length); // lines of several heads lie side by side
      const context = sizeCanvas(canvas, width, height);
      canvas.style.top = `${top}px`;
      for (let at = lines.length - 1; at >= 0; at -= 1) {
        const { head: each, query, key, weight } = lines[at];
        const number = state.mode === ALL ? Number(each) : 0;
        const shift = 0.5 * ROW - top + (number - (pens.length - 1) / 2) * apart;
        const ends = withinHeight(query * ROW + shift, key * ROW + shift, width, height);
        stroke(context, pens[number], weight, ends);
      }
      drawn = lines;
      cut.textContent = found > lines.length ? `Only the heaviest ${lines.length} of the ${found.toLocaleString("en")} lines in view are drawn.` : "";
    }

    function ofPlace(at) {
      const lines = drawnOf(at);
      return { lines, found: lines.length };
    }

    update();
    onChange(stage, restyle);

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
      /** Sets the options; those that are not given become the usual ones. */
      options(given) {
        Object.assign(state, usual, given);
        mode.select.selectedIndex = state.mode;
        first.box.checked = state.hideFirst;
        others.box.checked = state.hideSpecial;
        least.input.value = String(LEAST.indexOf(state.least));
        least.element.querySelector("output")?.replaceChildren(percent(state.least));
        update();
      },
      /** On paper nothing scrolls: all rows at once, drawn before the page is laid out. */
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
