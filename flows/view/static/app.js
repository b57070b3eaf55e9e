// Which page a URL is of: /, /run/R/step/S, /run/R/step/S/row/N and /run/R/step/S/group/N.

import { ask, el, link, stepUrl } from "./dom.js";
import { showGroup } from "./group.js";
import { showRow } from "./row.js";
import { showStep } from "./step.js";
import { showTrend } from "./trend.js";

const page = document.getElementById("page");
const query = new URLSearchParams(location.search);
if (query.has("token")) {
  query.delete("token"); // the cookie has it from now on
  history.replaceState(null, "", location.pathname + (query.size ? `?${query}` : ""));
}
const [, , run, , step, kind, number] = location.pathname.split("/").map(decodeURIComponent);

function crumbs() {
  const parts = [link("/", "runs", { title: "curves of all steps" })];
  if (run) {
    parts.push(el("span", { className: "run" }, run));
    parts.push(link(stepUrl(run, step), `step ${step}`));
    if (kind) parts.push(el("span", {}, `${kind} ${number}`));
  }
  return parts;
}

async function show() {
  if (!run) return showTrend(page, query, await ask("runs"));
  if (kind === "row") return showRow(page, query, { run, step, row: number });
  if (kind === "group") return showGroup(page, query, { run, step, group: number });
  return showStep(page, query, { run, step });
}

document.title = [kind && `${kind} ${number}`, step && `step ${step}`, run ?? "runs", "sluice view"].filter(Boolean).join(" · ");
document.getElementById("head").append(el("nav", { className: "crumbs" }, crumbs()));
show()
  .catch((error) => page.append(el("p", { className: "error" }, error.message)))
  .finally(() => document.body.classList.add("ready"));
