"use strict";
// Keeps form and text equal: the server checks a change of either, and answers with both.

const PAUSE_MS = 400;
const form = document.getElementById("settings"), address = form.action.replace(/\/check$/, ""), text = document.getElementById("text");
const numbers = document.getElementById("numbers"), errors = document.getElementById("errors");
const problems = document.getElementById("problems"), noErrors = document.getElementById("no-errors");
let turn = 0, timer = 0, errorLines = new Set(), saved = text.dataset.unsaved === undefined ? text.value : null;

function number() {
  const count = text.value.split("\n").length;
  numbers.replaceChildren(...Array.from({ length: count }, (_, line) => {
    const mark = document.createElement(errorLines.has(line + 1) ? "mark" : "span");
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

function listErrors(lines) {
  errorLines = new Set(lines.map(([line]) => line));
  errors.replaceChildren(...lines.map(([line, message]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = "#text"; link.dataset.line = line; link.textContent = `line ${line}`;
    item.append(...(line ? [link, `: ${message}`] : [message]));
    return item;
  }));
  noErrors.hidden = lines.length > 0;
}

function listProblems(texts) {
  problems.replaceChildren(...texts.map((problem) => {
    const line = document.createElement("p");
    line.textContent = problem;
    return line;
  }));
  problems.hidden = !texts.length;
}

// Hides fields that do not contain each word or are not set, like the server does without a script.
function filter() {
  const words = form.elements.find.value.toLowerCase().split(/\s+/), only = form.elements.only_set.checked;
  const active = only || words.some((word) => word);
  for (const field of form.querySelectorAll(".field")) {
    const input = field.querySelector("input, select"), about = field.querySelector("p").textContent;
    const label = field.querySelector("label"), content = `${label.htmlFor.slice("field:".length)} ${label.textContent} ${about}`.toLowerCase();
    field.hidden = (only && input?.value === "") || !words.every((word) => content.includes(word));
  }
  for (const group of [...form.querySelectorAll("details.group")].reverse()) { // inner ones first
    group.hidden = ![...group.children].some((part) => part.matches(".field, .group") && !part.hidden);
    if (active && !group.hidden) group.open = true;
  }
}

// Adds or removes an item. The server answers with the whole page, because the fields of the form change.
async function edit(button) {
  const thisTurn = ++turn, fields = new URLSearchParams(new FormData(form));
  const list = button.name === "add" && button.value;
  fields.set(button.name, button.value);
  const answer = await ask(`${address}/check`, { method: "POST", body: fields });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (thisTurn !== turn) return;
  const problem = fresh.getElementById("problems").textContent.trim();
  listProblems(problem ? [problem] : []);
  if (problem) return;
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
  const thisTurn = ++turn, before = text.value;
  const answer = await ask(`${address}/${verb}`, {
    method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
  });
  const result = await answer.json();
  if (thisTurn !== turn || text.value !== before) return; // the text was changed since, and is sent next
  if (text.value !== result.text) text.value = result.text;
  form.elements.base.value = result.text;
  form.elements.stamp.value = result.stamp;
  for (const [path, choices] of Object.entries(result.choices)) { // choices that depend on other fields
    const field = form.elements[`field:${path}`];
    field?.replaceChildren(field.options[0], ...choices.map((one) => new Option(one)));
  }
  for (const [path, value] of Object.entries(result.values)) {
    const field = form.elements[`field:${path}`];
    if (!field || field.value === value) continue;
    if (field.options && ![...field.options].some((one) => one.value === value)) field.add(new Option(value));
    field.value = value;
  }
  listErrors(result.errors);
  listProblems(result.problems);
  if (result.message) { saved = result.text; showMessage(result.message, false); }
  number();
}

const reportFailure = () => showMessage("The server did not answer; check that `latentpress ui` is running.", true);
const sendOrReport = (verb) => send(verb).catch(reportFailure);

form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  if (event.submitter?.id === "filter") { filter(); return; }
  if (event.submitter?.name) {
    edit(event.submitter).catch(reportFailure);
    return;
  }
  sendOrReport(event.submitter && event.submitter.formAction.endsWith("/save") ? "save" : "check");
});
form.addEventListener("change", ({ target }) => { if (target.name.startsWith("field:")) sendOrReport("check"); });
form.addEventListener("input", ({ target }) => { if (["find", "only_set"].includes(target.name)) filter(); });
form.addEventListener("keydown", (event) => { // presses the button next to the field instead of Check, the first button
  if (event.key !== "Enter" || !/^(find$|new:)/.test(event.target.name)) return;
  event.preventDefault();
  event.target.closest("div").querySelector("button").click();
});
text.addEventListener("input", () => {
  number();
  clearTimeout(timer);
  timer = setTimeout(() => sendOrReport("check"), PAUSE_MS);
});
text.addEventListener("scroll", () => { numbers.scrollTop = text.scrollTop; });
errors.addEventListener("click", (event) => {
  if (!event.target.dataset.line) return;
  event.preventDefault();
  goTo(Number(event.target.dataset.line));
});

// A folder is chosen on the page of folders, which is shown in a dialog.
const chooser = document.getElementById("chooser"), take = document.getElementById("take");
let folderField = null;

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
  folderField = document.getElementById(link.dataset.folder);
  const query = folderField.value.startsWith("/") ? `?at=${encodeURIComponent(folderField.value)}` : "";
  chooser.showModal();
  showFolders(link.href + query).catch(() => chooser.close());
});
chooser.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (link) { event.preventDefault(); showFolders(link.href).catch(() => chooser.close()); }
  if (event.target.id === "cancel") chooser.close();
  if (event.target.id !== "take") return;
  folderField.value = document.getElementById("folders").dataset.path;
  chooser.close();
  folderField.focus();
  folderField.dispatchEvent(new Event("change", { bubbles: true }));
});
addEventListener("beforeunload", (event) => { if (text.value !== saved) event.preventDefault(); });
for (const link of errors.querySelectorAll("[data-line]")) errorLines.add(Number(link.dataset.line));
number();
