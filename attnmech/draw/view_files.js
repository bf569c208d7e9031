"use strict";

// Prepares a view for a file: everything that it shows, without hints on the pointer, and no wider than the paper.

(() => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const zoomOf = (main) => Number(getComputedStyle(main).zoom);

  /** Widens a view that would scroll, and zooms it out by the same factor. */
  function widen(main) {
    const inner = [...main.querySelectorAll(".attnmech, .attnmech *")].filter(({ clientWidth }) => clientWidth);
    const beyond = Math.max(0, ...inner.map(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth));
    if (beyond < 2) return;
    const { clientWidth } = main;
    const zoom = (zoomOf(main) * clientWidth) / (clientWidth + beyond);
    Object.assign(main.style, { width: `${clientWidth + beyond}px`, zoom });
  }

  /** Replaces canvases by pictures: Chromium prints a zoomed canvas at another scale. */
  async function drawOff(main) {
    for (const canvas of main.querySelectorAll("canvas")) {
      if (!canvas.width || !canvas.height) continue;
      const picture = document.createElement("img");
      picture.src = canvas.toDataURL();
      const { position, left, top, width, height, display, margin, outline, gridArea, verticalAlign } = getComputedStyle(canvas);
      const style = { position, left, top, width, height, display, margin, outline, gridArea, verticalAlign };
      Object.assign(picture.style, style);
      canvas.replaceWith(picture);
      await picture.decode();
    }
  }

  /** Resolves to the view's height; `most`, if not null, is its limit. */
  window.attnmechFit = async (most) => {
    const main = /** @type {HTMLElement} */ (document.querySelector("main"));
    await frame(); // views redraw in full when they are printed
    await frame();
    for (const heading of main.querySelectorAll(".attnmech-paper :is(h2, h3)")) {
      if (heading.textContent.includes("hover")) heading.remove();
    }
    widen(main);
    await drawOff(main);
    const { height } = main.getBoundingClientRect();
    if (most === null || height <= most) return height;
    Object.assign(main.style, { zoom: (zoomOf(main) * most * 0.995) / height, margin: "0 auto" });
    return most;
  };
})();
