"use strict";
// Form and text follow each other: what is changed in one is checked by the server, which answers with both.

const PAUSE_MS = 400;
const form = document.getElementById("configuration"), address = form.action.replace(/\/check$/, ""), text = document.getElementById("text");
const numbers = document.getElementById("numbers"), errors = document.getElementById("errors");
const problems = document.getElementById("problems"), sound = document.getElementById("sound");
let turn = 0, waiting = 0, wrong = new Set(), saved = text.dataset.unsaved === undefined ? text.value : null;

function number() {
  const count = text.value.split("\n").length;
  numbers.replaceChildren(...Array.from({ length: count }, (_, line) => {
    const mark = document.createElement(wrong.has(line + 1) ? "mark" : "span");
    mark.textContent = `${line + 1}\n`;
    return mark;
  }));
  numbers.scrollTop = text.scrollTop;
}

function goTo(line) {
  const start = text.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1);
  const end = text.value.indexOf("\n", start);
  text.focus();
  text.setSelectionRange(start, end < 0 ? text.value.length : end);
  text.scrollTop = (line - 5) * text.scrollHeight / text.value.split("\n").length;
}

function list(found) {
  wrong = new Set(found.map(([line]) => line));
  errors.replaceChildren(...found.map(([line, message]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = "#text"; link.dataset.line = line; link.textContent = `line ${line}`;
    item.append(...(line ? [link, `: ${message}`] : [message]));
    return item;
  }));
  sound.hidden = found.length > 0;
}

function tell(found) {
  problems.replaceChildren(...found.map((problem) => {
    const line = document.createElement("p");
    line.textContent = problem;
    return line;
  }));
  problems.hidden = !found.length;
}

// Hides what does not have each word, or is not set, as the server does without a script.
function filter() {
  const words = form.elements.find.value.toLowerCase().split(/\s+/), only = form.elements.only_set.checked;
  const active = only || words.some((word) => word);
  for (const field of form.querySelectorAll(".field")) {
    const input = field.querySelector("input, select"), about = field.querySelector("p").textContent;
    const told = `${field.querySelector("label").htmlFor.slice("field:".length)} ${about}`.toLowerCase();
    field.hidden = (only && input?.value === "") || !words.every((word) => told.includes(word));
  }
  for (const group of [...form.querySelectorAll("details.group")].reverse()) { // inner ones first
    group.hidden = ![...group.children].some((part) => part.matches(".field, .group") && !part.hidden);
    if (active && !group.hidden) group.open = true;
  }
}

// Adds or removes an item: the server answers with the whole page, as the form has other fields then.
async function edit(button) {
  const own = ++turn, fields = new URLSearchParams(new FormData(form)), list = button.name === "add" && button.value;
  fields.set(button.name, button.value);
  const answer = await ask(`${address}/check`, { method: "POST", body: fields });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (own !== turn) return;
  const told = fresh.getElementById("problems").textContent.trim();
  tell(told ? [told] : []);
  if (told) return;
  const opened = [...form.querySelectorAll("details[open]")].map((group) => group.id);
  form.querySelector(".form").replaceWith(fresh.querySelector(".form"));
  for (const id of opened) { const group = document.getElementById(id); if (group) group.open = true; }
  const place = list && [...form.querySelectorAll("details.group")].filter((one) => one.id.startsWith(`group:${list}.`)
    && /^\d+$/.test(one.id.slice(`group:${list}.`.length))).pop();
  if (place) { place.open = true; place.querySelector("summary").focus(); }
  text.value = form.elements.base.value = fresh.getElementById("text").value;
  number();
  await send("check");
}

async function send(verb) {
  const own = ++turn, before = text.value;
  const answer = await ask(`${address}/${verb}`, {
    method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
  });
  const told = await answer.json();
  if (own !== turn || text.value !== before) return; // something was typed meanwhile, which is sent next
  if (text.value !== told.text) text.value = told.text;
  form.elements.base.value = told.text;
  form.elements.stamp.value = told.stamp;
  for (const [path, choices] of Object.entries(told.choices)) { // which depend on other fields
    const field = form.elements[`field:${path}`];
    field?.replaceChildren(field.options[0], ...choices.map((one) => new Option(one)));
  }
  for (const [path, value] of Object.entries(told.values)) {
    const field = form.elements[`field:${path}`];
    if (!field || field.value === value) continue;
    if (field.options && ![...field.options].some((one) => one.value === value)) field.add(new Option(value));
    field.value = value;
  }
  list(told.errors);
  tell(told.problems);
  if (told.message) { saved = told.text; say(told.message, false); }
  number();
}

const sent = (verb) => send(verb).catch(() => say("That was not answered; is `latentpress ui` still there?", true));

form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(waiting);
  if (event.submitter?.id === "filter") { filter(); return; }
  if (event.submitter?.name) {
    edit(event.submitter).catch(() => say("That was not answered; is `latentpress ui` still there?", true));
    return;
  }
  sent(event.submitter && event.submitter.formAction.endsWith("/save") ? "save" : "check");
});
form.addEventListener("change", ({ target }) => { if (target.name.startsWith("field:")) sent("check"); });
form.addEventListener("input", ({ target }) => { if (["find", "only_set"].includes(target.name)) filter(); });
form.addEventListener("keydown", (event) => { // not Check, the first button
  if (event.key !== "Enter" || !/^(find$|new:)/.test(event.target.name)) return;
  event.preventDefault();
  event.target.closest("div").querySelector("button").click();
});
text.addEventListener("input", () => {
  number();
  clearTimeout(waiting);
  waiting = setTimeout(() => sent("check"), PAUSE_MS);
});
text.addEventListener("scroll", () => { numbers.scrollTop = text.scrollTop; });
errors.addEventListener("click", (event) => {
  if (!event.target.dataset.line) return;
  event.preventDefault();
  goTo(Number(event.target.dataset.line));
});

// A folder is chosen on the page of folders, shown in a dialog.
const chooser = document.getElementById("chooser"), take = document.getElementById("take");
let chosenFor = null;

async function showFolders(url) {
  const answer = await ask(url), fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const folders = fresh.getElementById("folders"), problem = fresh.getElementById("problem");
  chooser.querySelector("div").replaceChildren(...[problem, folders].filter(Boolean));
  take.hidden = !folders.dataset.path;
  chooser.querySelector("a")?.focus();
}

form.addEventListener("click", (event) => {
  const link = event.target.closest("[data-folder]");
  if (!link) return;
  event.preventDefault();
  chosenFor = document.getElementById(link.dataset.folder);
  const known = chosenFor.value.startsWith("/") ? `?at=${encodeURIComponent(chosenFor.value)}` : "";
  chooser.showModal();
  showFolders(link.href + known).catch(() => chooser.close());
});
chooser.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (link) { event.preventDefault(); showFolders(link.href).catch(() => chooser.close()); }
  if (event.target.id === "cancel") chooser.close();
  if (event.target.id !== "take") return;
  chosenFor.value = document.getElementById("folders").dataset.path;
  chooser.close();
  chosenFor.focus();
  chosenFor.dispatchEvent(new Event("change", { bubbles: true }));
});
addEventListener("beforeunload", (event) => { if (text.value !== saved) event.preventDefault(); });
for (const link of errors.querySelectorAll("[data-line]")) wrong.add(Number(link.dataset.line));
number();
