// Elements, requests and numbers. Texts only ever become text nodes: nothing of a run is read as HTML.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const link = (href, text, properties = {}) => el("a", { href, ...properties }, text);

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Returns the JSON of a path of the API; throws the server's one line of error.
export async function ask(path, parameters = {}) {
  const response = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

export const stepUrl = (run, step) => `/run/${encodeURIComponent(run)}/step/${step}`;
export const rowUrl = (run, step, row) => `${stepUrl(run, step)}/row/${row}`;
export const groupUrl = (run, step, group) => `${stepUrl(run, step)}/group/${group}`;

// Returns the page's own URL with some parameters of its query changed; null removes one.
export function withQuery(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) query.delete(name);
    else query.set(name, value);
  }
  return `${location.pathname}?${query}`;
}
