// Numbers and sentences of the current choices, out of the page's arrays (attnmech/draw/chart.py).

/** A head's probabilities times the norm of what each key would write, as shares of their rows. */
function weightedBy(norms, block) {
  const pattern = patterns.of(Math.floor(block / heads), block % heads);
  return normalised(pattern, norms.of(block));
}

/** Rows times weights of their columns, divided by their sums; NaN counts as 0. */
function normalised(values, weights) {
  const products = Float32Array.from(values, (value, at) => value * (weights[at % weights.length] || 0));
  for (let row = 0; row < products.length; row += weights.length) {
    let total = 0;
    for (let at = row; at < row + weights.length; at += 1) total += products[at] || 0;
    if (total) for (let at = row; at < row + weights.length; at += 1) products[at] /= total;
  }
  return products;
}

/** Every array by its name, as something with `slice(start, count)`. */
async function unpackArrays(packed) {
  const opened = Object.entries(packed).map(async ([name, packing]) => {
    if (packing.texts) return [name, listed(await unpackTexts(packing.texts))];
    return [name, packing.plain ? listed(packing.plain.map((value) => value ?? NaN)) : await unpack(packing)];
  });
  return Object.fromEntries(await Promise.all(opened));
}

function listed(values) {
  return { slice: (start, count) => values.slice(start, start + count) };
}

/** The place of a head among those that the page holds in detail; -1 if it is none of them. @param {any} at */
const detailedAt = ({ layer, head }) => (page.detailed ?? []).indexOf(layer * heads + head);

/** Whether the page holds this column for the chosen head. */
const isHeld = ({ over }, at = state) => !over.includes("detailed") || detailedAt(at) >= 0;

/** The part of an array that the choices select, flat: its leading axes are choices, `shape` is the rest. @param {Column} column */
function chosen({ array, over, shape, fixed }, at = state) {
  const made = { ...at, ...fixed };
  const step = (name) => (name === "detailed" ? [page.detailed?.length ?? 0, detailedAt(made)] : [choices[name].length, made[name]]);
  const index = over.map(step).reduce((before, [count, place]) => before * count + place, 0);
  const count = shape.reduce((product, length) => product * length, 1);
  return Array.from(arrays[array].slice(index * count, count));
}

/** One column of a slot: numbers, perhaps weighted or reduced by others, or the texts that they index. */
function columnOf(column, less, kept, weights) {
  let values = chosen(column);
  if (weights) values = Array.from(normalised(values, chosen(weights)));
  if (less) {
    const subtracted = chosen(less);
    const run = values.length / subtracted.length;
    values = values.map((value, index) => value - subtracted[Math.floor(index / run)]);
  }
  if (kept) values = values.filter((_, index) => kept[index]);
  const { table, digits, shape } = column;
  if (table) values = values.map((value) => page.tables[table][value] ?? null);
  if (digits !== undefined) values = values.map((value) => signed(value, digits));
  if (shape.length === 0) return values[0];
  const width = shape.length === 2 ? shape[1] : 0;
  return width ? Array.from({ length: shape[0] }, (_, row) => values.slice(row * width, (row + 1) * width)) : values;
}

/** The values of a slot, as attnmech/draw/chart.py defines it. */
function inSlot({ columns, less, where, equals, weights }) {
  const kept = where && chosen(where).map((code) => (equals === null ? !Number.isNaN(code) : code === equals));
  const filledColumns = columns.map((column) => columnOf(column, less, kept, weights));
  if (filledColumns.length === 1) return filledColumns[0];
  return filledColumns[0].map((_, row) => filledColumns.map((values) => values[row]));
}

/** A figure with its slots filled for the current choices; a hidden trace stays empty. */
function filled({ figure, slots }) {
  const copy = structuredClone(figure);
  const fill = (slot) => {
    const last = slot.path.at(-1);
    slot.path.slice(0, -1).reduce((place, step) => (place[step] ??= {}), copy)[last] = inSlot(slot);
  };
  const isSwitch = ({ path: [, , property] }) => property === "visible";
  slots.filter(isSwitch).forEach(fill);
  const isHidden = ({ path: [root, at] }) => root === "data" && copy.data[at].visible === false;
  slots.filter((slot) => !isSwitch(slot) && !isHidden(slot)).forEach(fill);
  return copy;
}

const textOf = (id, at = state) => (isHeld(page.texts[id], at) ? chosen(page.texts[id], at)[0] : "");

function weightsOf(query) {
  return shown.of(state.layer, state.head).subarray(query * keys.length, (query + 1) * keys.length);
}
