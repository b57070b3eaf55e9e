// The rows of a step as a table: sorted by a column, filtered by a SQL condition, in pages.

import { ask, el, groupUrl, link, rowUrl, shown, stepUrl, withQuery } from "./dom.js";

const PAGE = 50; // rows

export async function showStep(page, query, { run, step }) {
  const wanted = { run, step, limit: PAGE, sort: "row", where: "", offset: 0, ...Object.fromEntries(query) };
  const number = Number(step);
  page.append(
    el("h1", {}, `Step ${step}`),
    el("p", { className: "pager" },
      number > 0 ? link(stepUrl(run, number - 1), `‹ step ${number - 1}`) : null,
      link(stepUrl(run, number + 1), `step ${number + 1} ›`)),
    filterForm(wanted));
  const found = await ask("rows", wanted);
  page.append(pager(found, Number(wanted.offset)), table(found, wanted), legend(found));
}

function filterForm(wanted) {
  const input = el("input", {
    name: "where", value: wanted.where, spellcheck: false, autocomplete: "off", ariaLabel: "condition",
    placeholder: "reward > 0.5 and num_response_tokens < 100",
  });
  const kept = ["sort", ...("descending" in wanted ? ["descending"] : [])];
  return el("form", { className: "filter", method: "get" }, input,
    kept.map((name) => el("input", { type: "hidden", name, value: wanted[name] })),
    el("button", {}, "Filter"),
    wanted.where ? link(withQuery({ where: null, offset: null }), "clear") : null);
}

function pager({ rows, num_rows, num_found }, offset) {
  const last = offset + rows.length;
  const count = num_found === num_rows ? `${shown(num_rows)} rows` : `${shown(num_found)} of ${shown(num_rows)} rows`;
  return el("p", { className: "pager" },
    el("span", {}, rows.length ? `${count}: ${shown(offset + 1)} to ${shown(last)}` : `${count}`),
    offset > 0 ? link(withQuery({ offset: Math.max(0, offset - PAGE) }), "‹ previous") : null,
    last < num_found ? link(withQuery({ offset: last }), "next ›") : null);
}

function table({ columns, rows }, wanted) {
  const head = el("tr", {}, columns.map(({ name, is_number }) => heading(name, is_number, wanted)));
  const body = rows.map((values) => el("tr", {}, columns.map((column, at) => cell(column, values[at], values, columns, wanted))));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

function heading(name, isNumber, { sort, ...wanted }) {
  const isSorted = sort === name;
  const descends = isSorted ? !("descending" in wanted) : isNumber && name !== "row";
  const arrow = isSorted ? ("descending" in wanted ? " ↓" : " ↑") : "";
  const href = withQuery({ sort: name, descending: descends ? "1" : null, offset: null });
  return el("th", { className: isNumber ? "number" : "", ariaSort: isSorted ? (descends ? "ascending" : "descending") : "none" },
    link(href, name + arrow));
}

function cell({ name, is_number }, value, values, columns, { run, step }) {
  const text = shown(value);
  const row = values[columns.findIndex((column) => column.name === "row")];
  if (name === "row") return el("th", { className: "number" }, link(rowUrl(run, step, row), text));
  if (name === "group_id" && value !== null) return el("td", { className: "number" }, link(groupUrl(run, step, value), text));
  return el("td", { className: is_number ? "number" : "text", title: is_number ? "" : text }, text);
}

function legend({ columns }) {
  const names = columns.map(({ name }) => name);
  const gap = names.includes("gap_mean") ? "gap: behavior minus sampler log-prob of trained tokens, mean and largest absolute. " : "";
  const kl = names.includes("kl_mean") ? "kl: log-prob minus the reference's. " : "";
  return el("p", { className: "note" }, gap, kl,
    "A condition is SQL of DuckDB over these columns; tokens are in the view ",
    el("code", {}, "tokens"), ": ", el("code", {}, "row in (select row from tokens where sampler_logprobs < -5)"));
}
