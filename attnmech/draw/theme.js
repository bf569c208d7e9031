// The button that goes through the themes; what draws by itself watches `data-theme` of the document.
const themes = ["system", "light", "dark"];

document.getElementById("theme").addEventListener("click", ({ target }) => {
  const root = document.documentElement;
  root.dataset.theme = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  target.textContent = `Theme: ${root.dataset.theme}`;
});
