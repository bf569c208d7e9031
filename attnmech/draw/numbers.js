// Numbers as Python packed them (attnmech/draw/packing.py), and as texts; nothing here touches the page.

function range(length) {
  return Array.from({ length }, (_, index) => index);
}

const NO_VALUE = 65535;

/**
 * Packed numbers, unzipped: `slice(start, count)` gives some of them as a Float32Array, NaN where there is none.
 *
 * @type {Shared["unpack"]}
 */
async function unpack({ low, step, codes, scale }) {
  const narrow = scale === "root";
  const numbers = narrow ? await window.attnmech.unzip(codes) : await codesOf(codes);
  const size = numbers.length / low.length;
  const meaning = { logarithm: Math.exp, root: (value) => value * value, plain: (value) => value }[scale ?? "plain"];

  function slice(start, count) {
    const values = new Float32Array(count);
    for (let index = 0, at = start; index < count; index += 1, at += 1) {
      const block = Math.floor(at / size);
      values[index] = !narrow && numbers[at] === NO_VALUE ? NaN : meaning(low[block] + step[block] * numbers[at]);
    }
    return values;
  }
  return { slice, of: (block) => slice(block * size, size) };
}

/** The 16-bit codes; all high bytes come first. @param {string} packed */
async function codesOf(packed) {
  const bytes = await window.attnmech.unzip(packed);
  const codes = new Uint16Array(bytes.length / 2);
  for (let index = 0; index < codes.length; index += 1) codes[index] = (bytes[index] << 8) | bytes[index + codes.length];
  return codes;
}

/** A compressed list of texts. @type {Shared["unpackTexts"]} */
async function unpackTexts(codes) {
  return JSON.parse(new TextDecoder().decode(await window.attnmech.unzip(codes)));
}

/** Probabilities by layer and head, with 0 where there is none. @type {Shared["patternsOf"]} */
function patternsOf(values, heads) {
  /** @type {Map<number, Float32Array>} */
  const kept = new Map();
  return {
    of(layer, head) {
      const block = layer * heads + head;
      const unpacked = kept.get(block);
      if (unpacked) return unpacked;
      const pattern = values.of(block);
      for (let index = 0; index < pattern.length; index += 1) if (Number.isNaN(pattern[index])) pattern[index] = 0;
      for (const oldest of kept.keys()) if (kept.size >= 32) kept.delete(oldest); // a screen's worth stays unpacked
      kept.set(block, pattern);
      return pattern;
    },
  };
}

/**
 * Probabilities as a report gives them, or as Python packed them.
 *
 * @type {(patterns: Packed | Patterns, heads: number) => Promise<Patterns>}
 */
const patternsIn = async (patterns, heads) => ("of" in patterns ? patterns : patternsOf(await unpack(patterns), heads));

/** A number with its sign, below 0 with the sign for minus. @type {Shared["signed"]} */
const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

/** @type {Shared["percent"]} */
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.001 ? 3 : 1)}\u00a0%`;

/** @type {(one: {weight: number}, other: {weight: number}) => number} */
const heaviestFirst = (one, other) => other.weight - one.weight;
