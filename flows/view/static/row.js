// One row: its facts, prompt and response; with `beside=RUN/STEP/ROW`, another one next to it.

import { ask, el, groupUrl, link, rowUrl, shown, withQuery } from "./dom.js";
import { merged } from "./colors.js";
import { colorChoice, promptOf, responseOf, watch } from "./tokens.js";

const LONG = ["prompt_text", "response_text", "info", "sample_id"];

export async function showRow(page, query, place) {
  const others = query.has("beside") ? [otherPlace(query.get("beside"))] : [];
  const answers = await Promise.all([place, ...others].map((each) => ask("row", each)));
  const rows = answers.map(({ rows: [row] }) => row);
  const differs = rows.length > 1 ? differences(...rows) : undefined;
  const boxes = rows.map((row) => responseOf(row, differs, Number(query.get("at") ?? 0)));
  page.append(
    el("h1", {}, `Row ${place.row} of step ${place.step}`),
    neighbors(rows[0]),
    besideForm(rows[0], others[0], query, answers[0].runs),
    rows[0].no_token_texts ? el("p", { className: "note" }, `tokens are shown by their ids: ${rows[0].no_token_texts}`) : "",
    rows.length > 1 ? comparison(rows, differs) : "",
    colorChoice(merged(answers.map(({ colorings }) => colorings)), boxes, query),
    el("div", { className: rows.length > 1 ? "side-by-side" : "" }, rows.map((row, at) => el("section", {},
      rows.length > 1 ? el("h2", {}, link(rowUrl(row.run_id, row.step, row.row), `${row.run_id}, step ${row.step}, row ${row.row}`)) : null,
      factsOf(row), treeOf(row), promptOf(row), boxes[at], longFacts(row)))));
  watch(query);
}

function otherPlace(text) {
  const [run, step, row] = text.split("/");
  return { run, step: step ?? "", row: row ?? "" };
}

function neighbors({ run_id, step, row, num_rows }) {
  const to = (other) => rowUrl(run_id, step, other) + location.search.replace(/([?&])(at|beside)=[^&]*/g, "$1");
  return el("p", { className: "pager" },
    row > 0 ? link(to(row - 1), `‹ row ${row - 1}`) : null,
    row + 1 < num_rows ? link(to(row + 1), `row ${row + 1} ›`) : null,
    el("span", { className: "note" }, `${shown(num_rows)} rows`));
}

function besideForm(row, other, query, runs) {
  const second = runs.find((run) => run !== row.run_id); // else this run's step before
  const proposed = { run: second ?? row.run_id, step: second ? row.step : Math.max(0, row.step - 1), row: row.row };
  const inputs = ["run", "step", "row"].map((name) => el("input", {
    name, ariaLabel: `other ${name}`, placeholder: name, required: true, inputMode: name === "run" ? "text" : "numeric",
    value: (other ?? proposed)[name] }));
  const form = el("form", { className: "beside" }, el("span", {}, "side by side with run, step, row: "), inputs, el("button", {}, "Compare"),
    query.has("beside") ? link(withQuery({ beside: null }), "close") : null);
  form.onsubmit = (event) => {
    event.preventDefault();
    location.href = withQuery({ beside: inputs.map(({ value }) => value.trim()).join("/"), at: null });
  };
  return form;
}

function differences(one, other) {
  return (at) => one.response.ids[at] !== other.response.ids[at];
}

function comparison([one, other], differs) {
  const count = Math.max(one.response.ids.length, other.response.ids.length);
  const found = Array.from({ length: count }, (_, at) => at).filter(differs);
  const isPrompt = String(one.prompt.ids) === String(other.prompt.ids);
  const text = found.length ? `${shown(found.length)} of ${shown(count)} positions differ, first token ${shown(found[0])}` : "all tokens are the same";
  return el("p", { className: "verdict" }, text, isPrompt ? "" : "; the prompts differ");
}

export function factsOf({ run_id, step, columns, response, turns }) {
  const fact = (name, ...value) => el("span", { className: "fact" }, el("b", {}, name), " ", ...value);
  const own = Object.entries(columns).filter(([name]) => !LONG.includes(name)).map(([name, value]) =>
    fact(name, name === "group_id" && value !== null ? link(groupUrl(run_id, step, value), value) : shown(value)));
  return el("p", { className: "facts" }, own, fact("tokens", shown(response.num_tokens)), turns.length ? fact("turns", turns.length) : null);
}

function treeOf({ tree, turns }) {
  if (!tree) return null;
  const open = turns.some(({ branch }) => branch);
  return el("details", { className: "tree", open }, el("summary", {}, "tree of its turns"), el("pre", {}, tree));
}

function longFacts({ columns }) {
  const present = LONG.filter((name) => columns[name]);
  return el("div", {}, present.map((name) => el("details", {}, el("summary", {}, name), el("pre", {}, columns[name]))));
}
