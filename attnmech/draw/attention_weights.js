// Weights between tokens, without the keys that a reader hides; nothing here touches the page.

/**
 * The weights that a view draws, [query key] flat: those of one head or the mean of several, without hidden keys.
 *
 * @param {LinesData} data
 */
async function attentionWeights({ pattern, rest, heads, queries, keys, floor = 0 }) {
  const patterns = await patternsIn(pattern, heads);
  const unseen = rest && (await patternsIn(rest, heads));

  /**
   * Without the hidden keys. For probabilities this is the softmax over the other keys: a_j / (their sum + the share of
   * a sink), which stays accurate when one key has nearly all, unlike a_j / (1 − a_hidden). A row is NaN if its
   * remaining sum is at most `floor`: the stored precision then does not determine its weights.
   */
  function ofHead(layer, head, hidden) {
    const all = patterns.of(layer, head);
    if (!hidden.some(Boolean)) return all;
    const left = new Float32Array(all.length);
    const beside = unseen?.of(layer, head);
    for (let query = 0, row = 0; query < queries.length; query += 1, row += keys.length) {
      let total = beside ? beside[query] : 0;
      for (let key = 0; key < keys.length; key += 1) if (!hidden[key]) total += all[row + key];
      if (total <= floor) total = 0;
      for (let key = 0; key < keys.length; key += 1) left[row + key] = total ? (hidden[key] ? 0 : all[row + key]) / total : NaN;
    }
    return left;
  }

  /** The mean over some heads, each normalised first; a head counts in the rows where it has keys left. */
  function meanOf(layer, chosen, hidden) {
    const mean = new Float64Array(queries.length * keys.length);
    const counted = new Uint16Array(queries.length);
    for (const head of chosen) {
      const weights = ofHead(layer, head, hidden);
      for (let query = 0, row = 0; query < queries.length; query += 1, row += keys.length) {
        if (Number.isNaN(weights[row])) continue;
        counted[query] += 1;
        for (let at = row; at < row + keys.length; at += 1) mean[at] += weights[at];
      }
    }
    for (let at = 0; at < mean.length; at += 1) mean[at] /= counted[Math.floor(at / keys.length)];
    return mean;
  }

  /** The share of these heads' attention on the hidden keys, before hiding. */
  function ofHidden(layer, chosen, hidden) {
    let sum = 0;
    for (const head of chosen) {
      const all = patterns.of(layer, head);
      for (let at = 0; at < all.length; at += 1) if (hidden[at % keys.length]) sum += all[at];
    }
    return sum / (chosen.length * queries.length);
  }
  return { ofHead, meanOf, ofHidden };
}

/** Flat weights, [query key]. @type {(values: Float32Array | Float64Array, keys: number) => number[][]} */
const rowsOf = (values, keys) =>
  range(values.length / keys).map((query) => Array.from(values.subarray(query * keys, (query + 1) * keys)));
