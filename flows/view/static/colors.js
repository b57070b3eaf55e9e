// Colors of values, translucent so that they suit light and dark pages.

const MORE = [240, 120, 30], LESS = [40, 130, 240], SIZE = [150, 80, 230];
const LABELS = [[40, 130, 240], [240, 120, 30], [40, 160, 70], [150, 80, 230], [220, 60, 110], [20, 150, 160], [170, 130, 0], [130, 130, 130]];

const rgb = ([red, green, blue], alpha) => `rgb(${red} ${green} ${blue} / ${alpha.toFixed(3)})`;
const shade = (share) => 0.65 * Math.sqrt(Math.min(1, Math.max(0, share))); // small values stay visible

// Returns a function from a value to a CSS color, "" for none.
export function painter(coloring) {
  if (coloring.scale === "category") return (value) => rgb(labelColor(value), 0.4);
  const { low, high } = coloring;
  if (low === null) return () => "";
  if (coloring.scale === "signed") {
    const size = Math.max(Math.abs(low), Math.abs(high));
    return (value) => value && size ? rgb(value > 0 ? MORE : LESS, shade(Math.abs(value) / size)) : "";
  }
  const far = high <= 0 ? low : high, near = high <= 0 ? high : low; // far from 0 is strong
  return (value) => far === near ? "" : rgb(SIZE, shade((value - near) / (far - near)));
}

function labelColor(value) {
  if (typeof value === "boolean") return value ? LABELS[2] : LABELS[7];
  return LABELS[Math.abs(value) % LABELS.length];
}

// Returns the values of a legend, from the lowest to the highest.
export function samples({ scale, low, high }, values) {
  if (scale === "category") return [...new Set(values)].sort((one, other) => one - other).slice(0, 12);
  if (low === null) return [];
  if (low === high) return [low];
  const all = [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
  return scale === "signed" && low < 0 && high > 0 ? [low, low / 2, 0, high / 2, high] : all;
}

// Returns colorings of several rows as one, each with the range of all.
export function merged(lists) {
  const found = new Map();
  for (const coloring of lists.flat()) {
    const known = found.get(coloring.name);
    const ends = [known, coloring].filter((each) => each && each.low !== null);
    found.set(coloring.name, { ...coloring,
      low: ends.length ? Math.min(...ends.map((each) => each.low)) : null,
      high: ends.length ? Math.max(...ends.map((each) => each.high)) : null });
  }
  return [...found.values()];
}
