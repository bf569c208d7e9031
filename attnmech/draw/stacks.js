// Puts the selected stack's part of a page into the document before any other script reads it. Selecting another stack
// reloads the page, with the stack in its address.

const stackTemplates = /** @type {HTMLTemplateElement[]} */ ([...document.querySelectorAll("template[data-stack]")]);
const stackInAddress = () => new URLSearchParams(location.hash.slice(1)).get("stack");
const templateOf = (name) => stackTemplates.find(({ dataset }) => dataset.stack === name);
const stackShown = templateOf(stackInAddress()) ?? stackTemplates[0];
document.body.prepend(stackShown.content.cloneNode(true));

document.getElementById("stack")?.addEventListener("change", ({ target }) => {
  location.hash = new URLSearchParams({ stack: /** @type {HTMLSelectElement} */ (target).value }).toString();
});
addEventListener("hashchange", (event) => {
  const wanted = templateOf(stackInAddress());
  if (!wanted || wanted === stackShown) return;
  event.stopImmediatePropagation(); // the address refers to another stack's layers and heads
  location.reload();
});
