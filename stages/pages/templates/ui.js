"use strict";
// Keeps a page up to date, and sends its forms without leaving it. Everything works without, by loading the page again.

const MOST_LINES = 5000; // of a log that the page keeps
const said = document.getElementById("said");

function say(text, bad) {
  said.textContent = text;
  said.className = bad ? "bad" : "";
  said.hidden = !text;
}

async function ask(url, options) {
  const answer = await fetch(url, { credentials: "same-origin", ...options });
  if (answer.redirected && new URL(answer.url).pathname === "/login") location.assign("/login");
  return answer;
}

// Calls `work` every `seconds`, not while the page is hidden; an error is shown until it is over.
function repeat(seconds, work) {
  let lost = false;
  const turn = async () => {
    try {
      if (!document.hidden) await work();
      if (lost) say("", false);
      lost = false;
    } catch (error) {
      lost = true;
      say("The page's program does not answer. Programs that it started go on; start `latentpress ui` again.", true);
    }
    setTimeout(turn, seconds * 1000);
  };
  setTimeout(turn, seconds * 1000);
  return turn;
}

// Puts new elements in the place of those that changed; what has the focus keeps it.
function swap(place, fresh) {
  const focused = document.activeElement && place.contains(document.activeElement) ? document.activeElement.id : "";
  const olds = [...place.children], news = [...fresh.children];
  if (olds.length !== news.length || olds.some((old, number) => old.id !== news[number].id)) {
    place.replaceChildren(...news);
  } else {
    olds.forEach((old, number) => {
      if (old.outerHTML === news[number].outerHTML) return;
      if (old.tagName === "OL") swap(old, news[number]);
      else old.replaceWith(news[number]);
    });
  }
  if (focused) (document.getElementById(focused) || nearest(focused))?.focus();
}

// Of a button that is gone, such as Start, the one that is there instead.
function nearest(id) {
  const card = document.getElementById(`card-${id.slice(id.indexOf("-") + 1)}`);
  return card && card.querySelector("button, a");
}

// The parts that are live are taken from the same page as it is now.
let refresh = async () => {};
const live = document.querySelector("[data-live]"), shown = document.getElementById("document");
if (live) {
  refresh = async () => {
    const answer = await ask(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    swap(live, fresh.querySelector("[data-live]"));
    if (shown) showAgain(fresh.getElementById("document"));
    for (const late of document.querySelectorAll("[data-late]")) { // what has come since, beside fields that are typed in
      const now = fresh.getElementById(late.id);
      if (now && now.dataset.late === undefined) late.replaceWith(now);
    }
  };
  repeat(2, () => refresh());
}

// A document that was made again is shown again; one that is there for the first time with the whole page.
function showAgain({ src, dataset: { version } }) {
  if (!version || version === shown.dataset.version) return;
  if (!shown.dataset.version) { location.reload(); return; }
  const [address] = shown.src.split("?");
  if (address !== src) return; // another one, which is the newest now
  shown.dataset.version = version;
  shown.src = `${address}?version=${version}`;
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.method !== "post" || form.dataset.plain !== undefined) return;
  event.preventDefault();
  if (form.dataset.ask && !confirm(form.dataset.ask)) return;
  if (form.ariaBusy) return; // not by disabling its button, which would lose the focus
  form.ariaBusy = "true";
  try {
    const answer = await ask(form.action, {
      method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
    });
    const told = await answer.json();
    say(told.message || [told.error, told.next_step].filter(Boolean).join("\n"), !answer.ok);
    if (answer.ok && form.dataset.then === "reload") location.reload();
  } catch (error) {
    say("That was not answered; load the page again.", true);
  }
  form.ariaBusy = null;
  await refresh();
});

for (const choice of document.querySelectorAll("[data-go]")) {
  choice.addEventListener("change", () => choice.form.requestSubmit());
}

// The keys of links, unless they mean something where the focus is.
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
    if (lines.length > MOST_LINES) log.textContent = lines.slice(-MOST_LINES).join("\n");
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

// By its button, as nothing may change on GET.
document.getElementById(shown?.dataset.make)?.click();
