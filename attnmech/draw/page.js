// The page on screen and on paper, and its start; the other parts of the script precede this one (scripts.PAGE).

// ---- screen and paper -------------------------------------------------------------------------------------------

/** Only the width matters to the figures; scrolling on a phone changes the window's height all the time. */
function fitWindow() {
  if (innerWidth !== drawnFor) show();
}

/**
 * Figures have a width in pixels, so all are redrawn for the paper's width. Views that were never scrolled into view
 * begin here: they await only resolved promises, which settle before the page is laid out.
 */
function setPrinting(now) {
  if (now === printing) return;
  printing = now;
  document.documentElement.classList.toggle("printing", printing);
  everywhere = true;
  show();
  everywhere = printing;
  for (const id of viewIds) begin(id).then(() => element(id).control?.print?.(printing));
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) onScreen.add(target.id);
    else onScreen.delete(target.id);
  }
  if (lastStep.what === "tab") drawFigures();
});

/** Scrolls to the section of a link in the contents; the address keeps the choices. */
function goToSection(event) {
  const name = event.target.closest("a")?.dataset.section;
  if (!name) return;
  event.preventDefault();
  chooseTab(element(`${name}-section`).dataset.tabs);
  element(`${name}-section`).scrollIntoView();
}

// ---- start ------------------------------------------------------------------------------------------------------

for (const [name, value] of Object.entries(page.start)) state[name] = choices[name].indexOf(value);
await attnmech.script(page.scripts.heads);
const headMap = await attnmech.views.heads(element("head-map"), { layers: choices.layer, heads, ...page.heads });
element("head-map").addEventListener("attnmech-choose", ({ detail }) => choose(detail));
for (const select of selectors) {
  select.addEventListener("change", () => choose({ [select.id]: select.selectedIndex }));
}
for (const button of allOf("[data-control]")) {
  const { control = "", step } = button.dataset;
  button.addEventListener("click", () => choose({ [control]: state[control] + Number(step) }));
}
element("tokens")?.append(...chips);
if (page.keys) element("key-tokens").append(...keyChips);
element("tokens")?.addEventListener("keydown", moveAlongTokens);
element("tokens")?.addEventListener("pointerleave", () => shadeTokens(state.query));
new MutationObserver(() => show()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
addEventListener("hashchange", chooseFromAddress);
addEventListener("resize", fitWindow);
for (const motion of ["scroll", "wheel"]) addEventListener(motion, moved, { passive: true, capture: true }); // also in boxes
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));
element("contents").addEventListener("click", goToSection);
for (const tab of tabs) tab.addEventListener("click", () => chooseTab(tab.dataset.chooseTab));
element("tabs").addEventListener("keydown", moveAlongTabs);
element("copy-link").addEventListener("click", ({ target }) => copy(target, location.href));
for (const code of allOf("[data-call]")) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "copy", textContent: "Copy Python" });
  button.addEventListener("click", () => copy(button, code.textContent ?? ""));
  code.after(button);
}
for (const figure of allOf(".figure")) {
  const chart = page.figures[figure.id]?.figure;
  figure.style.minHeight = `${chart ? heightOf(chart, figure.clientWidth) : 300}px`;
  watcher.observe(figure);
}
chooseFromAddress();
await new Promise((proceed) => setTimeout(proceed)); // text and controls appear before plotly loads
if (page.scripts.plotly) await attnmech.script(page.scripts.plotly);
for (const id of Object.keys(page.others)) await begin(id); // CircuitsVis draws asynchronously, too late for printing
for (const id of onScreen) await (id in page.figures ? draw(id) : begin(id));
document.documentElement.dataset.ready = "yes";
dispatchEvent(new Event("attnmech-ready"));
drawAhead();
