// An image with patches as tokens, overlaid with the attention of one patch.

/**
 * `show(pattern, token)` overlays a query's weights, or the mean over all queries (token -1).
 *
 * @param {HTMLElement} stage
 * @param {{picture: HTMLImageElement, grid: [number, number], places: ([number, number] | null)[], pick(token: number): void}} given
 */
function embeddingPicture(stage, { picture, grid: [rows, columns], places, pick }) {
  const canvas = make("canvas", { className: "attnmech-embedding-picture", role: "img", "aria-label": "the image with the attention over it" });
  const words = make("p", { className: "attnmech-reading" });
  const at = new Map(places.map((place, token) => [String(place), token]));
  const side = 320;

  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const [wide, high] = [canvas.clientWidth / columns, canvas.clientHeight / rows];
    const token = at.get(String([Math.floor(offsetY / high), Math.floor(offsetX / wide)]));
    if (token !== undefined) pick(token);
  });

  /** @param {Float32Array} pattern */
  function show(pattern, token) {
    const count = places.length;
    const weight = (key) =>
      token >= 0 ? pattern[token * count + key] : range(count).reduce((sum, query) => sum + pattern[query * count + key], 0) / count;
    const weights = range(count).map(weight);
    const most = Math.max(...weights.filter((_, key) => places[key]));
    const height = Math.round((side * picture.naturalHeight) / picture.naturalWidth);
    const context = sizeCanvas(canvas, side, height);
    const [wide, high] = [side / columns, height / rows];
    context.drawImage(picture, 0, 0, side, height);
    context.fillStyle = "#000000";
    places.forEach((place, key) => {
      if (!place) return;
      context.globalAlpha = 0.85 * (1 - Math.sqrt(weights[key] / (most || 1)));
      context.fillRect(place[1] * wide, place[0] * high, wide, high);
    });
    context.globalAlpha = 1;
    if (token >= 0 && places[token]) {
      context.strokeStyle = colourOf(stage, "--query");
      context.lineWidth = 3;
      context.strokeRect(places[token][1] * wide, places[token][0] * high, wide, high);
    }
    const beside = weights.reduce((sum, weight, key) => sum + (places[key] ? 0 : weight), 0);
    words.textContent =
      `${token >= 0 ? `Attention of token ${token}` : "Attention to each patch, averaged over all queries"}. Brighter patches receive more; ` +
      `the brightest receives ${percent(most)}.${beside > 0 ? ` Tokens without a patch receive ${percent(beside)}.` : ""} Click a patch to make it the query.`;
  }
  return { element: make("div", {}, canvas, words), show };
}
