// The edit in a page's address: edit=L2H6-zero.L3H1-first, prompt=… and at=… for patches.

const WAYS = { zero: "zero", mean: "mean", first: "first token", patch: "patch" };

/**
 * The edit that an address asks for; what it cannot mean is left out.
 *
 * @param {string} hash
 * @returns {LiveEdit}
 */
function editOf(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const named = (asked.get("edit") ?? "").split(".").map((part) => /^L(\d+)H(\d+)-([a-z]+)$/.exec(part));
  /** @type {[number, number, string][]} */
  const heads = named.flatMap((part) => (part && Object.hasOwn(WAYS, part[3]) ? [[Number(part[1]), Number(part[2]), part[3]]] : []));
  const at = asked.get("at");
  return { heads, prompt: asked.get("prompt") ?? "", position: at === null || at === "" ? null : Number(at) };
}

/** The address with this edit. @param {string} hash @param {LiveEdit} edit */
function withEdit(hash, { heads, prompt, position }) {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const patches = heads.some(([, , way]) => way === "patch");
  const set = (name, value) => (value === "" ? parameters.delete(name) : parameters.set(name, String(value)));
  set("edit", heads.map(([layer, head, way]) => `L${layer}H${head}-${way}`).join("."));
  set("prompt", patches ? prompt : "");
  set("at", patches ? (position ?? "") : "");
  return String(parameters);
}

/** The heads after one is edited in a way, or left alone if it already is. @param {LiveEdit["heads"]} heads */
function withHead(heads, layer, head, way) {
  const others = heads.filter(([ofLayer, number]) => ofLayer !== layer || number !== head);
  const isSame = heads.some(([...one]) => one.join() === [layer, head, way].join());
  return isSame ? others : [...others, [layer, head, way]];
}

/** The choices that another text keeps: all but the row. @param {string} hash */
function forOtherText(hash) {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  for (const name of ["query", "at", "text"]) parameters.delete(name);
  return String(parameters);
}
