// Shows the values of a chart under the pointer, hides curves, and enlarges a part of the steps. Clips play while they
// are in view.
"use strict";
{
const SIDE = 1000, MARGIN = 0.06, MIN_DRAG = 8; // pixels of a drag that is not a click
const pointsByCurve = new WeakMap();
const chartAt = (target) => target.closest?.("svg.lines")?.parentElement;
const short = (value) => String(Number(value.toPrecision(4)));

// The curve's points, in the coordinates of the SVG.
function pointsOf(curve) {
  if (!pointsByCurve.has(curve)) {
    const numbers = curve.querySelector(".each, .curve").getAttribute("d").match(/-?[\d.e-]+/g).map(Number);
    pointsByCurve.set(curve, numbers.flatMap((x, place) => (place % 2 ? [] : [[x, numbers[place + 1]]])));
  }
  return pointsByCurve.get(curve);
}

function shownCurves(chart) {
  return [...chart.querySelectorAll("g")].filter((curve) => curve.style.display !== "none");
}

// Returns a function that converts a coordinate of the SVG to a value.
function scale(chart, axis) {
  const [start, end] = chart.dataset[axis].split(" ").map(Number);
  return (place) => start + (place / SIDE) * (end - start);
}

function placeOf(chart, clientX) {
  const lines = chart.querySelector(".lines"), box = lines.getBoundingClientRect(), view = lines.viewBox.baseVal;
  return view.x + ((clientX - box.left) / box.width) * view.width;
}

function showValues(chart, place) {
  const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - place) < Math.abs(a[0] - place) ? b : a));
  const readout = chart.querySelector(".readout"), curves = shownCurves(chart);
  readout.hidden = !curves.length;
  if (!curves.length) return;
  const values = curves.map((curve) => [curve.dataset.curve, near(pointsOf(curve))]);
  const [step, value] = [scale(chart, "x"), scale(chart, "y")];
  readout.textContent = [`step ${Math.round(step(values[0][1][0]))}`,
    ...values.map(([name, point]) => `${name}: ${short(value(point[1]))}`)].join("\n");
}

function label(svg, axis, value, start, size, least) {
  const [low, high] = [value(start), value(start + size)].sort((a, b) => a - b);
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const places = [];
  const span = value(start + size) - value(start);
  svg.replaceChildren();
  for (let number = Math.ceil(low / step); number * step <= high; number += 1) {
    const share = (number * step - value(start)) / span;
    const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
    text.setAttribute("x", axis === "x" ? `${share * 100}%` : "100%");
    text.setAttribute("y", axis === "x" ? "75%" : `${share * 100}%`);
    text.textContent = short(number * step);
    svg.append(text);
    places.push(start + share * size);
  }
  return places;
}

// Draw the steps between two coordinates over the whole width. The height fits their values.
function zoom(chart, left, right) {
  const heights = shownCurves(chart).map(pointsOf).flatMap((points) => points // and the next point on both sides
    .filter(([x], place) => (points[place + 1]?.[0] ?? x) >= left && (points[place - 1]?.[0] ?? x) <= right)
    .map(([, y]) => y));
  const isWhole = left <= 0 && right >= SIDE;
  if (!heights.length) return;
  const [top, bottom] = [Math.min(...heights), Math.max(...heights)];
  const margin = (bottom - top) * MARGIN || SIDE * MARGIN;
  const [y, height] = isWhole ? [0, SIDE] : [top - margin, bottom - top + 2 * margin];
  chart.querySelector(".lines").setAttribute("viewBox", `${left} ${y} ${right - left} ${height}`);
  const places = label(chart.querySelector(".down"), "y", scale(chart, "y"), y, height, 0);
  label(chart.querySelector(".across"), "x", scale(chart, "x"), left, right - left, 1);
  chart.querySelector(".grid").setAttribute("d", places.map((place) => `M${left} ${place}H${right}`).join(""));
}

let drag = null; // {chart, from: pixels} of a mouse; a finger scrolls the page
document.addEventListener("pointerdown", (event) => {
  const chart = event.pointerType === "mouse" && event.button === 0 && chartAt(event.target);
  if (!chart) return;
  event.preventDefault();
  drag = { chart, from: event.clientX };
});
document.addEventListener("pointerup", ({ clientX }) => {
  if (!drag) return;
  const { chart, from } = drag;
  drag = null;
  if (Math.abs(clientX - from) < MIN_DRAG) return;
  const [left, right] = [from, clientX].map((x) => Math.min(SIDE, Math.max(0, placeOf(chart, x)))).sort((a, b) => a - b);
  if (right > left) zoom(chart, left, right);
});
document.addEventListener("dblclick", ({ target }) => chartAt(target) && zoom(chartAt(target), 0, SIDE));
document.addEventListener("pointermove", ({ target, clientX }) => {
  const chart = chartAt(target);
  for (const readout of document.querySelectorAll(".readout:not([hidden])")) {
    if (readout.parentElement !== chart) readout.hidden = true;
  }
  if (chart) showValues(chart, placeOf(chart, clientX));
});
document.addEventListener("change", ({ target }) => {
  if (target.dataset.shows === undefined) return;
  const curves = target.closest(".plot").querySelectorAll("g");
  curves[target.dataset.shows].style.display = target.checked ? "" : "none";
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
}
