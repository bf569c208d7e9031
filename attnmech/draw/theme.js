// The button that cycles through the themes; figures watch the document's `data-theme`.
const themes = ["system", "light", "dark"];

const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
button.addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  button.textContent = `Theme: ${root.dataset.theme}`;
});
