// Curves of chosen metrics over all steps; a click on a step opens it.

import { el, link, shown, stepUrl, svg } from "./dom.js";

const HEIGHT = 190;
const EDGE = { left: 52, right: 12, top: 10, bottom: 24 };
const DEFAULT = ["reward", "response/tokens", "kl", "entropy"];
const MAX_LINKS = 40; // to kept steps

export function showTrend(page, query, { runs, metrics }) {
  const known = Object.keys(metrics);
  const chosen = query.has("metric") ? query.getAll("metric").filter((name) => known.includes(name))
    : DEFAULT.filter((name) => known.includes(name));
  page.append(...runs.map((run, at) => runLine(run, at)));
  if (!known.length) {
    page.append(el("p", { className: "note" }, "No step is finished yet: there are no metrics."));
    return;
  }
  page.append(chooser(known, chosen));
  const charts = el("div", { className: "charts" });
  page.append(charts);
  const draw = () => charts.replaceChildren(...chosen.map((name) => chart(name, metrics[name], runs, charts, chosen)));
  draw();
  addEventListener("resize", draw);
}

function runLine(run, at) {
  const newest = run.kept.slice(-MAX_LINKS).reverse();
  const links = newest.map((step) => link(stepUrl(run.run_id, step), step));
  const more = run.kept.length - newest.length;
  return el("section", { className: "run-line" },
    el("h2", {}, el("i", { className: `dot series-${at}` }), run.run_id),
    el("p", { className: "note" }, `${run.state}, ${run.steps.length} of ${run.num_steps} steps`),
    run.kept.length
      ? el("p", { className: "steps" }, "kept: ", links, more > 0 ? goTo(run, more) : null)
      : el("p", { className: "note" }, run.not_kept ?? "no step is kept (store.keep_steps)"));
}

function goTo(run, more) {
  const input = el("input", { type: "number", min: run.kept[0], max: run.kept.at(-1), placeholder: "step", ariaLabel: "step" });
  const form = el("form", { className: "inline" }, `and ${more} earlier: `, input, el("button", {}, "open"));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (input.value) location.href = stepUrl(run.run_id, input.value);
  };
  return form;
}

function metricUrl(names) {
  return `/?${new URLSearchParams(names.map((name) => ["metric", name]))}`;
}

function chooser(known, chosen) {
  const others = known.filter((name) => !chosen.includes(name));
  const select = el("select", { ariaLabel: "add a metric" },
    el("option", { value: "" }, "add a metric …"), others.map((name) => el("option", { value: name }, name)));
  select.onchange = () => { location.href = metricUrl([...chosen, select.value]); };
  return el("p", { className: "pager" }, select, el("span", { className: "note" }, "steps and rows are counted from 0; click on a step to open it"));
}

function chart(name, { unit, meaning }, runs, box, chosen) {
  const width = Math.max(260, Math.min(box.clientWidth, box.clientWidth > 760 ? box.clientWidth / 2 - 12 : box.clientWidth));
  const points = runs.map((run) => run.steps.map((step, at) => [step, run.metrics[name]?.[at]])
    .filter(([, value]) => typeof value === "number"));
  const all = points.flat();
  const title = el("h3", { title: meaning }, unit && !name.includes(unit) ? `${name} (${unit})` : name, " ",
    link(metricUrl(chosen.filter((other) => other !== name)), "×", { className: "remove", title: "remove", ariaLabel: `remove ${name}` }));
  const readout = el("p", { className: "readout note" }, " ");
  if (!all.length) return el("div", { className: "chart" }, title, el("p", { className: "note" }, "no values"));
  const scale = scales(runs, all, width);
  const drawing = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": name }, ...axes(scale, width));
  points.forEach((line, at) => drawing.append(...curve(line, at, scale)));
  runs.forEach((run, at) => run.kept.forEach((step) => drawing.append(svg("line", {
    class: `kept stroke-${at}`, x1: scale.x(step), x2: scale.x(step), y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom + 4 }))));
  follow(drawing, points, runs, scale, readout);
  return el("div", { className: "chart" }, title, drawing, readout);
}

function scales(runs, all, width) {
  const steps = all.map(([step]) => step), values = all.map(([, value]) => value);
  const [first, last] = [least(steps), -least(steps.map((step) => -step))];
  let [low, high] = [least(values), -least(values.map((value) => -value))];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const across = width - EDGE.left - EDGE.right, down = HEIGHT - EDGE.top - EDGE.bottom;
  return { first, last, low, high,
    x: (step) => EDGE.left + (last === first ? across / 2 : (step - first) / (last - first) * across),
    y: (value) => EDGE.top + (high - value) / (high - low) * down };
}

const least = (numbers) => numbers.reduce((one, other) => Math.min(one, other), Infinity);

function axes({ first, last, low, high, x, y }, width) {
  const label = (text, attributes) => svg("text", { class: "tick", ...attributes }, text);
  return [low, (low + high) / 2, high].flatMap((value) => [
    svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
    label(tick(value, high - low), { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }),
  ]).concat([...new Set([first, last])].map((step) =>
    label(shown(step), { x: x(step), y: HEIGHT - 6, "text-anchor": step === first ? "start" : "end" })));
}

// Returns a number with the digits that tell it from others in a range.
function tick(value, range) {
  const size = Math.max(Math.abs(value), range);
  if (value === 0) return "0";
  if (size < 0.001 || size >= 1e6) return value.toExponential(1);
  return value.toFixed(Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(range)))));
}

function curve(line, at, { x, y }) {
  if (line.length === 1) return [svg("circle", { class: `fill-${at}`, cx: x(line[0][0]), cy: y(line[0][1]), r: 3.5 })];
  return [svg("polyline", { class: `curve stroke-${at}`, points: line.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") })];
}

// Shows the values of the step at the pointer; a click opens the nearest kept step of the first run that has one.
function follow(drawing, points, runs, { x }, readout) {
  const cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  drawing.append(cursor);
  const nearest = (steps, at) => steps.reduce((one, other) => Math.abs(x(other) - at) < Math.abs(x(one) - at) ? other : one);
  const all = [...new Set(points.flat().map(([step]) => step))];
  drawing.onpointermove = (event) => {
    const step = nearest(all, event.clientX - drawing.getBoundingClientRect().left);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const values = points.map((line) => line.find(([other]) => other === step)?.[1]);
    readout.textContent = `step ${step}: ${values.map(shown).join(" and ")}`;
  };
  drawing.onclick = (event) => {
    const run = runs.find(({ kept }) => kept.length);
    if (run) location.href = stepUrl(run.run_id, nearest(run.kept, event.clientX - drawing.getBoundingClientRect().left));
  };
}
