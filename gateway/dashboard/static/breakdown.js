// Why a replica was chosen: the gateway's sentence, and each candidate's cost by its parts.
import { NONE, element, seconds, shortName, tokens } from "./text.js";

const STACK_PIXELS = 150;
const COLOURS = 8;

export function breakdown({ policy, why, ranking, candidates }) {
  const inSeconds = policy === "cache-cost";
  const all = [...new Set(ranking.flatMap((one) => Object.keys(one.parts)))];
  const parts = all.filter((part) => ranking.some((one) => one.parts[part])); // what costs nobody anything says nothing
  const dearest = Math.max(...ranking.map((one) => positive(one)), 1e-9);
  const colour = Object.fromEntries(all.map((part, index) => [part, `part-${index % COLOURS}`]));
  const heads = parts.map((part) =>
    element("th", { scope: "col", class: "number" }, element("span", { class: `swatch ${colour[part]}`, "aria-hidden": true }), part),
  );
  const table = element(
    "table",
    {},
    element("caption", { class: "unseen" }, "Cost of each candidate by parts, cheapest first"),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        element("th", { scope: "col" }, "Candidate"),
        element("th", { scope: "col", class: "number" }, inSeconds ? "Cost, s" : "Cost"),
        element("th", { "aria-hidden": true }),
        ...heads,
        element("th", { scope: "col", class: "number" }, "Cached"),
        element("th", { scope: "col", class: "number" }, "Pending"),
        element("th", { scope: "col", class: "number" }, "In flight"),
      ),
    ),
    element("tbody", {}, ...ranking.map((one, place) => row(one, place, parts, dearest, colour))),
  );
  const more = candidates > ranking.length ? ` ${candidates - ranking.length} dearer candidates are not listed.` : "";
  return [
    element("p", {}, why + more),
    element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Costs by parts" }, table),
  ];
}

function row(one, place, parts, dearest, colour) {
  const cost = (value) => element("td", { class: value ? "number" : "number nil" }, value === undefined ? NONE : value ? value.toFixed(3) : "0");
  return element(
    "tr",
    { class: place === 0 ? "chosen" : null },
    element("th", { scope: "row" }, shortName(one.replica), place === 0 ? element("span", { class: "unseen" }, " (chosen)") : null),
    cost(one.total_seconds),
    element("td", { "aria-hidden": true }, stack(one, parts, dearest, colour)),
    ...parts.map((part) => cost(one.parts[part])),
    element("td", { class: "number" }, `${tokens(one.cached_tokens)} of ${tokens(one.prompt_tokens)} tok`),
    element("td", { class: "number" }, `${tokens(one.pending_tokens)} tok`),
    element("td", { class: "number" }, String(one.in_flight)),
  );
}

function stack(one, parts, dearest, colour) {
  const drawn = element("svg:svg", { class: "stack", viewBox: `0 0 ${STACK_PIXELS} 9`, preserveAspectRatio: "none" });
  let from = 0;
  for (const part of parts) {
    const width = (Math.max(0, one.parts[part] ?? 0) / dearest) * STACK_PIXELS;
    if (width > 0.2) drawn.append(element("svg:rect", { class: colour[part], x: from, y: 0, width, height: 9 }));
    from += width;
  }
  return drawn;
}

function positive(one) {
  return Object.values(one.parts).reduce((sum, value) => sum + Math.max(0, value), 0);
}

/** What became of the request, under its costs. */
export function facts({ request_id, route, tenant, attempt, end }) {
  const all = [["request id", request_id], ["path", route]];
  if (tenant) all.push(["tenant", tenant]);
  if (attempt > 1) all.push(["attempt", String(attempt)]);
  if (end && end.outcome !== "moved") {
    all.push(["status", String(end.status || NONE)], ["waited in the gateway", seconds(end.waited_seconds)]);
    all.push(["gateway itself", seconds(end.overhead_seconds)], ["whole", seconds(end.duration_seconds)]);
    if (end.prompt_tokens !== null) {
      const cached = end.cached_tokens === null ? "" : `, ${tokens(end.cached_tokens)} of them cached`;
      all.push(["replica reported", `${tokens(end.prompt_tokens)} prompt tokens${cached}`]);
    }
    if (end.completion_tokens !== null) all.push(["answer", `${tokens(end.completion_tokens)} tokens`]);
  }
  return element(
    "p",
    { class: "facts" },
    ...all.map(([label, value]) => element("span", {}, `${label} `, element("b", {}, value))),
  );
}
