"use strict";
// Refreshes a page, and sends its forms without leaving it. Without this script, a user loads the page again.

const MAX_LINES = 5000; // lines of a log in the page
const message = document.getElementById("said");

function showMessage(text, isError) {
  message.textContent = text;
  message.className = isError ? "bad" : "";
  message.hidden = !text;
}

async function ask(url, options) {
  const answer = await fetch(url, { credentials: "same-origin", ...options });
  if (answer.redirected && new URL(answer.url).pathname === "/login") location.assign("/login");
  return answer;
}

// Calls `work` every `seconds` while the page is visible. An error is shown until a call succeeds.
function repeat(seconds, work) {
  let hasFailed = false;
  const turn = async () => {
    try {
      if (!document.hidden) await work();
      if (hasFailed) showMessage("", false);
      hasFailed = false;
    } catch (error) {
      hasFailed = true;
      showMessage("The page's server does not answer. Programs that it started continue; start `latentpress ui` again.",
        true);
    }
    setTimeout(turn, seconds * 1000);
  };
  setTimeout(turn, seconds * 1000);
  return turn;
}

// Replaces elements that have changed. The focused element keeps the focus.
function swap(place, fresh) {
  const focused = document.activeElement && place.contains(document.activeElement) ? document.activeElement.id : "";
  const oldParts = [...place.children], newParts = [...fresh.children];
  if (oldParts.length !== newParts.length || oldParts.some((old, number) => old.id !== newParts[number].id)) {
    for (const part of newParts) if (part.tagName === "DETAILS") part.open = document.getElementById(part.id)?.open;
    place.replaceChildren(...newParts);
  } else {
    oldParts.forEach((old, number) => {
      if (old.outerHTML === newParts[number].outerHTML) return;
      if (["OL", "DETAILS"].includes(old.tagName)) swap(old, newParts[number]);
      else old.replaceWith(newParts[number]);
    });
  }
  if (focused) (document.getElementById(focused) || nearest(focused))?.focus();
}

// The button that replaced a removed button, for example Stop for Start.
function nearest(id) {
  const card = document.getElementById(`card-${id.slice(id.indexOf("-") + 1)}`);
  return card && card.querySelector("button, a");
}

// The live parts are taken from a new version of the same page.
let refresh = async () => {};
const live = document.querySelector("[data-live]"), documentFrame = document.getElementById("document");
if (live) {
  refresh = async () => {
    const answer = await ask(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    swap(live, fresh.querySelector("[data-live]"));
    if (documentFrame) reloadDocument(fresh.getElementById("document"));
    for (const late of document.querySelectorAll("[data-late]")) { // next to fields in which the user types
      const current = fresh.getElementById(late.id);
      if (current && current.dataset.late === undefined) late.replaceWith(current);
    }
  };
  repeat(2, () => refresh());
}

// Shows a new version of a document. For the first version, the whole page is loaded again.
function reloadDocument({ src, dataset: { version, job } }) {
  if (job !== documentFrame.dataset.job) { location.reload(); return; } // another job makes what is missing
  if (!version || version === documentFrame.dataset.version) return;
  if (!documentFrame.dataset.version) { location.reload(); return; }
  const [address] = documentFrame.src.split("?");
  if (address !== src) return; // the newest document is another one
  documentFrame.dataset.version = version;
  documentFrame.src = `${address}?version=${version}`;
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.method !== "post" || form.dataset.plain !== undefined) return;
  event.preventDefault();
  if (form.dataset.ask && !confirm(form.dataset.ask)) return;
  if (form.ariaBusy) return; // its button is not disabled, because it would lose the focus
  form.ariaBusy = "true";
  try {
    const answer = await ask(form.action, {
      method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
    });
    const result = await answer.json();
    showMessage(result.message || [result.error, result.next_step].filter(Boolean).join("\n"), !answer.ok);
    if (answer.ok && form.dataset.then === "reload") location.reload();
    if (answer.ok && form.dataset.then === "keep") await keepField(form);
  } catch (error) {
    showMessage("The server did not answer; load the page again.", true);
  }
  form.ariaBusy = null;
  await refresh();
});

// After a caption is saved, all parts of its item except the field are replaced.
async function keepField(form) {
  const item = form.closest("li"), text = form.elements.text.value;
  form.elements.before.value = JSON.stringify(text.split(/\r\n?|\n/).map((line) => line.trim()).filter(Boolean));
  const fresh = new DOMParser().parseFromString(await (await ask(location.href)).text(), "text/html").getElementById(item.id);
  if (!fresh) return;
  fresh.querySelector(".soft") && item.querySelector(".soft").replaceWith(fresh.querySelector(".soft"));
  item.querySelector("details")?.remove();
  if (fresh.querySelector("details")) form.after(fresh.querySelector("details"));
}
for (const form of document.querySelectorAll("[data-then=keep]")) {
  form.addEventListener("change", () => form.requestSubmit());
}

// Files of a new project, sent one by one into its folder.
const drop = document.getElementById("drop");
if (drop) {
  const files = document.getElementById("files"), name = document.getElementById("upload-name"), sent = document.getElementById("sent");
  const send = async (chosen) => {
    const problems = [];
    let last = null, count = 0;
    for (const file of chosen) {
      sent.textContent = `${count} of ${chosen.length} files are copied`;
      const address = [drop.dataset.to, encodeURIComponent(name.value.trim() || "my-project"), encodeURIComponent(file.name)].join("/");
      try {
        const answer = await ask(address, { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
        const result = await answer.json();
        if (answer.ok) { last = result; count += 1; } else problems.push(`${result.error}; ${result.next_step}`);
      } catch (error) { problems.push(`${file.name} was refused: it is too large, or the server does not answer`); }
    }
    if (last && !problems.length) return location.assign(`/new?${new URLSearchParams(last)}`);
    sent.replaceChildren(`${count} of ${chosen.length} files are copied.`, ...problems.map((problem) => {
      const line = document.createElement("span");
      line.className = "problem"; line.textContent = ` ${problem}.`;
      return line;
    }));
    if (!last) return;
    const link = document.createElement("a");
    link.href = `/new?${new URLSearchParams(last)}`; link.textContent = " Continue with the copied files";
    sent.append(link);
  };
  drop.hidden = false;
  files.addEventListener("change", () => send([...files.files]));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop") send([...event.dataTransfer.files]);
    });
  }
}

// Whether each model fits the card whose memory the user types.
const memory = document.querySelector(".new #card");
memory?.addEventListener("input", () => {
  const size = parseFloat(memory.value);
  for (const text of document.querySelectorAll(".fits")) {
    if (!(size > 0) || !/^[\d.]+ ?(gi?b?)?$/i.test(memory.value.trim())) continue;
    const need = Number(text.dataset.need), fits = need <= size;
    text.classList.toggle("no", !fits);
    const words = fits ? (need > document.getElementById("recipes").dataset.comfortable * size ? "barely fits" : "fits") : "does not fit";
    text.textContent = `${words} ${size} GB: ${need} of ${size}`;
  }
});

for (const choice of document.querySelectorAll("[data-go]")) {
  choice.addEventListener("change", () => choice.form.requestSubmit());
}

// Keyboard shortcuts of links, unless the focused element uses the key.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest("input, select, textarea, video, [tabindex='0']")) return;
  document.querySelector(`[data-key="${CSS.escape(event.key)}"]`)?.click();
});

const log = document.getElementById("log");
if (log) {
  log.scrollTop = log.scrollHeight;
  repeat(1, async () => {
    const answer = await ask(`${log.dataset.tail}&from=${log.dataset.from}`);
    if (!answer.ok) return;
    const piece = await answer.json();
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
    log.dataset.from = piece.end;
    log.dataset.ended = piece.ended;
    if (!piece.text) return;
    log.append(`${piece.cut ? "[...]\n" : ""}${piece.text}`);
    const lines = log.textContent.split("\n");
    if (lines.length > MAX_LINES) log.textContent = lines.slice(-MAX_LINES).join("\n");
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

// Presses the button, because a GET request must not change anything.
document.getElementById(documentFrame?.dataset.make)?.click();
