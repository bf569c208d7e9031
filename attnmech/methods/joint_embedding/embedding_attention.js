// Attention between the points of joint embeddings, as far as the page stores it.

/**
 * The points that a point attends to, and those that attend to it: complete if the page carries its text, else by the
 * two highest keys of each query.
 *
 * @param {EmbeddingTokens} tokens
 * @param {{places: [number, number][], highest: Unpacked, weights: Unpacked, patternOf(text: number): Patterns | undefined}} data
 */
function embeddingAttention(tokens, { places, highest, weights, patternOf }) {
  const { count } = tokens;
  const at = new Map(range(count).map((token) => [`${tokens.text[token]},${tokens.position[token]}`, token]));

  /** The lines from each query to its two highest keys, in one head. */
  function linesOf(block) {
    const [keys, shares] = [highest.of(block), weights.of(block)];
    return range(2 * count)
      .filter((index) => !Number.isNaN(keys[index]))
      .map((index) => ({ query: Math.floor(index / 2), key: keys[index], weight: shares[index] }));
  }

  /** A point's weights, the largest first, with the other token's position, and its number if it is a dot. */
  function ofPoint(block, point) {
    const token = point % count;
    const isKey = point >= count;
    const text = tokens.text[token];
    const pattern = patternOf(text)?.of(...places[block]);
    if (!pattern) {
      const lines = linesOf(block).filter(({ query, key }) => (isKey ? key : query) === token);
      const other = ({ query, key }) => (isKey ? query : key);
      const weights_ = lines.map((line) => ({ position: tokens.position[other(line)], token: other(line), weight: line.weight }));
      return { whole: false, weights: weights_.sort(heaviestFirst) };
    }
    const length = Math.sqrt(pattern.length);
    const own = tokens.position[token];
    const all = range(length).map((position) => {
      const weight = pattern[isKey ? position * length + own : own * length + position];
      return { position, token: at.get(`${text},${position}`), weight };
    });
    return { whole: true, weights: all.filter(({ weight }) => weight > 0).sort(heaviestFirst) };
  }
  return { linesOf, ofPoint, tokenAt: (text, position) => at.get(`${text},${position}`) };
}
