// A live page reads another text, and asks what the model writes without some heads. A saved page shows what was asked.
// The address holds the edit; page.js says when it changes. Tokens enter the page only through textContent.

/** @type {(id: string) => any} */
const place = (id) => document.getElementById(id);
/** @type {LiveData} */
const live = JSON.parse(place("live-data").textContent);
/** @type {{ tokens: string[], part?: Record<string, string | number> }} */
const { tokens, part } = JSON.parse(place("data").textContent);
const LATE = 5000; // milliseconds until the page says that no answer has come
const waiting = new Map(); // the notebook's answers, by number
let asked = 0;
let asking = new AbortController();
let shownFor = ""; // the edit that the result is about

const hash = () => location.hash;
const stackShown = () => String(part?.stack ?? "");
const chosenIn = (name) => Number(new URLSearchParams(hash().slice(1)).get(name));

// ---- questions ------------------------------------------------------------------------------------------------------

/** Asks the server or the notebook's kernel; an aborted question has no answer. */
async function ask(kind, body, signal) {
  if (live.through === "notebook") return askNotebook(kind, body, signal);
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(kind, { method: "POST", headers, body: JSON.stringify(body), signal });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function askNotebook(kind, body, signal) {
  asked += 1;
  const number = asked;
  parent.postMessage({ attnmech: "ask", number, kind, body }, "*");
  const late = setTimeout(() => say("The kernel has not answered yet: it is busy, or it has ended. The page still shows what it holds."), LATE);
  return new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason));
    waiting.set(number, ({ error, ...content }) => (error ? reject(new Error(error)) : resolve(content)));
  }).finally(() => {
    clearTimeout(late);
    waiting.delete(number);
  });
}

function say(text) {
  place("live-status").textContent = text;
}

// ---- texts ----------------------------------------------------------------------------------------------------------

/** Reads another text; the head, the tab and the edit stay. */
async function read(text) {
  say("Reading …");
  if (live.through === "notebook") {
    await ask("text", { text }).catch(({ message }) => say(message));
    return;
  }
  location.href = `?${new URLSearchParams({ text })}#${forOtherText(hash())}`;
}

async function save() {
  say("Saving …");
  try {
    const { html } = await ask("save", { text: live.text, start: hash().slice(1), edit: editOf(hash()).heads.length ? question() : null });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([html], { type: "text/html" }));
    link.download = "attnmech.html";
    link.click();
    say("");
  } catch (error) {
    say(messageOf(error));
  }
}

const capitalised = (message) => `${message.charAt(0).toUpperCase()}${message.slice(1)}`;
const messageOf = (error) => (error instanceof TypeError ? "The server does not answer." : capitalised(error.message));

/** Calls `then` once the first screen is drawn; background measurement would compete with the browser for cores. */
function whenDrawn(then) {
  const { ready } = document.documentElement.dataset;
  if (ready) then();
  else addEventListener("attnmech-ready", then, { once: true });
}

/** Follows what is still being measured, and shows the whole page when it is there. */
function follow() {
  const awaited = place("awaited");
  if (!awaited) return;
  if (live.through === "notebook") {
    const button = made("button", "Measure them now");
    button.addEventListener("click", () => ask("whole", {}).catch(({ message }) => say(message)));
    awaited.append(" ", button);
    return;
  }
  const sentence = awaited.textContent;
  const events = new EventSource(`events?${new URLSearchParams({ text: live.text })}`);
  events.addEventListener("message", ({ data }) => {
    const { step, whole, error } = JSON.parse(data);
    if (whole) location.reload();
    if (step) awaited.textContent = `${sentence} Now: ${step}.`;
    if (error) awaited.textContent = error;
    if (whole || error) events.close();
  });
}

// ---- edits ----------------------------------------------------------------------------------------------------------

const question = () => ({ ...editOf(hash()), text: live.text, stack: stackShown() });

/** Puts an edit into the address, from which it is shown. */
function setEdit(changes) {
  location.hash = withEdit(hash(), { ...editOf(hash()), ...changes });
}

function made(tag, text, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  if (tag === "button") element.type = "button";
  return element;
}

/** The edited heads, those that a click leaves alone again, and what a patch needs. */
function showHeads({ heads, prompt, position }) {
  place("edit-section").hidden = !heads.length;
  const chips = heads.map(([layer, head, way]) => {
    const chip = made("button", `L${layer}H${head} ${WAYS[way]} ×`);
    chip.title = `Leave L${layer}H${head} alone`;
    chip.addEventListener("click", () => setEdit({ heads: withHead(heads, layer, head, way) }));
    return chip;
  });
  place("edit-heads").replaceChildren(...chips);
  const [layer, head] = ["layer", "head"].map(chosenIn);
  for (const button of document.querySelectorAll("#edit-head button")) {
    const { way } = /** @type {HTMLElement} */ (button).dataset;
    button.setAttribute("aria-pressed", String(heads.some((one) => one.join() === [layer, head, way].join())));
  }
  place("edit-patch").hidden = !heads.some(([, , way]) => way === "patch");
  if (document.activeElement !== place("edit-prompt")) place("edit-prompt").value = prompt || live.text;
  place("edit-position").max = tokens.length - 1;
  place("edit-position").value = position ?? -1;
  sayPosition();
}

function sayPosition() {
  const position = Number(place("edit-position").value);
  place("edit-token").textContent = position < 0 ? "all tokens" : `${tokens[position]} (${position})`;
}

/** Shows the edit of the address: at once the heads, and what they change when the answer is there. */
async function showEdit() {
  const edit = editOf(hash());
  tell(edit);
  showHeads(edit);
  const key = JSON.stringify(edit);
  if (key === shownFor) return;
  shownFor = key;
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  if (!edit.heads.length) {
    place("edit-result").replaceChildren();
    return;
  }
  if (edit.heads.some(([, , way]) => way === "patch") && ["", live.text].includes(edit.prompt)) {
    place("edit-result").replaceChildren();
    place("edit-status").textContent = `Type another prompt with ${tokens.length} tokens, from which the heads are patched.`;
    return;
  }
  place("edit-result").classList.add("stale");
  place("edit-status").textContent = "Asking the model …";
  try {
    const block = await ask("edit", question(), signal);
    if (!signal.aborted) showResult(block);
    place("edit-status").textContent = "";
  } catch (error) {
    if (signal.aborted) return;
    place("edit-result").replaceChildren();
    place("edit-status").textContent = messageOf(error);
  }
  if (!signal.aborted) place("edit-result").classList.remove("stale");
}

/** The notebook's traits follow the page. */
function tell(edit) {
  if (live.through !== "notebook") return;
  const selected = [[chosenIn("layer"), chosenIn("head")]];
  parent.postMessage({ attnmech: "state", selected, query: chosenIn("query"), edit: edit.heads, address: hash().slice(1) }, "*");
}

/** Makes the choices that Python made. */
function obey({ selected: [selected], query, edit }) {
  const parameters = new URLSearchParams(hash().slice(1));
  if (selected) for (const [at, name] of ["layer", "head"].entries()) parameters.set(name, selected[at]);
  if (query !== null) parameters.set("query", query);
  const wanted = withEdit(String(parameters), { ...editOf(hash()), heads: edit });
  if (wanted !== hash().slice(1)) location.hash = wanted;
}

const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);

/** @param {LiveBlock} block */
function showResult(block) {
  const sentences = block.sentences.map((sentence) => made("p", sentence, "finding"));
  const python = document.createElement("details");
  python.append(made("summary", "Python for this edit"), made("pre", `${place("edit-section").dataset.setup}\n\n${block.python}`));
  place("edit-result").replaceChildren(...sentences, answersOf(block), nextOf(block), ...lossesOf(block), python);
}

/** Both answers, alike up to the token where they part. */
function answersOf({ answers, parting }) {
  const list = document.createElement("dl");
  list.className = "edit-answers";
  ["The model writes", "With the edit"].forEach((name, run) => {
    const text = document.createElement("dd");
    const alike = parting < 0 ? answers[run].length : parting;
    text.append(answers[run].slice(0, alike).join("").trimStart(), made("mark", answers[run].slice(alike, alike + 1).join("")), answers[run].slice(alike + 1).join(""));
    const entry = document.createElement("div");
    entry.append(made("dt", name), text);
    list.append(entry);
  });
  return list;
}

function nextOf({ next }) {
  const table = document.createElement("table");
  table.className = "dataframe";
  table.createCaption().textContent = "Most probable next tokens";
  const heading = table.createTHead().insertRow();
  heading.append(...["token", "without the edit", "with it"].map((name) => made("th", name)));
  const body = table.createTBody();
  const largest = Math.max(...next.flatMap(([, ...shares]) => shares));
  for (const [token, plain, edited] of next) {
    body.insertRow().append(made("td", token.replaceAll(" ", "·")), bar(plain, largest), bar(edited, largest));
  }
  return table;
}

function bar(share, largest) {
  const cell = made("td", percent(share), "edit-bar");
  cell.style.setProperty("--share", String(share / largest));
  return cell;
}

/** The change of the loss at each token of the text. */
function lossesOf({ tokens: read, losses: [plain, edited] }) {
  if (read.length < 2) return [];
  const changes = plain.map((loss, at) => (loss === null ? 0 : edited[at] - loss));
  const largest = Math.max(...changes.map(Math.abs), 1e-9);
  const text = made("div", "", "edit-losses");
  text.append(...read.map((token, at) => {
    const chip = made("span", token.replaceAll(" ", "·"), "token");
    chip.style.setProperty("--change", String(Math.abs(changes[at]) / largest));
    chip.dataset.change = changes[at] > 0 ? "worse" : "better";
    if (plain[at] !== null) chip.title = `loss ${plain[at].toFixed(2)} nats without the edit, ${edited[at].toFixed(2)} with it`;
    return chip;
  }));
  const reading = `Loss by token: orange tokens are less probable with the edit, blue ones more; the strongest shade is a change of ${largest.toFixed(2)} nats.`;
  return [text, made("p", reading, "caveat")];
}

// ---- start ----------------------------------------------------------------------------------------------------------

if (live.through) {
  place("live-form").addEventListener("submit", (event) => {
    event.preventDefault();
    read(place("live-text").value);
  });
  place("live-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    place("live-form").requestSubmit();
  });
  for (const button of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-text]"))) {
    button.addEventListener("click", () => read(button.dataset.text));
  }
  place("live-save").addEventListener("click", save);
  for (const button of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("#edit-head button"))) {
    const [layer, head] = ["layer", "head"];
    button.addEventListener("click", () => setEdit({ heads: withHead(editOf(hash()).heads, chosenIn(layer), chosenIn(head), button.dataset.way) }));
  }
  place("edit-prompt").addEventListener("change", ({ target }) => setEdit({ prompt: target.value }));
  place("edit-position").addEventListener("input", sayPosition);
  place("edit-position").addEventListener("change", ({ target }) => setEdit({ position: Number(target.value) < 0 ? null : Number(target.value) }));
  addEventListener("attnmech-address", showEdit); // page.js says so at its start, and after each choice
  addEventListener("message", ({ source, data }) => {
    if (live.through !== "notebook" || source !== parent) return;
    if (data?.attnmech === "answer") waiting.get(data.number)?.(data.content);
    if (data?.attnmech === "choose") obey(data);
  });
  whenDrawn(follow);
} else if (live.edit.sentences) {
  showHeads(editOf(hash()));
  showResult(/** @type {LiveBlock} */ (live.edit));
}
