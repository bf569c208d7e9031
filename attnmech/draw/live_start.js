// A saved page opens with the choices that it was saved with.

{
  const { start } = JSON.parse(document.getElementById("live-data")?.textContent ?? "{}");
  if (start && !location.hash) history.replaceState(null, "", new URL(`#${start}`, location.href));
}
