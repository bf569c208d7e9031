// What the reader chooses: shown everywhere, kept in the address, and undone by Back.

/** Sets indices into `choices`, clamped to their range, shows the result and lets Back undo it. */
function choose(changes) {
  for (const [name, index] of Object.entries(changes)) {
    if (!(name in choices)) continue; // such as the query of a view on a page about a corpus
    state[name] = Math.min(Math.max(index, 0), choices[name].length - 1);
    queryChosen ||= name === "query";
  }
  moved();
  show(changes);
  const step = { what: Object.keys(changes).join(), at: performance.now() };
  const same = step.what === lastStep.what && step.at - lastStep.at < ONE_STEP;
  lastStep = step;
  if (address().href !== location.href) remember(same ? "replaceState" : "pushState");
}

function remember(how) {
  history[how]({ queryChosen }, "", address());
  dispatchEvent(new Event("attnmech-address")); // for live.js
}

/** The headline of the chosen head, with the meanings of terms; it keeps its height, so that nothing below it moves. */
function showHeadline() {
  const [headline, sentence] = [element("headline"), textOf("headline")];
  if (headline.textContent === sentence) return;
  headline.style.minHeight = innerWidth === drawnFor ? `${headline.offsetHeight}px` : "";
  headline.replaceChildren(...sentence.split(anyTerm).map((part) => terms.get(part)?.cloneNode(true) ?? part));
}

function show(changes) {
  if ("headline" in page.texts) showHeadline();
  drawnFor = innerWidth;
  Object.assign(words, page.words[isWeighted() ? 1 : 0]);
  for (const select of selectors) select.selectedIndex = state[select.id];
  showTab();
  for (const name of allOf("#head-name, .head-name")) name.textContent = chosenHead();
  headMap?.choose(choiceForHeads());
  if (tokens.length) shadeTokens(state.query);
  drawFigures();
  for (const id of Object.keys(page.texts)) if (!textsApart.has(id)) element(id).textContent = textOf(id);
  for (const id of viewIds) chooseIn(id, changes);
  for (const code of allOf("[data-call]")) {
    code.textContent = withChoices(withChoices(String(code.dataset.call))); // the value of a choice may be a call with other choices
  }
}

/** Shows the sections of the chosen tab and the choices that they follow; on paper, all of them. */
function showTab() {
  const tab = chosenValue("tab");
  const isWhole = tab === "all";
  for (const part of allOf("[data-tabs]")) part.hidden = !isWhole && !part.dataset.tabs?.split(" ").includes(tab);
  for (const part of allOf("section[data-tabs]")) part.classList.toggle("not-held", !figuresIn(part).every(isDrawable));
  for (const button of tabs) {
    const isChosen = button.dataset.chooseTab === tab;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
  }
}

const figuresIn = (section) => [...section.querySelectorAll(".figure")].map(({ id }) => id);

/** The choices that the map of heads follows, with numbers by their names. */
function choiceForHeads() {
  const { layer, head } = state;
  return { layer, head, ...Object.fromEntries(["colour", "across", "up"].map((name) => [name, chosenValue(name)])) };
}

const chooseTab = (tab) => choose({ tab: choices.tab.indexOf(tab) });

function moveAlongTabs({ key, target }) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  const next = step && tabs[tabs.indexOf(target) + step];
  if (!next) return;
  chooseTab(next.dataset.chooseTab);
  next.focus();
}

/** Puts a text on the clipboard, and says so on the button. */
async function copy(button, text) {
  const before = button.textContent;
  const copied = navigator.clipboard ? await navigator.clipboard.writeText(text).then(() => true, () => false) : false;
  button.textContent = copied ? "Copied" : "Select the text and copy it";
  setTimeout(() => (button.textContent = before), 1500);
}

function withChoices(call) {
  return call.replace(/\{(\w+)\}/g, (all, name) => (names.includes(name) ? inCall(name) : all));
}

function address() {
  const parameters = names.filter((name) => !optional.has(name) || state[name]).map((name) => [name, chosenValue(name)]);
  parameters.unshift(...Object.entries(page.part ?? {}));
  parameters.push(...[...new URLSearchParams(location.hash.slice(1))].filter(([name]) => ofViews.has(name)));
  return new URL(`#${new URLSearchParams(parameters)}`, location.href); // inside a frame, "#…" alone is refused
}

/** Takes the choices from the address, also after Back; choices that it lacks stay. */
function chooseFromAddress() {
  const named = {};
  const unknown = [];
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const index = Object.hasOwn(choices, name) ? choices[name].map(String).indexOf(value) : -1;
    if (index >= 0) named[name] = index;
    else if (!ofViews.has(name) && String(page.part?.[name]) !== value) unknown.push(`${name} ${value}`);
  }
  element("unknown").textContent = unknown.length ? `This page has no ${unknown.join(", no ")}; it shows the next best.` : "";
  for (const name of optional) state[name] = 0;
  Object.assign(state, named);
  queryChosen = history.state?.queryChosen ?? "query" in named;
  show(tokens.length ? { query: state.query } : {});
  lastStep = { what: "", at: -Infinity };
  remember("replaceState");
}
