// The first page of a report asks in a frame what its own file holds now, and reloads once that is the whole page.

(() => {
  const ASKED = "?attnmech-asked";
  const EVERY = 3000; // milliseconds
  const TIMES = 400;
  const awaits = "awaits" in document.documentElement.dataset;
  if (location.search === ASKED) {
    window.stop(); // the answer needs no more of the page
    parent.postMessage({ attnmech: awaits ? "first" : "whole" }, "*");
    return;
  }
  if (!awaits || parent !== window) return;
  const frame = document.createElement("iframe");
  frame.hidden = true;
  let left = TIMES;
  const timer = setInterval(() => {
    frame.remove();
    if (!left--) return clearInterval(timer);
    frame.src = String(new URL(ASKED, location.href));
    document.documentElement.append(frame);
  }, EVERY);
  addEventListener("message", ({ source, data }) => {
    if (source === frame.contentWindow && data?.attnmech === "whole") location.reload();
  });
})();
