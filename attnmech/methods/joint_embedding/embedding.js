// The view of joint embeddings: the reader's choices, the page's address, and the parts of the page that follow them.

{
  const SHOWN = { both: "matrix and head", matrix: "matrix", head: "head" };
  const ONE_STEP = 600; // milliseconds within which the Back button undoes all steps of one control together
  const TYPING = 250; // milliseconds after the last keystroke until a search begins
  const MOST_ANOMALIES = 6; // the number shown before the reader unfolds the rest

  views.embedding = async (stage, data) => {
    suitBackground(stage);
    const { places, layers } = data;
    const [tokens, norms, normValues, highest, weights] = await Promise.all([
      embeddingTokens(data), codesOf(data.norms.codes), ...[data.norms, data.highest, data.weights].map(unpack),
    ]);
    const clouds = embeddingClouds(data);
    const patterns = await patternsByText();
    const pictures = await picturesByText();
    const points = 2 * tokens.count;
    const names = places.map(([layer, head]) => `L${layers[layer]}H${head}`);
    const blockAt = new Map(places.map((place, block) => [String(place), block]));
    const projections = Object.keys(data.projections);
    const colours = coloursOffered(data);
    const texts = Object.keys(data.texts).map(Number);
    const unit = data.unit === "text" ? "Text" : "Image";
    const onPage = "attnmechPage" in document.documentElement.dataset;
    /** @type {EmbeddingState} */
    const usual = {
      show: "both", block: firstBlock(), projection: projections[0], pointColour: "kind", search: "", whole: false, sorted: false, size: 1,
      flat: false, pictures: true, labels: false, lines: false, bySize: false, text: texts[0] ?? -1, point: -1,
    };
    const state = { ...usual };
    let options = /** @type {Partial<SentenceOptions>} */ ({});
    /** @type {Set<number> | null} */
    let hits = null;
    /** @type {number[]} */
    let spread = [];
    let turn = 0;
    let typing = 0; // the timer that waits for the next keystroke
    let lastStep = { what: "", at: -Infinity };

    // ---- data -------------------------------------------------------------------------------------------------

    async function patternsByText() {
      const opened = Object.entries(data.texts).map(async ([text, { pattern, heads }]) => [text, await patternsIn(pattern, heads)]);
      return /** @type {Record<string, Patterns>} */ (Object.fromEntries(await Promise.all(opened)));
    }

    async function picturesByText() {
      const opened = Object.entries(data.images?.pictures ?? {}).map(async ([text, source]) => {
        const picture = new Image();
        picture.src = source;
        await picture.decode();
        return [text, picture];
      });
      return /** @type {Record<string, HTMLImageElement>} */ (Object.fromEntries(await Promise.all(opened)));
    }

    /** The page first shows the head of the strongest anomaly. */
    function firstBlock() {
      const [first] = data.anomalies;
      return (first && places.findIndex(([layer, head]) => layer === first[0] && head === first[1])) ?? 0;
    }

    let sentence = /** @type {SentenceControl | null} */ (null); // the one that is shown
    const attention = embeddingAttention(tokens, { places, highest, weights, patternOf: (text) => patterns[text] });

    // ---- elements ---------------------------------------------------------------------------------------------

    const matrix = embeddingMatrix(stage, data, tokens, { pick: (block) => choose({ block }), describe, norms });
    const plot = embeddingHead(stage, data, tokens, {
      pick: choosePoint, norms, attention,
      normOf: (block, point) => normValues.slice(block * points + point, 1)[0],
      patches: (text) => pictures[text] ?? null,
    });

    const shown = selector("Show", Object.values(SHOWN), 0, (index) => choose({ show: Object.keys(SHOWN)[index] }));
    const projection = selector("Projection", projections.map((name) => data.projections[name].label), 0, (index) =>
      choose({ projection: projections[index] }));
    const colour = selector("Colour", colours.map((name) => EMBEDDING_COLOURS[name]), 0, (index) => choose({ pointColour: colours[index] }));
    const search = make("input", { type: "search", size: 14, placeholder: "a token", oninput: typed });
    const searchLabel = make("label", { className: "attnmech-control", text: "Search " }, search);
    const whole = checkbox("whole token", false, (ticked) => choose({ whole: ticked }));
    const sorted = checkbox("sort heads by the distance between hits", false, (ticked) => choose({ sorted: ticked }));
    const controls = make("div", { className: "attnmech-controls attnmech-embedding-controls" }, shown.element);
    if (projections.length > 1) controls.append(projection.element);
    controls.append(colour.element, searchLabel, whole.element, sorted.element);
    const hitsFound = make("p", { className: "attnmech-finding", "aria-live": "polite" });
    const foundMeans = make("p", { className: "attnmech-reading" });
    const legend = make("div", { className: "attnmech-embedding-legend" });

    const size = slider("Size of the plots", { min: 1, max: 6, step: 0.5, value: 1, words: (value) => `×${value}` }, (value) => choose({ size: value }));
    const matrixPane = make("div", { className: "attnmech-embedding-pane" },
      make("h3", { text: "All heads" }), make("div", { className: "attnmech-controls" }, size.element), matrix.element, anomalies());

    const title = make("h3", { "aria-live": "polite" });
    const step = (by, text, words) =>
      make("button", { type: "button", text, "aria-label": words, onclick: () => choose({ block: (state.block + by + places.length) % places.length }) });
    const layer = selector("Layer", layers, 0, (index) => chooseHead(index, places[state.block][1]));
    const headNumbers = [...new Set(places.map(([, head]) => head))].sort((one, other) => one - other);
    const head = selector("Head", headNumbers, 0, (index) => chooseHead(places[state.block][0], headNumbers[index]));
    const dims = selector("Dimensions", ["3-D", "2-D"], 0, (index) => choose({ flat: index === 1 }));
    const withLabels = checkbox("labels", false, (ticked) => choose({ labels: ticked }));
    const withLines = checkbox("attention lines", false, (ticked) => choose({ lines: ticked }));
    const bySize = checkbox("point size by norm", false, (ticked) => choose({ bySize: ticked }));
    const withPictures = checkbox("pictures (blue border: query, orange: key)", true, (ticked) => choose({ pictures: ticked }));
    withPictures.element.hidden = data.images === null;
    const kind = selector("Point", ["none", "query", "key"], 0, pointFromControls);
    const number = make("input", { type: "number", min: 0, max: tokens.count - 1, step: 1, "aria-label": "token of the point", title: "number of the token over all texts", onchange: pointFromControls });
    number.value = "0";
    const picker = make("span", { className: "attnmech-control" }, kind.element, number);
    const headControls = make("div", { className: "attnmech-controls" },
      step(-1, "← previous", "previous head"), step(1, "next →", "next head"), layer.element, head.element, dims.element,
      withPictures.element, withLabels.element, withLines.element, bySize.element, picker);
    const pointFinding = make("p", { className: "attnmech-finding attnmech-embedding-said", "aria-live": "polite" });
    const numbersPlace = make("div", { className: "attnmech-embedding-about" });
    const headPane = make("div", { className: "attnmech-embedding-pane attnmech-embedding-right" },
      title, headControls, plot.element, pointFinding,
      make("details", { open: true }, make("summary", { text: "The head's numbers" }), numbersPlace));

    const textOptions = texts.map((text) => `${text}: ${(data.texts[text].queries ?? []).slice(0, 8).join(" ").slice(0, 50)}…`);
    const text = selector(unit, textOptions, 0, (index) => choose({ text: texts[index], point: -1 }));
    const sentencePlace = make("div");
    const sentenceHeading = make("h3");
    const sentencePane = make("div", { className: "attnmech-embedding-section", hidden: texts.length === 0 },
      sentenceHeading, make("div", { className: "attnmech-controls" }, text.element), sentencePlace);

    const panes = make("div", { className: "attnmech-embedding-panes" }, matrixPane, headPane, sentencePane);
    stage.append(make("div", { className: "attnmech-embedding" }, controls, legend, hitsFound, foundMeans, panes, notes()));

    function anomalies() {
      const entry = ([at, number_, what, value]) => {
        const block = blockAt.get(String([at, number_]));
        const words = `L${layers[at]}H${number_}: ${what}${value === null ? "" : `, ${with3Digits(value)}`}`;
        if (block === undefined) return make("li", { text: words });
        const goThere = () => {
          choose({ block });
          if (headPane.getBoundingClientRect().top > innerHeight) headPane.scrollIntoView();
        };
        return make("li", {}, make("button", { type: "button", text: words, onclick: goThere }));
      };
      const entries = data.anomalies.map(entry);
      const list = make("ol", {}, ...entries.slice(0, MOST_ANOMALIES));
      const rest = entries.slice(MOST_ANOMALIES);
      const more = make("details", { hidden: !rest.length }, make("summary", { text: `${rest.length} more` }), make("ol", { start: MOST_ANOMALIES + 1 }, ...rest));
      const section = make("div", { className: "attnmech-embedding-section", hidden: !entries.length }, make("h3", { text: "Unusual heads, the most unusual first" }), list, more);
      const kinds = [...new Set(data.anomalies.map(([, , what]) => what))].filter((what) => data.meanings[what]);
      if (kinds.length) section.append(make("p", { className: "attnmech-reading", text: `${kinds.map((what) => `${what}: ${data.meanings[what]}`).join("; ")}.` }));
      return section;
    }

    function notes() {
      return make("ul", { className: "attnmech-embedding-notes", hidden: !data.notes.length }, ...data.notes.map((note) => make("li", { text: note })));
    }

    // ---- words ------------------------------------------------------------------------------------------------

    /** The words about a head in the box at the pointer. */
    function describe(block) {
      const { numbers, kind: type } = data.about[block];
      const some = Object.entries(numbers).slice(0, 4).map(([label, value]) => `${label} ${value === null ? "—" : with3Digits(value)}`);
      return [
        `${names[block]}${type < 0 ? "" : `, ${data.kinds[type]}`}`,
        ...(spread[block] >= 0 ? [`spread of the hits ${spread[block].toFixed(2)}`] : []),
        ...some,
      ];
    }

    function tellSearch(ranked) {
      if (hits === null) {
        hitsFound.textContent = state.search.trim() ? `No token matches “${isolated(state.search.trim())}”.` : "";
        foundMeans.textContent = "";
        return;
      }
      const wanted = `“${isolated(state.search.trim())}”: ${counting(hits.size, "token")} of ${tokens.count.toLocaleString("en")}`;
      if (hits.size < 2) {
        hitsFound.textContent = `${wanted}.`;
        foundMeans.textContent = "Distances between hits need at least two hits.";
        return;
      }
      const named_ = (block) => `${names[block]} (${spread[block].toFixed(2)})`;
      const last = ranked.length > 3 ? `; farthest apart in ${named_(ranked.at(-1))}` : "";
      hitsFound.textContent = `${wanted}. Closest together in ${joined(ranked.slice(0, 3).map(named_))}${last}.`;
      const some = hits.size > MOST_HITS_COMPARED ? ` Distances are over ${MOST_HITS_COMPARED} evenly spaced hits.` : "";
      foundMeans.textContent =
        `A head's number is the mean distance between two hits, divided by the mean distance between any two tokens in this projection ` +
        `(mean of queries and keys). Near 0, the hits form one cluster; at 1, they are as scattered as all tokens.${some}`;
    }

    // ---- showing ----------------------------------------------------------------------------------------------

    /** Draws the reader's choices; parts that `changes` does not name stay unchanged. */
    async function update(changes = Object.keys(state)) {
      const mine = ++turn;
      const cloud = await clouds(state.projection);
      if (mine !== turn) return;
      const changed = (...wanted) => wanted.some((name) => changes.includes(name));
      setControls(cloud);
      if (changed("projection")) matrix.positions(cloud);
      const colouring = colouringOf(state.pointColour, stage, data, tokens);
      if (changed("search", "whole")) {
        const wanted = hitsOf(tokens, state.search, state.whole);
        hits = wanted?.length ? new Set(wanted) : null; // a search without a hit dims nothing
      }
      if (changed("search", "whole", "projection")) spread = hits === null ? [] : spreadOfHits(cloud, [...hits], tokens.count);
      const ranked = range(places.length).sort((one, other) => spread[one] - spread[other] || one - other);
      const isRanked = state.sorted && hits !== null && hits.size > 1;
      if (changed("pointColour", "search", "whole")) {
        matrix.colours(colouring, hits);
        legend.replaceChildren(...legendOf(colouring), ...(hits === null ? [] : [make("span", { text: "faint grey: not a hit" })]));
      }
      tellSearch(ranked);
      const captions = spread.map((value) => (value >= 0 ? value.toFixed(2) : ""));
      const order = isRanked ? { ranked, captions } : { ranked: null, captions: captions.some(Boolean) ? captions : [] };
      matrix.choose({ chosen: state.block, marked: state.point, size: state.size, ...(changed("search", "whole", "projection", "sorted") ? order : {}) });
      if (isRanked && changed("sorted", "search", "whole", "projection")) matrix.toTop();
      else if (changed("block")) matrix.reveal(state.block);
      plot.show({ state, cloud, colouring, hits });
      title.textContent = `${names[state.block]}: ${counting(tokens.count, "token")} (${counting(tokens.texts, data.unit)})`;
      pointFinding.textContent = plot.sentence() || "Click a point to see its attention; queries are circles, keys are squares.";
      if (changed("block")) numbersPlace.replaceChildren(...embeddingNumbers(data, state.block));
      await showText();
    }

    function setControls(cloud) {
      shown.select.selectedIndex = Object.keys(SHOWN).indexOf(state.show);
      projection.select.selectedIndex = projections.indexOf(state.projection);
      colour.select.selectedIndex = colours.indexOf(state.pointColour);
      if (!typing && search.value !== state.search) search.value = state.search;
      whole.box.checked = state.whole;
      sorted.box.checked = state.sorted;
      size.input.value = String(state.size);
      size.element.querySelector("output")?.replaceChildren(`×${state.size}`);
      layer.select.selectedIndex = places[state.block][0];
      head.select.selectedIndex = headNumbers.indexOf(places[state.block][1]);
      dims.element.hidden = cloud.dims < 3;
      dims.select.selectedIndex = Number(state.flat);
      withPictures.box.checked = state.pictures;
      withLabels.box.checked = state.labels;
      withLines.box.checked = state.lines;
      bySize.box.checked = state.bySize;
      kind.select.selectedIndex = state.point < 0 ? 0 : state.point < tokens.count ? 1 : 2;
      number.disabled = state.point < 0;
      if (state.point >= 0) number.value = String(state.point % tokens.count);
      text.select.selectedIndex = texts.indexOf(state.text);
      panes.dataset.shown = state.show;
    }

    // ---- the text ---------------------------------------------------------------------------------------------

    /** @type {Map<number, Promise<{element: HTMLElement, control: SentenceControl, picture: ReturnType<typeof embeddingPicture> | null}>>} */
    const sentences = new Map();

    async function makeText(number_) {
      const element = make("div");
      element.addEventListener("attnmech-options", ({ detail }) => {
        options = detail;
        remember("replaceState");
      });
      sentencePlace.replaceChildren(element); // it measures itself
      const viewData = { ...data.texts[number_], pattern: patterns[number_], options };
      const picture = pictures[number_] ? makePicture(number_, element) : null;
      if (picture) element.append(picture.element);
      const control = await views.sentence(element, viewData);
      element.addEventListener("click", ({ target }) => {
        const place = tokenUnder(target);
        if (place) choosePoint(place.button.getAttribute("aria-pressed") === "true" ? pointOf(number_, place) : -1);
      });
      element.addEventListener("pointerover", ({ target }) => {
        const place = tokenUnder(target);
        plot.point(place ? pointOf(number_, place) : -1);
        matrix.choose({ marked: place ? pointOf(number_, place) : state.point });
      });
      element.addEventListener("pointerleave", () => {
        plot.point(-1);
        matrix.choose({ marked: state.point });
      });
      return { element, control, picture };
    }

    /** The token's button in which an event occurred, and its place. */
    function tokenUnder(target) {
      const button = /** @type {Element} */ (target).closest("button");
      const column = button?.closest(".attnmech-sentence-query, .attnmech-sentence-key");
      if (!button || !column) return null;
      return { button, isKey: column.classList.contains("attnmech-sentence-key"), index: [...column.children].indexOf(button) };
    }

    function pointOf(number_, { isKey, index }) {
      const token = attention.tokenAt(number_, index);
      return token === undefined ? -1 : token + (isKey ? tokens.count : 0);
    }

    function makePicture(number_, element) {
      const images = /** @type {NonNullable<EmbeddingTokens["images"]>} */ (tokens.images);
      const cells = data.texts[number_].queries.map((_, index) => {
        const token = attention.tokenAt(number_, index);
        const [row, column] = token === undefined ? [NaN, NaN] : images.place.subarray(2 * token, 2 * token + 2);
        return Number.isNaN(row) ? null : /** @type {[number, number]} */ ([row, column]);
      });
      const pick = (index) => choosePoint(pointOf(number_, { isKey: false, index }));
      return embeddingPicture(element, { picture: pictures[number_], grid: images.grid, places: cells, pick });
    }

    async function showText() {
      if (state.text < 0) return;
      const number_ = state.text;
      if (!sentences.has(number_)) sentences.set(number_, makeText(number_));
      const { element, control, picture } = await /** @type {NonNullable<ReturnType<typeof sentences.get>>} */ (sentences.get(number_));
      if (number_ !== state.text) return;
      sentence = control;
      if (element.parentElement !== sentencePlace) sentencePlace.replaceChildren(element);
      const token = state.point % tokens.count;
      const here = state.point >= 0 && tokens.text[token] === number_;
      const isKey = state.point >= tokens.count;
      const [layer_, head_] = places[state.block];
      const at = here ? (isKey ? { key: tokens.position[token] } : { query: tokens.position[token] }) : { query: null };
      control.choose({ layer: layer_, head: head_, ...at });
      picture?.show(patterns[number_].of(layer_, head_), here && !isKey ? tokens.position[token] : -1);
      sentenceHeading.textContent = `${unit} ${number_}, as ${names[state.block]} sees it`;
    }

    // ---- choosing ---------------------------------------------------------------------------------------------

    function typed() {
      clearTimeout(typing);
      typing = window.setTimeout(() => {
        typing = 0;
        choose({ search: search.value });
      }, TYPING);
    }

    function chooseHead(toLayer, toHead) {
      const block = blockAt.get(String([toLayer, toHead])) ?? places.findIndex(([at]) => at === toLayer);
      choose({ block });
    }

    /** Selects a point, and shows its text if the page carries it. */
    function choosePoint(point) {
      const of = point < 0 ? -1 : tokens.text[point % tokens.count];
      choose(texts.includes(of) ? { point, text: of } : { point });
    }

    function pointFromControls() {
      const token = Math.min(tokens.count - 1, Math.max(0, Math.round(Number(number.value)) || 0));
      const chosen = kind.select.selectedIndex;
      choosePoint(chosen ? token + (chosen - 1) * tokens.count : -1);
    }

    /** Shows the choices; returns the names of those that changed. */
    function take(changes) {
      const news = Object.keys(changes).filter((name) => state[name] !== changes[name]);
      Object.assign(state, changes);
      if (news.length) update(news);
      return news;
    }

    function choose(changes) {
      const news = take(changes);
      if (!news.length) return;
      const [layer_, head_] = places[state.block];
      if (news.includes("block")) announce(stage, { layer: layer_, head: head_ });
      const now = { what: news.join(), at: performance.now() };
      const same = now.what === lastStep.what && now.at - lastStep.at < ONE_STEP;
      lastStep = now;
      remember(same ? "replaceState" : "pushState");
    }

    // ---- the address ------------------------------------------------------------------------------------------

    /** The view writes its own part of the address; the layer and the head are the page's. */
    function remember(how) {
      if (!onPage) return;
      const { block, ...rest } = state;
      const unusual = Object.entries(rest).filter(([name, value]) => value !== usual[name]);
      const words = new URLSearchParams(location.hash.slice(1));
      for (const name of data.inAddress) words.delete(name);
      for (const [name, value] of [...unusual, ...Object.entries(options)]) words.set(name, String(value));
      const address = new URL(`#${words}`, location.href);
      if (address.href !== location.href) history[how](null, "", address);
    }

    function fromAddress() {
      if (!onPage) return;
      const address = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
      const fits = {
        show: (value) => value in SHOWN,
        projection: (value) => projections.includes(value),
        pointColour: (value) => colours.includes(value),
        text: (value) => texts.includes(value),
        point: (value) => Number.isInteger(value) && value >= -1 && value < points,
        size: (value) => value >= 1 && value <= 6,
      };
      for (const [name, value] of Object.entries(usual)) {
        if (!Object.hasOwn(address, name)) {
          state[name] = value;
          continue;
        }
        const read = typeof value === "number" ? Number(address[name]) : typeof value === "boolean" ? address[name] === "true" : address[name];
        state[name] = !fits[name] || fits[name](read) ? read : value;
      }
      const of = state.point < 0 ? -1 : tokens.text[state.point % tokens.count];
      if (!Object.hasOwn(address, "text") && texts.includes(of)) state.text = of;
      const block = blockAt.get(String([layers.indexOf(Number(address.layer)), Number(address.head)]));
      state.block = block ?? usual.block;
      options = Object.fromEntries(
        ["mode", "least", "hideFirst", "hideSpecial"]
          .filter((name) => Object.hasOwn(address, name))
          .map((name) => [name, name.startsWith("hide") ? address[name] === "true" : Number(address[name])]),
      );
      lastStep = { what: "", at: -Infinity };
    }

    async function followAddress() {
      fromAddress();
      await update();
      for (const made of sentences.values()) (await made).control.options(options);
    }

    // ---- start ------------------------------------------------------------------------------------------------

    fromAddress();
    await update();
    remember("replaceState");
    if (onPage) addEventListener("popstate", followAddress);
    onChange(stage, () => {
      matrix.refresh();
      update(["pointColour"]);
    });
    return {
      choose({ layer: layer_, head: head_ }) {
        const block = blockAt.get(String([layer_, head_]));
        if (block !== undefined) take({ block });
      },
      print(printing) {
        panes.classList.toggle("attnmech-printing", printing);
        matrix.print(printing);
        plot.draw();
        for (const made of sentences.values()) made.then(({ control }) => control.print(printing));
      },
      state: () => ({ ...state }),
      hits: () => hits && [...hits],
      spread: () => spread,
      sentence: () => sentence,
      matrix,
      plot,
      clouds,
    };
  };
}
