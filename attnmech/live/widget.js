// The page in a notebook's cell: a frame holds it, and what it asks goes to the kernel and comes back.

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "attnmech explorer";
  frame.style.cssText = "width:100%;height:85vh;border:0";
  let fresh = true; // a new page shows what Python has chosen, if it has
  const show = () => {
    fresh = true;
    frame.srcdoc = model.get("_page");
  };
  const toPage = (message) => frame.contentWindow?.postMessage(message, "*");
  const traits = ["selected", "query", "edit"];
  const choose = () => toPage({ attnmech: "choose", ...Object.fromEntries(traits.map((name) => [name, model.get(name)])) });
  const answer = ({ number, content }) => toPage({ attnmech: "answer", number, content });

  function hear({ source, data }) {
    if (source !== frame.contentWindow) return;
    if (data?.attnmech === "ask") model.send({ number: data.number, kind: data.kind, body: data.body });
    if (data?.attnmech === "state") {
      const chosen = (value) => fresh && value !== null && value.length !== 0;
      for (const name of traits) if (!chosen(model.get(name))) model.set(name, data[name]);
      model.set("_address", data.address);
      model.save_changes();
      if (fresh) choose();
      fresh = false;
    }
  }

  addEventListener("message", hear);
  model.on("msg:custom", answer);
  model.on("change:_page", show);
  for (const name of traits) model.on(`change:${name}`, choose);
  el.append(frame);
  show();
  return () => {
    removeEventListener("message", hear);
    model.off("msg:custom", answer);
    model.off("change:_page", show);
    for (const name of traits) model.off(`change:${name}`, choose);
  };
}

export default { render };
