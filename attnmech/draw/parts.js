// Puts the chosen text's and stack's part of a page into the document before any other script reads it. Choosing another
// reloads the page with the choice in its address; another text keeps the head, the tab and the colours.

const partTemplates = /** @type {HTMLTemplateElement[]} */ ([...document.querySelectorAll("template[data-stack]")]);
const inAddress = () => new URLSearchParams(location.hash.slice(1));

/** The template that the address asks for; a name that no template has counts as not asked for. */
function partAskedFor() {
  const asked = inAddress();
  return ["text", "stack"].reduce((among, name) => {
    const having = among.filter(({ dataset }) => dataset[name] === asked.get(name));
    return having.length ? having : among;
  }, partTemplates)[0];
}

const partShown = partAskedFor();
const livePart = document.getElementById("live-data");
if (livePart) livePart.after(partShown.content.cloneNode(true));
else document.body.prepend(partShown.content.cloneNode(true));

for (const select of /** @type {NodeListOf<HTMLSelectElement>} */ (document.querySelectorAll("select[data-part]"))) {
  select.addEventListener("change", () => {
    const parameters = inAddress();
    for (const name of [...parameters.keys()]) {
      const isOther = select.id === "text" ? name === "query" : name !== "text"; // another stack has other heads
      if (isOther) parameters.delete(name);
    }
    parameters.set(select.id, select.value);
    location.hash = parameters.toString();
  });
}

addEventListener("hashchange", (event) => {
  if (partAskedFor() === partShown) return;
  event.stopImmediatePropagation(); // the address may refer to another stack's heads or another text's tokens
  location.reload();
});
