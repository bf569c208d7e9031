// Views of attention, and other views, which follow the page's choices and make some.

/** The choices for the views of attention, which show all rows until the reader selects one. */
function choiceForViews(changes) {
  const { layer, head, query } = state;
  if (changes && !("query" in changes)) return { layer, head };
  return { layer, head, query: queryChosen ? query : null };
}

/** The layers that a view shows. */
const layersOf = (id) => page.others[id]?.data.layers ?? choices.layer;

/** Makes the choice in a view, unless the view lacks the chosen layer. */
function chooseIn(id, changes) {
  const layer = layersOf(id).indexOf(chosenValue("layer"));
  return layer < 0 ? undefined : element(id).control?.choose?.({ ...choiceForViews(changes), layer });
}

/** Follows the choices that the reader makes in a view. */
function follow(id) {
  element(id).addEventListener("attnmech-choose", ({ detail }) => {
    const { layer } = detail;
    choose(layer === undefined ? detail : { ...detail, layer: choices.layer.indexOf(layersOf(id)[layer]) });
  });
}

/** Draws a view, once. */
function begin(id) {
  if (!begun.has(id)) begun.set(id, id in page.views ? drawPattern(id) : drawOther(id));
  return begun.get(id);
}

function stageOf(id) {
  element(id).classList.add("attnmech");
  element(id).style.minHeight = "";
  return element(id);
}

async function drawOther(id) {
  const { kind, data, scripts } = page.others[id];
  const stage = stageOf(id);
  for (const name of scripts) await attnmech.script(page.scripts[name]);
  stage.control = await attnmech.views[kind](stage, data);
  follow(id);
  return chooseIn(id);
}

async function drawPattern(id) {
  const stage = stageOf(id);
  const { layer, head } = state;
  const axes = { layers: choices.layer, heads, words, nouns: page.nouns, queries: tokens, keys, first: choices.query[0], special: page.special };
  const options = { chosen: { layer, head }, embedded: true, overview: true, threshold: 0.1, across: keys !== tokens };
  const viewData = { ...axes, ...options, remarks: page.remarks[id], pattern: shown, rest };
  stage.control = await attnmech.views[page.views[id]](stage, viewData);
  chooseIn(id);
  follow(id);
}
