// Draws plotly's figures, and saves them as pictures.

const MOST_ASPECT = 1.5; // greatest height over width, so that a figure fits a phone

/**
 * Draws a figure with few buttons, none of which uploads it; in steps if `pause` is set.
 *
 * @type {Shared["drawPlotly"]}
 */
function drawPlotly(place, { data, layout }, pause) {
  place.pause = pause;
  breakTitles(layout);
  const byFinger = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom
  return Plotly.react(place, data, { ...layout, dragmode: byFinger ? false : "zoom" }, {
    displaylogo: false,
    plotlyServerURL: "",
    displayModeBar: byFinger ? false : "hover",
    setBackground: takePause,
    modeBarButtonsToAdd: pictureButtons,
    modeBarButtonsToRemove: ["toImage", "sendChartToCloud", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  });
}

const TEXT_BESIDE = 110; // CSS pixels that the labels of rows may take beside a figure's horizontal axes
const LINE_OF_TITLE = 17; // CSS pixels

/**
 * Breaks titles that are wider than their figure into lines, and makes room for these; plotly would cut them off.
 *
 * @param {any} layout
 */
function breakTitles(layout) {
  const broken = (holder, width, size) => {
    const font = `${holder.font?.size ?? size}px system-ui, sans-serif`;
    const before = holder.text.split("<br>");
    const lines = before.flatMap((line) => linesWithin(line, width, font));
    holder.text = lines.join("<br>");
    return LINE_OF_TITLE * (lines.length - before.length);
  };
  const margin = { ...layout.margin };
  const grow = (side, more) => {
    margin[side] = (margin[side] ?? 10) + more;
    layout.height += more;
  };
  for (const [name, part] of Object.entries(layout)) {
    const { width } = layout;
    if (name === "title" && part.text) grow("t", broken(part, width - 20, 17));
    if (/^legend\d*$/.test(name) && part.title?.text) grow("t", broken(part.title, (1 - (part.x ?? 0)) * (width - 40), 13));
    if (/^xaxis\d*$/.test(name) && part.title?.text) {
      const [from, to] = part.domain ?? [0, 1];
      broken(part.title, (to - from) * (width - TEXT_BESIDE), 14); // the axis makes room for its title
    }
    if (name === "annotations") {
      for (const note of part) if (note.xref === "paper" && note.text) grow(note.y < 0 ? "b" : "t", broken(note, width - 20, 12));
    }
  }
  layout.margin = margin;
}

/**
 * Plotly calls this once it has laid a figure out, and draws axes and data when what is in `_promises` is kept; where
 * labels need more room than it gave them, it does both again. The page's own background shows.
 *
 * @param {PlotlyDrawn} plot
 */
function takePause({ pause, _promises }) {
  if (pause) _promises.push(pause());
}

const PNG_SCALE = 3; // pixels of a picture for each of the figure's
const TITLE_SIZE = 14; // CSS pixels
const TITLE_FONT = `600 ${TITLE_SIZE}px system-ui, sans-serif`;

/** One button a format; always the same objects, or plotly would take the figure for a new one. */
const pictureButtons = ["svg", "png"].map((format) => {
  const name = format.toUpperCase();
  const letters = '<text x="10" y="14" text-anchor="middle" font-size="9" font-weight="700" fill="#757575">';
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">${letters}${name}</text></svg>`;
  const click = (plot) => savePicture(plot, format);
  return { name: `picture-${format}`, title: `Save as ${name}`, icon: { width: 20, height: 20, svg }, click };
});

/**
 * Saves a figure with its title, on the background of the page; `plot.picture()` gives the file's name and the title.
 *
 * @param {PlotlyDrawn} plot
 * @param {string} format
 */
async function savePicture(plot, format) {
  const { name, title } = plot.picture();
  const { width, height, font } = plot._fullLayout;
  const drawn = await Plotly.toImage(plot, { format: "svg", width, height, imageDataOnly: true });
  const picture = titled(drawn, { title, width, height, ink: font.color, background: backgroundOf(plot) });
  const svg = new XMLSerializer().serializeToString(picture);
  const blob = format === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await pixelsOf(svg, picture);
  const link = make("a", { href: URL.createObjectURL(blob), download: `${name}.${format}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // the browser may first ask where to save it
}

/** A figure's SVG below its title, with nothing transparent behind it. */
function titled(drawn, { title, width, height, ink, background }) {
  const lines = linesWithin(title, width - 2 * TITLE_SIZE);
  const above = lines.length && Math.ceil((lines.length + 0.8) * 1.3 * TITLE_SIZE);
  const figure = new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement;
  figure.setAttribute("y", String(above));
  const whole = { width, height: height + above };
  return makeSvg(
    "svg",
    { ...whole, viewBox: `0 0 ${width} ${height + above}` },
    makeSvg("rect", { ...whole, fill: `rgb(${background})` }),
    ...lines.map((line, index) =>
      makeSvg("text", { x: TITLE_SIZE, y: (index + 1.2) * 1.3 * TITLE_SIZE, fill: ink, style: `font: ${TITLE_FONT}` }, line),
    ),
    figure,
  );
}

/** Words in lines of at most this many CSS pixels, where no word is longer. */
function linesWithin(words, width, font = TITLE_FONT) {
  const context = contextOf(make("canvas"));
  context.font = font;
  /** @type {string[]} */
  const lines = [];
  for (const word of words.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** A picture of an SVG as a PNG. @returns {Promise<Blob>} */
async function pixelsOf(svg, { width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = make("canvas");
  canvas.width = Math.round(PNG_SCALE * width.baseVal.value);
  canvas.height = Math.round(PNG_SCALE * height.baseVal.value);
  contextOf(canvas).drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((proceed, refuse) => {
    canvas.toBlob((blob) => (blob ? proceed(blob) : refuse(new Error("too large for a PNG"))), "image/png");
  });
}
