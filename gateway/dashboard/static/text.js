// Figures as people read them, always with their unit, and elements made without any HTML text.

export function element(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Only what changed is touched, so that a selection or a reader's place stays. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function tokens(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 10_000) return value.toLocaleString("en");
  return value < 1_000_000 ? `${(value / 1_000).toFixed(value < 100_000 ? 1 : 0)}k` : `${(value / 1_000_000).toFixed(1)}M`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.00005) return "0 ms";
  if (value < 0.0995) return `${(value * 1_000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${(value * 1_000).toFixed(0)} ms`;
  return value < 99.95 ? `${value.toFixed(value < 9.995 ? 2 : 1)} s` : `${Math.round(value / 60)} min`;
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${Math.round(share * 100)} %`;
}

export function clock(at) {
  return new Date(at * 1_000).toLocaleTimeString("en-GB");
}

/** A replica as people call it: its URL without the scheme. */
export function shortName(url) {
  return url.replace(/^https?:\/\//, "");
}

/** The message of an answer that is no 2xx. */
export async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `HTTP ${response.status} ${text.slice(0, 200)}`;
  }
}
