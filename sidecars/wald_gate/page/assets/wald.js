// What the page does by itself: it takes the parts that the gate sends, says when they stop coming, and copies commands.
"use strict";

const SILENT_MS = 8000; // without an event for so long, what is shown may be old: the gate sends one a second
const HIDDEN_MS = 10000; // a page that nobody sees is not kept up for longer
const AGAIN_MS = 2000;

const page = document.body;
const notice = document.getElementById("connection");
let source = null;
let heard = Date.now();
let current = Date.now(); // when parts came the last time
let hiding = 0;

document.documentElement.classList.add("live");

/** Make `old` like `wanted` and keep what is the same, so that focus, selection and open details stay. */
function become(old, wanted) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes])
    if (!wanted.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  fill(old, wanted);
}

/** Give `old` the children of `wanted`: those with an id are found by it, the others by their place. */
function fill(old, wanted) {
  const known = new Map();
  for (const child of old.children) if (child.id) known.set(child.id, child);
  let at = old.firstChild;
  for (const next of [...wanted.childNodes]) {
    const found = next.id ? known.get(next.id) : at && !at.id && at.nodeName === next.nodeName ? at : null;
    if (!found || found.nodeName !== next.nodeName) {
      old.insertBefore(next, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else old.insertBefore(found, at);
    become(found, next);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

/** Take parts: pairs of an id and HTML. Of a part that is what is in it from now on; of a row, what it is. */
function take(parts) {
  for (const [id, html] of parts) {
    const element = document.getElementById(id);
    if (!element) continue;
    const wanted = document.createElement("template");
    wanted.innerHTML = html.startsWith("<g ") ? `<svg>${html}</svg>` : html; // the gate has escaped what is not its own
    const row = id.startsWith("live_") ? null : wanted.content.getElementById(id);
    if (row) become(element, row);
    else fill(element, wanted.content);
  }
  document.dispatchEvent(new CustomEvent("wald:parts"));
}

/** Say that what is shown is old, or "" if it is not. */
function tell(message) {
  if (notice.textContent !== message) notice.textContent = message;
  notice.hidden = !message;
  page.classList.toggle("old", Boolean(message));
}

function clock(time) {
  return new Date(time).toISOString().slice(11, 19);
}

function listen() {
  if (!page.dataset.live) return;
  if (source) source.close();
  source = new EventSource(page.dataset.live);
  const hear = (name, action) =>
    source.addEventListener(name, (event) => {
      heard = Date.now();
      tell("");
      action(event.data);
    });
  hear("hello", (build) => build === page.dataset.build || location.reload());
  hear("parts", (data) => {
    current = heard;
    take(JSON.parse(data));
  });
  hear("problem", (data) => tell(`The log cannot be read: ${JSON.parse(data)}`));
  hear("failed", (data) =>
    tell(`The gate has failed at this page (${JSON.parse(data)}); its log says how. What you see is from ${clock(current)}.`),
  );
  source.addEventListener("error", () => {
    tell(`No connection since ${clock(heard)}. What you see is from then.`);
    if (source.readyState === EventSource.CLOSED) again();
  });
}

/** After an answer that was no stream of events: the session may have ended, or the gate is not ready yet. */
async function again() {
  try {
    const answer = await fetch(page.dataset.live, { redirect: "manual", cache: "no-store" });
    if (answer.type === "opaqueredirect") location.reload();
  } catch {
    // it is not there
  }
  setTimeout(listen, AGAIN_MS);
}

setInterval(() => {
  if (source && Date.now() - heard > SILENT_MS) tell(`Nothing has come since ${clock(heard)}. What you see is from then.`);
}, 1000);

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden)
    hiding = setTimeout(() => {
      source?.close();
      source = null;
    }, HIDDEN_MS);
  else if (!source) listen();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
});

listen();
