"use strict";
// Reading pictures by pointer and keyboard, zooming the timeline, showing groups of ranks. The page is whole without it.
document.documentElement.classList.add("with-script");

function say(chart, shape) {
  const last = chart.querySelector(".current");
  if (last) last.classList.remove("current");
  if (!shape) return;
  shape.classList.add("current");
  const title = shape.querySelector("title");
  document.getElementById(chart.dataset.read).textContent = title ? title.textContent : "";
}

function shapesOf(chart) {
  return Array.from(chart.children).filter((shape) => shape.querySelector("title"));
}

function intoView(chart, shape) {
  const around = chart.parentElement;
  const box = shape.getBoundingClientRect(), seen = around.getBoundingClientRect();
  if (box.left < seen.left || box.right > seen.right) around.scrollLeft += box.left - seen.left - seen.width / 3;
}

for (const chart of document.querySelectorAll("svg[data-read]")) {
  const shapes = shapesOf(chart);
  chart.addEventListener("pointermove", (event) => {
    const shape = event.target.closest("rect, circle, polygon");
    if (shape && shape.querySelector("title")) say(chart, shape);
  });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step || !shapes.length) return;
    event.preventDefault();
    const at = shapes.indexOf(chart.querySelector(".current"));
    const next = shapes[Math.min(Math.max(at + step, 0), shapes.length - 1)];
    say(chart, next);
    intoView(chart, next);
  });
}

function zoom(chart, factor) {
  const around = chart.parentElement;
  const middle = (around.scrollLeft + around.clientWidth / 2) / Math.max(1, around.scrollWidth);
  const zoomed = factor ? Math.min(Math.max(Number(chart.dataset.zoomed || 1) * factor, 1), 64) : 1;
  chart.dataset.zoomed = String(zoomed);
  chart.setAttribute("width", zoomed === 1 ? "100%" : String(Math.round(around.clientWidth * zoomed)));
  around.querySelector(".x-marks").toggleAttribute("hidden", zoomed !== 1);
  around.scrollLeft = middle * around.scrollWidth - around.clientWidth / 2;
}

for (const buttons of document.querySelectorAll(".zoom")) {
  const chart = document.getElementById(buttons.dataset.for);
  for (const button of buttons.children) {
    button.addEventListener("click", () => zoom(chart, Number(button.dataset.zoom)));
  }
  chart.addEventListener("keydown", (event) => {
    const factor = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (factor !== undefined) zoom(chart, factor);
  });
}

for (const button of document.querySelectorAll("button[data-axis]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    for (const other of document.querySelectorAll("button[data-axis]")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(on));
    for (const device of document.querySelectorAll(".device")) {
      const group = device.dataset.groups.split(" ")[Number(button.dataset.axis)];
      const text = device.lastElementChild;
      if (!device.dataset.place) device.dataset.place = text.textContent;
      text.textContent = on ? "group " + group : device.dataset.place;
      device.classList.toggle("first", on && group === "0");
    }
  });
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
