// All samples of one prompt, side by side.

import { ask, el, link, rowUrl, shown, withQuery } from "./dom.js";
import { factsOf } from "./row.js";
import { colorChoice, promptOf, responseOf, watch } from "./tokens.js";

export async function showGroup(page, query, { run, step, group }) {
  const offset = Number(query.get("offset") ?? 0);
  const { rows, colorings, num_found } = await ask("group", { run, step, group, offset });
  const boxes = rows.map((row) => responseOf(row));
  const last = offset + rows.length;
  page.append(
    el("h1", {}, `Group ${group} of step ${step}`),
    el("p", { className: "pager" }, el("span", {}, `${shown(num_found)} samples`),
      offset > 0 ? link(withQuery({ offset: null }), "‹ first") : null,
      last < num_found ? link(withQuery({ offset: last }), "next ›") : null),
    rows.length ? promptOf(rows[0]) : "",
    colorChoice(colorings, boxes, query),
    el("div", { className: "cards" }, rows.map((row, at) => el("section", { className: "card" },
      el("h2", {}, link(rowUrl(run, step, row.row), `row ${row.row}`)), factsOf(row), boxes[at]))));
  watch(query);
}
