"use strict";

// Unpacks each script of a page or a notebook once, and shows the views that need it.

(() => {
  if (window.attnmech) return;
  const LATE = 4000; // milliseconds until a view says what it waits for
  const PAPER = "560px"; // the width of an output on a page of A4, beside the numbers of a notebook's cells
  const arriving = new Map();

  async function waitFor(find, late) {
    for (let began = performance.now(), reported = false; ; ) {
      const value = find();
      if (value) return value;
      if (!reported && performance.now() - began > LATE) {
        reported = true;
        late();
      }
      await new Promise((proceed) => setTimeout(proceed, 30));
    }
  }

  async function unzip(base64) {
    const text = atob(base64);
    const packed = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index += 1) packed[index] = text.charCodeAt(index);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  /** The element that carries a script, or links to it; while the document loads, it may hold only the beginning. */
  function carrierOf(name) {
    const carrier = document.querySelector(`[data-attnmech="${name}"]`);
    return carrier && (carrier.nextSibling || document.readyState !== "loading") ? carrier : null;
  }

  async function run(name, late) {
    const carrier = await waitFor(() => carrierOf(name), late);
    const script = document.createElement("script");
    if (!carrier.href) {
      script.textContent = new TextDecoder().decode(await unzip(carrier.textContent));
      document.head.append(script);
      return;
    }
    Object.assign(script, { src: carrier.href, integrity: carrier.integrity });
    await new Promise((resolve, reject) => {
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error("the server does not answer")));
      document.head.append(script);
    });
  }

  /** Resolves once the script of this name has run; it runs once, whoever asks. */
  function script(name, late = () => {}) {
    if (!arriving.has(name)) arriving.set(name, run(name, late));
    return arriving.get(name);
  }

  /** On paper nothing scrolls: a view shows all that it has while the page is printed. */
  function printWithPage(stage) {
    const isOurs = "attnmechPage" in document.documentElement.dataset;
    const setPrinting = (now) => {
      if (isOurs) document.documentElement.classList.toggle("printing", now); // page.css
      else stage.style.maxWidth = now ? PAPER : "";
      stage.control.print(now);
    };
    addEventListener("beforeprint", () => setPrinting(true));
    addEventListener("afterprint", () => setPrinting(false));
    matchMedia("print").addEventListener("change", ({ matches }) => setPrinting(matches));
  }

  /** Draws what `${id}-data` holds into the element `id`, once its scripts are there. */
  async function show(id, kind, scripts) {
    const stage = await waitFor(() => document.getElementById(id), () => {});
    if (stage.dataset.shown) return;
    stage.dataset.shown = "yes";
    const say = (text) => (stage.textContent = text);
    try {
      const late = () =>
        say("This view needs a script from another cell of the notebook: run all cells again.");
      for (const name of scripts) await script(name, late);
      const data = JSON.parse(document.getElementById(`${id}-data`)?.textContent ?? "null");
      stage.textContent = "";
      stage.control = await window.attnmech.views[kind](stage, data);
      if (stage.control?.print) printWithPage(stage);
    } catch (error) {
      say(`This view could not be drawn: ${error instanceof Error ? error.message : error}`);
      console.error(error);
    }
  }

  window.attnmech = /** @type {Attnmech} */ ({ unzip, script, show, views: {} }); // shared.js and the views add theirs
})();
