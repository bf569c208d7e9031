// The colours of the points of joint embeddings, with their legends; view.css has the hues.

const EMBEDDING_COLOURS = {
  kind: "query or key",
  normalised: "position in the text",
  modulo: "position mod 5",
  norm: "norm",
  class: "token type",
  length: "text length",
  head: "head type",
  patch: "patch colour",
  hue: "hue",
  brightness: "brightness",
  row: "row",
  column: "column",
};
const OF_IMAGES = ["patch", "hue", "brightness", "row", "column"];
const RAMP = 256;

/** The colourings that the data allow, by name. @param {EmbeddingData} data */
function coloursOffered({ kinds, images, classes, lengths }) {
  return Object.keys(EMBEDDING_COLOURS).filter((name) => {
    if (OF_IMAGES.includes(name)) return images !== null;
    if (name === "head") return kinds.length > 0;
    if (name === "class") return classes.length > 1;
    return name !== "length" || new Set(lengths).size > 1;
  });
}

/** [red green blue] for each step between stops. @param {string[]} stops */
function rampOf(stops, steps = RAMP) {
  const colours = stops.map((stop) => numbersIn(stop).slice(0, 3));
  const ramp = new Uint8Array(3 * steps);
  for (let index = 0; index < steps; index += 1) {
    const at = (index / (steps - 1)) * (stops.length - 1);
    const before = Math.min(Math.floor(at), stops.length - 2);
    for (let part = 0; part < 3; part += 1) {
      ramp[3 * index + part] = colours[before][part] + (at - before) * (colours[before + 1][part] - colours[before][part]);
    }
  }
  return ramp;
}

const cssColour = (rgb, index) => `rgb(${rgb[3 * index]} ${rgb[3 * index + 1]} ${rgb[3 * index + 2]})`;

/** The hue in turns and the brightness, both from 0 to 1, of red, green and blue from 0 to 255. */
function hueAndBrightness(red, green, blue) {
  const highest = Math.max(red, green, blue);
  const range_ = highest - Math.min(red, green, blue);
  const sixth =
    range_ === 0 ? 0
    : highest === red ? ((green - blue) / range_ + 6) % 6
    : highest === green ? (blue - red) / range_ + 2
    : (red - green) / range_ + 4;
  return [sixth / 6, (0.299 * red + 0.587 * green + 0.114 * blue) / 255];
}

/**
 * The colours of all points under one scheme, with the hues of the stage's style.
 *
 * @param {string} scheme
 * @param {HTMLElement} stage
 * @param {EmbeddingData} data
 * @param {EmbeddingTokens} tokens
 * @returns {Colouring}
 */
function colouringOf(scheme, stage, data, tokens) {
  const css = (name) => colourOf(stage, `--${name}`);
  const stops = (name) => ["0", "1", "2"].map((part) => css(`ramp-${name}-${part}`));
  const ramp = (name) => rampOf(stops(name));
  const { count } = tokens;
  const shapes = [
    { shape: "circle", words: "queries" },
    { shape: "square", words: "keys" },
  ];
  const shapesOnly = shapes.map((shape) => ({ ...shape, colour: css("quiet") }));

  /** By token: `colour(token, isKey)` gives [red green blue]. */
  function byToken(colour, legend) {
    const rgb = new Uint8Array(6 * count);
    for (let point = 0; point < 2 * count; point += 1) rgb.set(colour(point % count, point >= count), 3 * point);
    return { by: /** @type {const} */ ("token"), rgb, legend };
  }

  /** Colours each token's share, from 0 to 1, on a ramp. */
  function onRamps(share, names, words, ends) {
    const ramps = names.map(ramp);
    const colour = (token, isKey) => {
      const step = Math.round(255 * share(token));
      return ramps[isKey ? ramps.length - 1 : 0].subarray(3 * step, 3 * step + 3);
    };
    const shown = names.map((name, index) => ({ colours: stops(name), words: names.length > 1 ? shapes[index].words : "" }));
    const entries = names.length > 1 ? [] : shapesOnly;
    return byToken(colour, { words: `${words}, ${ends}`, entries, ramps: shown });
  }

  function categories(names, of) {
    const colours = names.map((_, index) => css(index < 6 ? `head-${index}` : "head-6"));
    const rgb = colours.map((colour) => numbersIn(colour).slice(0, 3));
    const entries = names.slice(0, 6).map((words, index) => ({ colour: colours[index], words }));
    if (names.length > 6) entries.push({ colour: colours[6], words: names.slice(6).join(", ") });
    return { colour: (index) => rgb[of(index)], entries };
  }

  const longest = Math.max(...data.lengths);
  const shortest = Math.min(...data.lengths);
  const makers = {
    kind() {
      const colours = [css("query"), css("key")];
      const rgb = colours.map((colour) => numbersIn(colour).slice(0, 3));
      const entries = shapes.map((shape, index) => ({ ...shape, colour: colours[index] }));
      return byToken((_, isKey) => rgb[Number(isKey)], { words: "", entries, ramps: [] });
    },
    normalised() {
      const share = (token) => tokens.position[token] / Math.max(1, data.lengths[tokens.text[token]] - 1);
      return onRamps(share, ["query", "key"], "position / text length", "light = start of the text");
    },
    modulo() {
      const dark = range(5).map((index) => numbersIn(css(`five-${index}`)).slice(0, 3));
      const pale = dark.map((rgb) => rgb.map((part) => Math.round(part + 0.55 * (255 - part))));
      const entries = [dark, pale].flatMap((rgbs, kind) =>
        rgbs.map((rgb, index) => ({ ...shapes[kind], colour: `rgb(${rgb.join(" ")})`, words: `${index ? "" : `${shapes[kind].words} `}${index}` })));
      const colour = (token, isKey) => (isKey ? pale : dark)[tokens.position[token] % 5];
      return byToken(colour, { words: "position mod 5:", entries, ramps: [] });
    },
    norm() {
      const words = "norm within the head, before scaling: lowest to highest";
      return { by: "norm", rgb: ramp("value"), legend: { words, entries: shapesOnly, ramps: [{ colours: stops("value"), words: "" }] } };
    },
    class() {
      const { colour, entries } = categories(tokens.classes, (token) => tokens.class[token]);
      return byToken(colour, { words: "token type:", entries: [...entries, ...shapesOnly], ramps: [] });
    },
    length() {
      const share = (token) => (data.lengths[tokens.text[token]] - shortest) / Math.max(1, longest - shortest);
      return onRamps(share, ["value"], "text length", `${shortest} to ${longest} tokens`);
    },
    head() {
      const names = ["none claimed", ...data.kinds];
      const { colour, entries } = categories(names.slice(1), (block) => data.about[block].kind);
      const none = numbersIn(css("quiet")).slice(0, 3);
      const rgb = Uint8Array.from(data.about.flatMap(({ kind }, block) => (kind < 0 ? none : colour(block))));
      const all = [...entries, { colour: css("quiet"), words: names[0] }];
      return { by: "head", rgb, legend: { words: "head type:", entries: all, ramps: [] } };
    },
    patch: () => ofPatch((rgb) => rgb, { words: "mean colour of the patch", ramps: [] }),
    hue() {
      const wheel = ["0", "1", "2", "3", "0"].map((part) => css(`hue-${part}`));
      const colours = rampOf(wheel);
      const turned = ([red, green, blue]) => {
        const step = Math.round(255 * hueAndBrightness(red, green, blue)[0]);
        return colours.subarray(3 * step, 3 * step + 3);
      };
      return ofPatch(turned, { words: "hue of the patch: red, yellow-green, cyan, violet, red", ramps: [{ colours: wheel, words: "" }] });
    },
    brightness() {
      const colours = ramp("value");
      const lit = ([red, green, blue]) => {
        const step = Math.round(255 * hueAndBrightness(red, green, blue)[1]);
        return colours.subarray(3 * step, 3 * step + 3);
      };
      return ofPatch(lit, { words: "brightness of the patch: darkest to brightest", ramps: [{ colours: stops("value"), words: "" }] });
    },
    row: () => alongGrid(0, "row of the patch, top to bottom"),
    column: () => alongGrid(1, "column of the patch, left to right"),
  };

  /** Colours tokens by the mean colour of their patch; tokens that are not patches are grey. */
  function ofPatch(colour, legend) {
    const images = /** @type {NonNullable<EmbeddingTokens["images"]>} */ (tokens.images);
    const none = numbersIn(css("quiet")).slice(0, 3);
    const of = (token) =>
      Number.isNaN(images.place[2 * token]) ? none : colour(images.colours.subarray(3 * token, 3 * token + 3));
    return byToken(of, { ...legend, words: `${legend.words}; grey: no patch`, entries: shapesOnly });
  }

  function alongGrid(axis, words) {
    const images = /** @type {NonNullable<EmbeddingTokens["images"]>} */ (tokens.images);
    const last = Math.max(1, images.grid[axis] - 1);
    return onRamps((token) => (images.place[2 * token + axis] || 0) / last, ["query", "key"], words, "light = first");
  }

  return /** @type {Colouring} */ (makers[scheme]());
}

/** The colour of each point of a head as CSS. @param {Colouring} colouring */
function cssColours({ by, rgb }, block, norms, points) {
  if (by === "head") {
    const colour = cssColour(rgb, block);
    return () => colour;
  }
  /** @type {string[]} */
  const made = range(rgb.length / 3).map((index) => cssColour(rgb, index));
  return by === "token" ? (point) => made[point] : (point) => made[Math.min(255, norms[block * points + point] >> 8)];
}

/** A dot in the style of the plots. @param {{colour: string, shape?: string}} entry */
function dotSample({ colour, shape }) {
  const radius = shape === "circle" ? "50%" : shape === "square" ? "1px" : "3px";
  return make("i", { className: "attnmech-embedding-dot", style: `background:${colour};border-radius:${radius}`, "aria-hidden": "true" });
}

/** The legend of the colours. @param {Colouring} colouring */
function legendOf({ legend: { words, entries, ramps } }) {
  const bar = (colours) =>
    make("i", { className: "attnmech-embedding-ramp", style: `background:linear-gradient(90deg,${colours.join()})`, "aria-hidden": "true" });
  return [
    ...(words ? [make("span", { text: words })] : []),
    ...ramps.map((ramp) => make("span", {}, bar(ramp.colours), ` ${ramp.words}`)),
    ...entries.map((entry) => make("span", {}, dotSample(entry), ` ${entry.words}`)),
  ];
}
