"use strict";

// Draws a plotly figure as the text of an SVG file: its title above it, and the cells of heat maps as shapes, which
// stay sharp at any size, where plotly.js has pixels.

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_CELLS = 40_000; // the largest number of cells of a heat map drawn as shapes; a larger map stays an image
  const PADDING = 6;

  /** The words of a title on lines that fit the width. */
  function wrapped(title, width, font) {
    const context = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
    context.font = font;
    const lines = [];
    for (const word of title.split(" ")) {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (lines.length && context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return title ? lines : [];
  }

  async function pixelsOf(image) {
    const source = new Image();
    source.src = image.getAttribute("href") ?? image.getAttribute("xlink:href");
    await source.decode();
    const canvas = new OffscreenCanvas(source.naturalWidth, source.naturalHeight);
    const context = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.drawImage(source, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  }

  /** The colour of a heat map's image at a place of the plot. */
  function colourAt(pixels, image, across, down) {
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(image.getAttribute(name)));
    const column = Math.min(pixels.width - 1, Math.floor(((across - x) / width) * pixels.width));
    const row = Math.min(pixels.height - 1, Math.floor(((down - y) / height) * pixels.height));
    if (column < 0 || row < 0) return [0, 0, 0, 0];
    return pixels.data.subarray(4 * (row * pixels.width + column), 4 * (row * pixels.width + column) + 4);
  }

  /** Replaces the image of one heat map by a shape for each of its colours. */
  async function drawCells(group, axes) {
    const image = group.querySelector("image");
    const [{ x, y, z, trace }] = group.__data__;
    if (!image || trace.zsmooth || z.length * z[0].length > MOST_CELLS) return;
    const pixels = await pixelsOf(image);
    const [across, down] = [axes.x[trace.xaxis], axes.y[trace.yaxis]];
    const edges = (axis, values) => Array.from(values, (value) => axis.c2p(value));
    const [columns, rows] = [edges(across, x), edges(down, y)];
    const paths = new Map();
    for (let row = 0; row < z.length; row += 1) {
      const [top, bottom] = [rows[row], rows[row + 1]].sort((one, other) => one - other);
      for (let column = 0; column < z[row].length; column += 1) {
        const [left, right] = [columns[column], columns[column + 1]].sort((one, other) => one - other);
        const [red, green, blue, alpha] = colourAt(pixels, image, (left + right) / 2, (top + bottom) / 2);
        if (!alpha) continue;
        const colour = `rgb(${red},${green},${blue})`;
        const [x0, x1, y0, y1] = [left + trace.xgap / 2, right - trace.xgap / 2, top + trace.ygap / 2, bottom - trace.ygap / 2];
        const cell = `M${x0.toFixed(2)},${y0.toFixed(2)}H${x1.toFixed(2)}V${y1.toFixed(2)}H${x0.toFixed(2)}Z`;
        paths.set(colour, (paths.get(colour) ?? "") + cell);
      }
    }
    const cells = document.createElementNS(SVG, "g");
    if (image.hasAttribute("opacity")) cells.setAttribute("opacity", image.getAttribute("opacity"));
    for (const [colour, d] of paths) {
      const path = document.createElementNS(SVG, "path");
      // Without gaps, neighbours overlap by a hair: else viewers show white seams between them.
      const seam = trace.xgap || trace.ygap ? "" : `;stroke:${colour};stroke-width:0.3`;
      path.setAttribute("style", `fill:${colour}${seam}`);
      path.setAttribute("d", d);
      cells.append(path);
    }
    image.replaceWith(cells);
  }

  function titleText(lines, size, family) {
    const text = document.createElementNS(SVG, "text");
    text.setAttribute("style", `font: bold ${size}px ${family}; fill: #1a1a1a; white-space: pre`);
    for (const [place, line] of lines.entries()) {
      const span = document.createElementNS(SVG, "tspan");
      span.setAttribute("x", String(PADDING));
      span.setAttribute("y", String(PADDING + size * (0.9 + 1.25 * place)));
      span.textContent = line;
      text.append(span);
    }
    return text;
  }

  /** The SVG of a figure of this width; `height` is the whole height, or null for the figure's own, up to `most`. */
  window.attnmechSvg = async ({ figure, title, width, height, most, size, family }) => {
    const lines = wrapped(title, width - 2 * PADDING, `bold ${size}px ${family}`);
    const above = lines.length ? Math.ceil(PADDING + lines.length * 1.25 * size) : 0;
    const whole = height ?? Math.min(most, above + figure.layout.height);
    const place = document.createElement("div");
    document.body.append(place);
    const layout = { ...figure.layout, width, height: whole - above, autosize: false };
    const { _fullLayout } = await Plotly.newPlot(place, figure.data, layout, { staticPlot: true });
    const axes = { x: {}, y: {} };
    for (const { xaxis, yaxis } of Object.values(_fullLayout._plots)) {
      axes.x[xaxis._id] = xaxis;
      axes.y[yaxis._id] = yaxis;
    }
    for (const group of place.querySelectorAll("g.hm")) await drawCells(group, axes);
    const drawn = new DOMParser().parseFromString(Plotly.Snapshot.toSVG(place, "svg", 1), "image/svg+xml").documentElement;
    drawn.setAttribute("y", String(above));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${whole}`);
    const paper = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ width, height: whole, fill: "#ffffff" })) paper.setAttribute(name, String(value));
    svg.append(paper, drawn);
    if (lines.length) svg.append(titleText(lines, size, family));
    place.remove();
    return { svg: new XMLSerializer().serializeToString(svg), height: whole };
  };
})();
