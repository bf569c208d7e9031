// Tokens as buttons that a reader points at and pins.

/** A button for a token; its text is isolated for bidirectional layout. */
function tokenButton(token, index) {
  const text = make("bdi", { text: token });
  return make("button", { type: "button", title: token, "aria-pressed": "false" }, make("span", { text: index }), text);
}

/**
 * Lets token buttons be pointed at, focused and pinned. `sides` holds lists of them by name; a place is {side, index}.
 * `lines(place)` gives the lines of the box at the pointer, `show(place)` draws a place (null: everything), and
 * `pinned(place)` is called when the user pins or unpins by click or Enter. Arrow keys move along a side.
 *
 * @param {Stage} stage
 * @param {Record<string, HTMLButtonElement[]>} sides
 * @param {{lines(at: Place): string[], show(at: Place | null): void, pinned(at: Place | null): void}} listeners
 */
function tokenPicker(stage, sides, { lines, show, pinned }) {
  const box = pointerBox(stage);
  /** @type {Map<Element | null, Place>} */
  const places = new Map();
  /** @type {Record<string, HTMLButtonElement>} */
  const stops = {}; // the button of each side that Tab reaches
  let pin = /** @type {Place | null} */ (null);
  for (const [side, buttons] of Object.entries(sides)) {
    buttons.forEach((button, index) => {
      places.set(button, { side, index });
      button.tabIndex = -1;
    });
    stop(side, buttons[0]);
  }
  /** @type {(event: Event) => Place | undefined} */
  const placeOf = ({ target }) => places.get(/** @type {Element} */ (target).closest("button"));

  function stop(side, button) {
    if (stops[side]) stops[side].tabIndex = -1;
    stops[side] = button;
    button.tabIndex = 0;
  }

  function press(pressed) {
    if (pin) sides[pin.side][pin.index].setAttribute("aria-pressed", pressed);
  }

  function pinTo(place) {
    press("false");
    pin = place;
    press("true");
    show(pin);
  }

  function leave() {
    box.hide();
    show(pin);
  }

  stage.addEventListener("pointerover", (event) => {
    const place = placeOf(event);
    if (!place) return;
    show(place);
    box.show(event, lines(place));
  });
  stage.addEventListener("pointerout", (event) => placeOf(event) && leave());
  stage.addEventListener("focusin", (event) => {
    const place = placeOf(event);
    if (!place) return;
    const button = sides[place.side][place.index];
    stop(place.side, button);
    if (!button.matches(":focus-visible")) return;
    const { right, top } = button.getBoundingClientRect();
    show(place);
    box.show({ clientX: right, clientY: top }, lines(place));
  });
  stage.addEventListener("focusout", (event) => placeOf(event) && leave());
  stage.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (!place) return;
    pinTo(place === pin ? null : place);
    pinned(pin);
  });
  stage.addEventListener("keydown", (event) => {
    const place = placeOf(event);
    if (event.key === "Escape" && (place || pin)) {
      box.hide();
      pinTo(null);
      pinned(null);
    }
    if (!place) return;
    const { side, index } = place;
    const last = sides[side].length - 1;
    const goal = {
      ArrowUp: index - 1, ArrowLeft: index - 1, ArrowDown: index + 1, ArrowRight: index + 1, Home: 0, End: last,
    }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    sides[side][Math.max(0, Math.min(last, goal))].focus();
  });

  return {
    /** Pins a token without telling `pinned`; null unpins. */
    pin(side, index) {
      pinTo(index === null ? null : (places.get(sides[side][index]) ?? null));
    },
    get pinned() {
      return pin;
    },
    hideBox: box.hide,
  };
}
