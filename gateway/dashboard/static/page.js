// The live page: frames come in, parts of the page show them.
import { Decisions } from "./decisions.js";
import { DryRun } from "./dry-run.js";
import { Fleet } from "./fleet.js";
import { Plot } from "./plots.js";
import { Stream } from "./stream.js";
import { clock, count, element, percent, put, seconds } from "./text.js";

const POINTS = 180;

const fleet = new Fleet(document.querySelector("meta[name=admin]").content);
const decisions = new Decisions();
const dryRun = new DryRun();
const hits = new Plot({
  title: "Prefix-cache hit rate",
  series: [{ name: "of prompt tokens", kind: "hit", of: (point) => point[1] }],
  format: percent,
  top: 1,
  area: true,
});
const ttft = new Plot({
  title: "Time to first token",
  series: [
    { name: "median", kind: "p50", of: (point) => point[2] },
    { name: "90th percentile", kind: "p90", of: (point) => point[3] },
  ],
  format: seconds,
  top: null,
});
document.querySelector("#plots").append(hits.figure, ttft.figure);

const link = document.querySelector("#link");
const totals = {};
for (const [key, label] of [
  ["replicas", "Replicas up"],
  ["in_flight", "In flight"],
  ["waiting", "Waiting in the gateway"],
  ["hit", "Hit rate, latest"],
  ["ttft", "First token, latest median"],
  ["index", "Prefix index in use"],
]) {
  totals[key] = element("dd");
  document.querySelector("#totals").append(element("div", {}, element("dt", {}, label), totals[key]));
}

let run = null;
let version = null;
let points = [];
let last = 0;

function show(frame) {
  if (version !== null && frame.version !== version) return location.reload(); // the page of another gateway
  version = frame.version;
  if (run !== null && frame.run !== run) decisions.beginAnew(frame.started);
  run = frame.run;
  last = frame.at;
  if (frame.whole) points = frame.points;
  if (frame.point) points = [...points, frame.point].slice(-POINTS);
  document.body.classList.remove("stale");
  link.dataset.state = "live";
  put(link, "Live");
  put(document.querySelector("#about"), `${frame.version} · policy ${frame.policy} · running since ${clock(frame.started)}${frame.process && ` · of ${frame.process} alone`}`);
  showTotals(frame);
  hits.show(points, frame.at);
  ttft.show(points, frame.at);
  fleet.show(frame.replicas);
  decisions.take(frame);
  showTry(frame.replicas);
  return undefined;
}

function showTotals(frame) {
  const up = frame.replicas.filter((one) => one.health === "up" && !one.draining).length;
  put(totals.replicas, `${up} of ${frame.replicas.length}`);
  put(totals.in_flight, count(frame.in_flight));
  put(totals.waiting, count(frame.waiting));
  put(totals.hit, percent(points.findLast((point) => point[1] !== null)?.[1]));
  put(totals.ttft, seconds(points.findLast((point) => point[2] !== null)?.[2]));
  put(totals.index, percent(frame.index_blocks / Math.max(1, frame.index_capacity_blocks)));
}

/** A command to begin with, for a model that is there. */
function showTry(replicas) {
  const model = replicas.find((one) => one.models.length)?.models[0] ?? "embedded";
  dryRun.model = model;
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] });
  put(document.querySelector("#try"), `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -d '${body}'`);
}

function lost(why) {
  document.body.classList.add("stale");
  link.dataset.state = "lost";
  put(link, `No connection: ${why}. Trying again${last ? `; figures are of ${clock(last)}` : ""}`);
}

const stream = new Stream("warmlane/live", show, lost);
stream.start();
