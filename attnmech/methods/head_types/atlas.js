// The table of all heads, sorted by a column and filtered by type. Each head has its clearest example.

views.atlas = (stage, { columns, rows, types, letters }) => {
  suitBackground(stage);
  const state = { column: 2, falling: true, type: "" };
  const body = make("tbody");
  const counted = make("span", { className: "attnmech-atlas-count", "aria-live": "polite" });

  const badge = (name, quiet = false) => {
    const [letter, colour] = letters[name] ?? ["", "transparent"];
    const square = make("i", { style: `background: ${colour}`, text: letter });
    return make("span", { className: `attnmech-atlas-type ${quiet ? "attnmech-atlas-quiet" : ""}` }, square, ` ${name}`);
  };

  const token = (text, mark) => make(mark ?? "span", { className: "attnmech-atlas-token" }, make("bdi", { text }));

  function exampleOf({ before, around, key_at, weight, distance }) {
    const query = before.map((text, index) => token(text, index === before.length - 1 ? "u" : undefined));
    const key = around.map((text, index) => token(text, index === key_at ? "b" : undefined));
    const far = distance === 0 ? "itself" : `${Math.abs(distance)} ${distance > 0 ? "back" : "ahead"}`;
    return make("div", { className: "attnmech-atlas-example" }, ...query, ` → ${weight}, ${far}: `, ...key);
  }

  function lineOf(row) {
    const cells = row.cells.map((text, column) => {
      if (column !== 1) return make("td", { text, "data-label": columns[column] });
      const claimed = row.types.map((name) => badge(name));
      const nearest = row.nearest ? [badge(row.nearest, true)] : [];
      return make("td", { "data-label": columns[column] }, ...(claimed.length ? claimed : nearest));
    });
    const example = make("td", { "data-label": "example" }, ...(row.example ? [exampleOf(row.example)] : []));
    return make("tr", {}, ...cells, example);
  }

  /** Sorts numbers by size and types by name; missing numbers and heads without a claim come last. */
  function before(one, other) {
    const keyOf = (row) => (state.column === 1 ? row.types.join() || null : row.values[state.column]);
    const [left, right] = [keyOf(one), keyOf(other)];
    if (left === right) return one.values[0] - other.values[0];
    if (left === null) return 1;
    if (right === null) return -1;
    return left < right === state.falling ? 1 : -1;
  }

  const headings = columns.map((name, column) => {
    const sortable = column < columns.length - 1;
    const sort = () => {
      state.falling = state.column === column ? !state.falling : column > 1;
      state.column = column;
      draw();
    };
    const inside = sortable ? make("button", { type: "button", text: name, onclick: sort }) : name;
    return make("th", { scope: "col" }, inside);
  });

  function draw() {
    const shown = rows.filter((row) => !state.type || row.types.includes(state.type));
    body.replaceChildren(...[...shown].sort(before).map(lineOf));
    counted.textContent = `${shown.length} of ${rows.length} heads`;
    for (const [column, heading] of headings.entries()) {
      const order = column === state.column ? (state.falling ? "descending" : "ascending") : "none";
      heading.setAttribute("aria-sort", order);
    }
  }

  const filter = selector("Show", ["all heads", ...types], 0, (index) => {
    state.type = index ? types[index - 1] : "";
    draw();
  });
  const sorting = selector("sorted by", columns.slice(0, -1), state.column, (index) => {
    Object.assign(state, { column: index, falling: index > 1 });
    draw();
  });
  sorting.element.classList.add("attnmech-atlas-narrow");
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...headings)), body);
  stage.append(
    make("div", { className: "attnmech-controls" }, filter.element, sorting.element, counted),
    make("div", { className: "attnmech-atlas", tabindex: 0, role: "region", "aria-label": "all heads" }, table),
  );
  draw();
};
