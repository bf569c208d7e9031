// Tokens and weights in sentences; nothing here touches the page.

const MOST_LISTED_BELOW = 60;

const isolated = (text) => `\u2068${text}\u2069`; // a right-to-left token leaves its surroundings alone

/** A token in a sentence: its position, if that of the first is `first`, and its text. */
const named = (tokens, index, first = 0) => `${first + index} “${isolated(tokens[index])}”`;

const counting = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** "a, b and c"; `none` where there is nothing. */
function joined(parts, none = "") {
  return parts.length < 2 ? (parts[0] ?? none) : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}

/** Some tokens by name, many by their number: "key 0 “<s>”", "12 keys". */
function enumerated(indices, tokens, noun, first = 0) {
  if (indices.length > 3) return `${indices.length} ${noun === "query" ? "queries" : `${noun}s`}`;
  return joined(indices.map((index) => `${noun} ${named(tokens, index, first)}`));
}

/** "query 12 “anchor” gives", or "key 3 “old” receives". */
function subjectOf({ side, index }, { queries, keys, first = 0 }) {
  return side === "query" ? `query ${named(queries, index, first)} gives` : `key ${named(keys, index)} receives`;
}

/** What it gives or receives: "61 % to 3 “old”", or "61 % from query 12 “anchor”". */
function objectOf(side, { query, key, weight }, { queries, keys, first = 0 }) {
  return `${percent(weight)} ${side === "query" ? `to ${named(keys, key)}` : `from query ${named(queries, query, first)}`}`;
}

/** All weights drawn from a pinned query, including those to tokens out of view: "Query 12 “anchor”: 61 % to 3 “old”, …". */
function listedBelow(query, lines, described, { queries, first = 0 }) {
  const words = lines.slice(0, MOST_LISTED_BELOW).map(described);
  if (lines.length > words.length) words.push(`and ${counting(lines.length - words.length, "smaller weight")}`);
  return `Query ${named(queries, query, first)}: ${words.join(", ") || "no weight this large"}.`;
}

/** Sentences about the hidden keys, the weight that they had, and the queries without any remaining key. */
function omissions(hidden, blank, had, { queries, keys, words, first = 0 }) {
  const out = range(keys.length).filter((key) => hidden[key]);
  return (
    (out.length ? ` Hidden: ${enumerated(out, keys, "key")}, which had ${percent(had)} of the ${words.whole}.` : "") +
    (blank.length ? ` No key remains for ${enumerated(blank, queries, "query", first)}.` : "")
  );
}
