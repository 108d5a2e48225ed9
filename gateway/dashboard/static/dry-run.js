// Where would this body go, and why: the gateway's dry run.
import { breakdown } from "./breakdown.js";
import { element, problem, shortName } from "./text.js";

const PATHS = { messages: "/v1/chat/completions", input: "/v1/responses", prompt: "/v1/completions" };

export class DryRun {
  constructor() {
    this.body = document.querySelector("#body");
    this.answer = document.querySelector("#answer");
    this.model = "embedded";
    document.querySelector("#ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    document.querySelector("#example").addEventListener("click", () => {
      const messages = [{ role: "user", content: "The same beginning goes where it is cached. ".repeat(40).trim() }];
      this.body.value = JSON.stringify({ model: this.model, messages }, null, 2);
      this.body.focus();
    });
  }

  async ask() {
    const session = document.querySelector("#session").value.trim();
    const path = document.querySelector("#path").value || pathOf(this.body.value);
    const headers = { "content-type": "application/json", ...(session && { "x-session-id": session }) };
    try {
      const url = `warmlane/route?path=${encodeURIComponent(path)}`;
      const response = await fetch(url, { method: "POST", body: this.body.value, headers });
      this.show(response.ok ? found(await response.json()) : wrong(await problem(response)));
    } catch (error) {
      this.show(wrong(error instanceof TypeError ? "The gateway does not answer." : String(error.message)));
    }
  }

  show(made) {
    this.answer.replaceChildren(made);
  }
}

function found(decision) {
  const title = element("p", {}, "To ", element("b", {}, shortName(decision.replica)), ` by ${decision.policy}, `, element("span", { class: "reason", "data-reason": decision.reason }, decision.reason), ".");
  return element("div", { class: "breakdown" }, title, ...breakdown({ ...decision, candidates: decision.ranking.length }));
}

function wrong(message) {
  return element("p", { class: "wrong" }, message);
}

function pathOf(text) {
  try {
    const keys = Object.keys(JSON.parse(text));
    return PATHS[keys.find((key) => key in PATHS)] ?? PATHS.messages;
  } catch {
    return PATHS.messages;
  }
}
