// The stream of decisions, newest first. It stands still while it is paused or one of them is open, so that nothing
// moves away from under a reader.
import { breakdown, facts } from "./breakdown.js";
import { NONE, clock, count, element, percent, put, seconds, shortName, tokens } from "./text.js";

const LISTED = 100;
const BAD = new Set(["failed", "unreachable", "refused", "rejected", "empty", "overdue", "moved", "draining"]);

export class Decisions {
  constructor() {
    this.list = document.querySelector("#list");
    this.pause = document.querySelector("#pause");
    this.find = document.querySelector("#find");
    this.rest = document.querySelector("#rest");
    this.known = new Map();
    this.held = [];
    this.newest = 0;
    this.pause.addEventListener("click", () => {
      this.pause.setAttribute("aria-pressed", String(!this.isPaused));
      this.letIn();
    });
    this.find.addEventListener("input", () => {
      for (const one of this.known.values()) this.sieve(one);
    });
  }

  get isPaused() {
    return this.pause.getAttribute("aria-pressed") === "true";
  }

  get stands() {
    return this.isPaused || this.list.querySelector("details[open]") !== null;
  }

  /** The gateway began anew: its numbers do too. What was seen before stays below a line. */
  beginAnew(started) {
    for (const { decision, outcome } of this.known.values()) if (!decision.end) put(outcome, "not known");
    this.known.clear();
    this.held = [];
    this.newest = 0;
    if (this.list.children.length) {
      this.list.prepend(element("li", { class: "divider" }, `The gateway started again at ${clock(started)}`));
    }
  }

  take({ decisions, ended = [], left_out = 0 }) {
    for (const decision of [...decisions].reverse()) {
      if (decision.number > this.newest) {
        this.newest = decision.number;
        this.held.push(decision);
      } else if (decision.end) {
        this.end(decision.number, decision.end);
      }
    }
    for (const { number, end } of ended) this.end(number, end);
    this.leftOut = left_out;
    this.letIn();
  }

  letIn() {
    if (!this.stands) {
      for (const decision of this.held) this.add(decision);
      this.held = [];
      while (this.list.children.length > LISTED) this.drop(this.list.lastElementChild);
    } else if (this.held.length > LISTED) {
      this.held.splice(0, this.held.length - LISTED);
    }
    const some = this.held.length === LISTED ? `${LISTED} or more` : count(this.held.length);
    const why = this.isPaused ? "paused" : "stands still while one is open";
    const left = this.leftOut ? `${count(this.leftOut)} more in the last second` : "";
    put(this.rest, this.held.length ? `${some} new: ${why}` : this.isPaused ? "paused" : left);
    document.querySelector("#no-decisions").hidden = this.list.children.length > 0;
    document.querySelector(".columns").hidden = this.list.children.length === 0;
  }

  add(decision) {
    const first = decision.ranking[0];
    const ttft = element("span", { class: "number" });
    const outcome = element("span", { class: "outcome" });
    const summary = element(
      "summary",
      {},
      element("span", {}, clock(decision.at)),
      element("span", { title: decision.replica }, shortName(decision.replica)),
      element("span", { class: "reason", "data-reason": decision.reason }, decision.reason),
      element("span", { class: "number" }, tokens(first.prompt_tokens), element("span", { class: "unit" }, " tok")),
      element("span", { class: "number" }, percent(first.prompt_tokens ? first.cached_tokens / first.prompt_tokens : null), element("span", { class: "unseen said-small" }, " cached")),
      ttft,
      element("span", { class: "soft" }, decision.model || NONE),
      outcome,
    );
    const details = element("details", {}, summary);
    const one = { decision, ttft, outcome, details, line: element("li", {}, details) };
    details.addEventListener("toggle", () => {
      this.open(one);
      this.letIn();
    });
    this.known.set(decision.number, one);
    one.line.dataset.number = decision.number;
    this.renew(one);
    this.sieve(one);
    this.list.prepend(one.line);
  }

  drop(line) {
    const one = this.known.get(Number(line.dataset.number));
    if (one?.line === line) this.known.delete(one.decision.number);
    line.remove();
  }

  end(number, end) {
    const one = this.known.get(number);
    const decision = one?.decision ?? this.held.find((held) => held.number === number);
    if (!decision || decision.end) return;
    decision.end = end;
    if (one) this.renew(one);
  }

  renew(one) {
    const { decision, ttft, outcome, details } = one;
    const end = decision.end;
    ttft.replaceChildren(end ? seconds(end.ttft_seconds) : NONE, element("span", { class: "unseen" }, " to first token"));
    put(outcome, end ? end.error || end.outcome.replace("_", " ") : "running");
    outcome.toggleAttribute("data-bad", Boolean(end) && BAD.has(end.outcome));
    if (details.open) this.open(one);
  }

  /** Its costs are made when somebody wants to see them. */
  open({ decision, details }) {
    details.querySelector(".breakdown")?.remove();
    if (details.open) details.append(element("div", { class: "breakdown" }, ...breakdown(decision), facts(decision)));
  }

  sieve({ decision, line }) {
    const wanted = this.find.value.trim().toLowerCase();
    const text = `${decision.replica} ${decision.model} ${decision.reason} ${decision.request_id} ${decision.tenant}`;
    line.hidden = wanted !== "" && !text.toLowerCase().includes(wanted);
  }
}
