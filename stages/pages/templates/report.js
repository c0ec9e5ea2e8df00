// Draws the plots, in the colors of the page, and plays the clips that are in view.
"use strict";
const TEXTS = ["axis_label_text_color", "major_label_text_color", "label_text_color", "text_color"];
const LINES = ["axis_line_color", "major_tick_line_color", "minor_tick_line_color", "grid_line_color"];

function paint(root) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  for (const model of root.references()) {
    if (!/Axis|Grid|Legend|Title/.test(model.type)) continue;
    for (const name of TEXTS) if (name in model.properties) model[name] = text;
    for (const name of LINES) if (name in model.properties && model[name] !== null) model[name] = line;
  }
}

const plots = new Map();
let drawn = 0;
async function draw() {
  for (const data of document.querySelectorAll("script[data-plot]")) {
    const place = document.getElementById(data.dataset.plot);
    try {
      const views = await Bokeh.embed.embed_item(JSON.parse(data.textContent), place.id);
      const roots = views.roots ?? [...views];
      for (const { model } of roots) {
        if (!model.renderers) continue; // Bokeh's own notifications
        plots.set(place.id, model);
        paint(model);
      }
      drawn += 1;
    } catch (error) {
      place.textContent = "The plot can't be drawn here: " + error + ". Its values are below.";
    }
  }
  document.documentElement.dataset.drawn = drawn;
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((root) => paint(root)));

document.addEventListener("change", ({ target }) => {
  if (!target.dataset.line) return;
  const lines = plots.get(target.dataset.of).renderers.filter((line) => line.name === target.dataset.line);
  for (const line of lines) line.visible = target.checked;
});

if (!matchMedia("(prefers-reduced-motion: reduce)").matches && "IntersectionObserver" in window) {
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) target.play().catch(() => {});
      else target.pause();
    }
  });
  document.querySelectorAll("video").forEach((video) => watch.observe(video));
}
