// The tokens of a page, shaded by the weights of the chosen query.

/** Writes a token on its chip; a patch's chip is small, without text, since a picture has hundreds. */
function label(chip, token) {
  if (/^<(img|video) \d.*>$/.test(token)) {
    chip.classList.add("patch");
    chip.ariaLabel = token;
  } else chip.textContent = token;
}

const chips = tokens.map((token, position) => {
  const chip = document.createElement("button");
  chip.type = "button";
  chip.className = "token";
  label(chip, token);
  chip.classList.toggle("written", position >= tokens.length - page.written);
  chip.addEventListener("click", () => choose({ query: position }));
  chip.addEventListener("pointerenter", () => shadeTokens(position));
  return chip;
});

/** The keys: the same tokens or, in cross-attention, those of the other text, which cannot be queries. */
const keyChips = !page.keys ? chips : keys.map((token) => {
  const chip = document.createElement("span");
  chip.className = "token";
  label(chip, token);
  return chip;
});

/** The mark of a key; in cross-attention, no key is the query itself. */
function markOf(key, query) {
  if (key === query && keys === tokens) return "self";
  if (key === 0) return "first";
  return keys !== tokens && key === keys.length - 1 ? "last" : undefined;
}

function shadeTokens(query) {
  const weights = weightsOf(query);
  keyChips.forEach((chip, key) => {
    const mark = markOf(key, query);
    if (mark) Object.assign(chip.dataset, { mark, sign: marks[mark] });
    else for (const name of ["mark", "sign"]) delete chip.dataset[name];
    chip.style.setProperty("--depth", String(Math.sqrt(weights[key]))); // the root keeps small weights visible
    chip.title = `${chip.ariaLabel ?? `${page.nouns.key} ${key}`}: ${words.whole} ${percent(weights[key])}`;
  });
  chips.forEach((chip, position) => {
    chip.setAttribute("aria-pressed", String(position === state.query));
    chip.tabIndex = position === state.query ? 0 : -1;
  });
  for (const id of ofQuery) if (id in page.texts) element(id).textContent = textOf(id, { ...state, query });
}

const tokenSteps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

function moveAlongTokens(event) {
  if (!(event.key in tokenSteps)) return;
  event.preventDefault();
  choose({ query: state.query + tokenSteps[event.key] });
  chips[state.query].focus();
}
