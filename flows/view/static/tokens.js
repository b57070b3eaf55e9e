// Tokens of rows: colored by a value that is chosen, with all values of the one at the pointer, or clicked on.

import { el, shown, withQuery } from "./dom.js";
import { painter, samples } from "./colors.js";

const MAX_SHOWN = 10000; // tokens of a response, until all are wanted
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Returns a token's text with what can't be seen made visible: line ends, runs of spaces, control characters.
export function visible(piece) {
  if (piece === "") return "∅";
  const spaces = /^ +$/.test(piece) ? piece.replaceAll(" ", "·") : piece;
  return spaces.replace(/\r?\n/g, "⏎\n").replaceAll("\t", "⇥\t")
    .replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const textOf = (part, at) => part.token_texts ? visible(part.token_texts[at]) : `${part.ids[at]} `;

// Returns the prompt's tokens; of a long prompt, its end.
export function promptOf(row) {
  const { ids, num_tokens } = row.prompt;
  const first = Math.max(0, ids.length - MAX_SHOWN), left = num_tokens - ids.length + first;
  const box = el("pre", { className: "tokens box" }, left > 0 ? `… ${shown(left)} tokens before\n` : null,
    ids.slice(first).map((_, at) => span(row.prompt, first + at)));
  Object.assign(box, { row, sequence: row.prompt, values: {} });
  return el("details", { className: "prompt", open: true }, el("summary", {}, `prompt, ${shown(num_tokens)} tokens`), box);
}

// Returns the response's tokens, separated by turns. `differs` says of a position whether it is marked.
export function responseOf(row, differs = () => false, first = 0) {
  const box = el("div", { className: "response box" });
  const count = row.response.ids.length;
  const fill = (limit) => {
    box.replaceChildren(...blocks(row, Math.min(limit, count), differs));
    if (count > limit) {
      const button = el("button", {}, `show all ${shown(count)} tokens`);
      button.onclick = () => { fill(count); box.dispatchEvent(new Event("filled", { bubbles: true })); };
      box.append(button);
    }
    const left = row.response.num_tokens - count;
    if (left > 0 && limit >= count) box.append(el("p", { className: "note" }, `… ${shown(left)} more tokens`));
  };
  Object.assign(box, { row, sequence: row.response, values: row.values });
  fill(first >= MAX_SHOWN ? count : MAX_SHOWN);
  return box;
}

function blocks(row, limit, differs) {
  const spans = (from, to) => Array.from({ length: Math.max(0, Math.min(to, limit) - from) }, (_, at) => span(row.response, from + at, row.values.loss_mask, differs));
  if (!row.turns.length) return [el("pre", { className: "tokens" }, spans(0, limit))];
  const made = [];
  let from = 0;
  row.turns.forEach((turn, number) => {
    const facts = ["reward", "advantage"].filter((name) => name in turn).map((name) => `${name} ${shown(turn[name])}`);
    if (turn.branch) facts.unshift(turn.branch);
    const next = row.turns[number + 1]?.branch;
    const middle = from + turn.tokens, end = middle + turn.environment_tokens;
    made.push(el("h4", {}, [`turn ${number + 1}: ${shown(turn.tokens)} tokens`, ...facts].join(", ")),
      el("pre", { className: "tokens" }, spans(from, middle)));
    if (end > middle && middle < limit) {
      made.push(el("h4", { className: "environment" }, [`environment: ${shown(turn.environment_tokens)} tokens`, next].filter(Boolean).join(", ")),
        el("pre", { className: "tokens environment" }, spans(middle, end)));
    }
    from = end;
  });
  if (from < limit) made.push(el("pre", { className: "tokens" }, spans(from, limit)));
  return made;
}

function span(part, at, mask, differs = () => false) {
  const made = el("span", { className: "token" }, textOf(part, at));
  made.dataset.at = at;
  if (mask?.[at] === false) made.classList.add("masked");
  if (differs(at)) made.classList.add("differs");
  return made;
}

// Returns the choice of a coloring, with its legend, for the responses in `boxes`.
export function colorChoice(colorings, boxes, query) {
  if (!colorings.length) return el("p", { className: "note" }, "the tokens have no values to color them by");
  const select = el("select", { id: "color", ariaLabel: "color by" },
    colorings.map(({ name, title, unit }) => el("option", { value: name }, unit ? `${title} (${unit})` : title)));
  const legend = el("span", { className: "legend" });
  const paint = () => {
    const coloring = colorings.find(({ name }) => name === select.value);
    const color = painter(coloring);
    for (const box of boxes) paintTokens(box, coloring, color);
    const values = coloring.scale === "category" ? boxes.flatMap(({ values }) => values[coloring.name] ?? []) : [];
    legend.replaceChildren(...samples(coloring, values).map((value) => {
      const chip = el("span", { className: "token" }, shown(value));
      chip.style.backgroundColor = color(value);
      return chip;
    }));
  };
  const wanted = query.get("color");
  if (colorings.some(({ name }) => name === wanted)) select.value = wanted;
  select.onchange = () => { history.replaceState(null, "", withQuery({ color: select.value })); paint(); };
  boxes.forEach((box) => box.addEventListener("filled", paint));
  paint();
  return el("p", { className: "coloring" }, el("label", {}, "color: ", select), legend);
}

function paintTokens(box, { name }, color) {
  const values = box.values[name] ?? [], mask = box.values.loss_mask;
  for (const token of box.querySelectorAll(".token")) {
    const at = token.dataset.at, value = values[at];
    const isShown = value !== undefined && value !== null && (mask?.[at] !== false || name === "loss_mask");
    token.classList.toggle("bad", isShown && typeof value === "string"); // not finite
    token.style.backgroundColor = isShown && typeof value !== "string" ? color(value) : "";
  }
}

// Shows the values of the token at the pointer at the bottom of the page; a click keeps one, arrow keys move on.
export function watch(query) {
  const boxes = document.querySelectorAll(".box"), response = document.querySelector(".response");
  const detail = document.getElementById("detail");
  let kept = null;
  const keep = (token) => {
    kept?.classList.remove("kept");
    kept = token;
    if (token) show(token);
    kept?.classList.add("kept");
    const isLinked = token?.closest(".box") === response; // `at` is of the first response
    history.replaceState(null, "", withQuery({ at: isLinked ? token.dataset.at : null }));
  };
  const show = (token) => {
    detail.replaceChildren(...facts(token.closest(".box"), Number(token.dataset.at)));
    detail.hidden = false;
  };
  for (const box of boxes) {
    box.onpointerover = (event) => { if (event.target.dataset.at) show(event.target); };
    box.onpointerleave = () => { if (kept) show(kept); else detail.hidden = true; };
    box.onclick = (event) => { if (event.target.dataset.at) keep(event.target === kept ? null : event.target); };
  }
  addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !kept || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    const next = tokenAt(kept.closest(".box"), Number(kept.dataset.at) + move);
    if (next) { event.preventDefault(); keep(next); next.scrollIntoView({ block: "nearest" }); }
  });
  const first = query.has("at") && response ? tokenAt(response, Number(query.get("at"))) : null;
  if (first) { keep(first); first.scrollIntoView({ block: "center" }); }
}

const tokenAt = (box, at) => box.querySelector(`.token[data-at="${at}"]`);

function facts({ row, sequence, values }, at) {
  const fact = (name, value) => el("span", { className: "fact" }, el("b", {}, name), " ", value);
  const own = Object.entries(values).map(([name, each]) => fact(name, shown(each[at])));
  const text = sequence.token_texts ? [fact("text", visible(JSON.stringify(sequence.token_texts[at])))] : [];
  const first = sequence.num_tokens - sequence.ids.length; // of a prompt whose beginning was left out
  const place = sequence === row.prompt ? ["prompt token", first + at] : ["token", at];
  return [fact("row", row.row), fact(place[0], shown(place[1])), fact("id", sequence.ids[at]), ...text, ...own];
}
