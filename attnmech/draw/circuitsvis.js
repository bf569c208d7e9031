// A view of CircuitsVis, on paper of its own: its colours are made for white.

let mounted = 0;

views.circuitsvis = (stage, { element, props }) => {
  suitBackground(stage);
  mounted += 1;
  const id = `attnmech-circuitsvis-${mounted}`;
  stage.append(make("div", { className: `attnmech-paper attnmech-${element}`, id }));
  CircuitsVis.render(id, CircuitsVis[element], props);
};
