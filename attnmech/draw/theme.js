// The button that goes through the themes; what draws by itself watches `data-theme` of the document.
const themes = ["system", "light", "dark"];

const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
button.addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  button.textContent = `Theme: ${root.dataset.theme}`;
});
