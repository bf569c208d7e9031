"use strict";
// The views of attnmech follow a theme that stands on the root element; furo writes it on the body.
addEventListener("DOMContentLoaded", () => {
  const tell = () => { document.documentElement.dataset.theme = document.body.dataset.theme ?? "auto"; };
  tell();
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-theme"] });
});
