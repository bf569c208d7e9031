// The points of joint embeddings (attnmech/methods/joint_embedding/page.py): unpacking, finding at the pointer, search.

const HALF_RANGE = 32767; // codes go from 0 to twice this

/** The tokens that all heads share. @param {EmbeddingData} data @returns {Promise<EmbeddingTokens>} */
async function embeddingTokens({ tokens: count, labels, characters, text, position, lengths, classes, class: kind, special, images }) {
  const [names, written] = await Promise.all([labels, characters].map(unpackTexts));
  const columns = await Promise.all([text, position, kind].map(unpack));
  const [ofText, ofPosition, ofClass] = columns.map((column) => column.of(0));
  const shown = images && {
    ...images,
    place: (await unpack(images.place)).of(0),
    colours: (await unpack(images.colours)).of(0),
  };
  return {
    count, labels: names, characters: written, text: ofText, position: ofPosition, class: ofClass, classes, lengths,
    special: new Set(special), texts: new Set(ofText).size, images: shown,
  };
}

/** Clouds by projection, unpacked at their first use. @param {EmbeddingData} data */
function embeddingClouds({ projections }) {
  /** @type {Map<string, Promise<Cloud>>} */
  const made = new Map();
  async function unpacked(name) {
    const { label, dims, points, spread } = projections[name];
    return { label, dims, codes: await codesOf(points.codes), step: points.step, spread };
  }
  return (name) => {
    if (!made.has(name)) made.set(name, unpacked(name));
    return /** @type {Promise<Cloud>} */ (made.get(name));
  };
}

/** A fixed order of the tokens in which every beginning is a fair sample. */
function mixed(count) {
  const order = range(count);
  for (let at = count - 1, seed = 1; at > 0; at -= 1) {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    const other = seed % (at + 1);
    [order[at], order[other]] = [order[other], order[at]];
  }
  return order;
}

/** The point's coordinates from -1 to 1, turned by `turn` in three dimensions; written to `out`. */
function coordinates({ codes, dims }, first, point, turn, out) {
  const at = (first + point) * dims;
  const x = codes[at] / HALF_RANGE - 1;
  const y = codes[at + 1] / HALF_RANGE - 1;
  if (!turn || dims < 3) {
    out[0] = x;
    out[1] = y;
    out[2] = 0;
    return;
  }
  const z = codes[at + 2] / HALF_RANGE - 1;
  const side = x * turn.cosYaw + z * turn.sinYaw;
  const depth = z * turn.cosYaw - x * turn.sinYaw;
  out[0] = side;
  out[1] = y * turn.cosPitch - depth * turn.sinPitch;
  out[2] = y * turn.sinPitch + depth * turn.cosPitch;
}

// ---- search -----------------------------------------------------------------------------------------------------

const MOST_HITS_COMPARED = 300;

/**
 * The tokens whose characters contain or equal the search; null for an empty search. A search with an escape, such as
 * ⟨0000⟩ or \xff, is for labels; · is as in them a space, besides itself.
 * @param {EmbeddingTokens} tokens
 */
function hitsOf({ labels, characters }, search, whole) {
  if (!search.trim()) return null;
  const plain = search.normalize("NFC").toLowerCase();
  const ofLabels = /⟨|\\x/.test(plain);
  const wanted = ofLabels ? [plain.replaceAll(" ", "·")] : [plain, plain.replaceAll("·", " ")];
  const same = whole
    ? (text) => wanted.some((one) => text === one || text === `${ofLabels ? "·" : " "}${one}`)
    : (text) => wanted.some((one) => text.includes(one));
  /** @type {Map<string, boolean>} */
  const known = new Map();
  const texts = ofLabels ? labels : characters;
  return range(texts.length).filter((index) => {
    const text = texts[index];
    if (!known.has(text)) known.set(text, same(text.toLowerCase()));
    return known.get(text);
  });
}

/** An evenly chosen part of an array. */
function sampled(all, most) {
  const count = Math.min(all.length, most);
  return range(count).map((index) => all[Math.floor((index * all.length) / count)]);
}

/**
 * How closely the hits lie together in each head: the mean distance between two hits divided by the mean distance
 * between two points of the same kind, averaged over queries and keys. NaN for fewer than two hits.
 *
 * @param {Cloud} cloud
 */
function spreadOfHits({ codes, dims, step, spread }, hits, count) {
  const some = sampled(hits, MOST_HITS_COMPARED);
  const pairs = (some.length * (some.length - 1)) / 2;
  const taken = new Float64Array(3 * some.length); // the third axis stays 0 in a plane
  function meanDistance(first) {
    some.forEach((token, index) => {
      for (let axis = 0; axis < dims; axis += 1) taken[3 * index + axis] = codes[(first + token) * dims + axis];
    });
    let sum = 0;
    for (let one = 0; one < taken.length; one += 3) {
      for (let other = one + 3; other < taken.length; other += 3) {
        const [x, y, z] = [taken[one] - taken[other], taken[one + 1] - taken[other + 1], taken[one + 2] - taken[other + 2]];
        sum += Math.sqrt(x * x + y * y + z * z);
      }
    }
    return sum / pairs;
  }
  return step.map((unit, block) => {
    if (!pairs) return Number.NaN;
    const [queries, keys] = [0, 1].map((kind) => (unit * meanDistance((2 * block + kind) * count)) / spread[block][kind]);
    return (queries + keys) / 2;
  });
}
