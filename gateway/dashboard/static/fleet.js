// Replicas as rows, renewed in place; and their drain button, which asks the admin listener.
import { NONE, count, element, percent, problem, put, seconds, shortName, tokens } from "./text.js";

const FULL = 0.85; // above it engines begin to preempt

export class Fleet {
  constructor(admin) {
    this.admin = admin;
    this.rows = new Map();
    this.body = document.querySelector("#fleet tbody");
    this.box = document.querySelector("#key-box");
    this.key = "";
    put(
      document.querySelector("#drain-note"),
      admin ? "" : "To drain replicas from here, the gateway needs an admin listener ([admin] in its configuration).",
    );
    document.querySelector("#key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = document.querySelector("#key").value;
      this.box.close("go");
    });
    document.querySelector("#key-no").addEventListener("click", () => this.box.close(""));
  }

  show(replicas) {
    const names = new Set(replicas.map((one) => one.replica));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.line.remove();
        this.rows.delete(name);
      }
    }
    for (const [place, one] of replicas.entries()) {
      const row = this.rows.get(one.replica) ?? this.add(one.replica);
      if (this.body.children[place] !== row.line) this.body.insertBefore(row.line, this.body.children[place] ?? null);
      this.renew(row, one);
    }
    document.querySelector("#no-replicas").hidden = replicas.length > 0;
    document.querySelector("#fleet").hidden = replicas.length === 0;
  }

  add(name) {
    const cells = {};
    const cell = (key, label, kind) => {
      cells[key] = element("span");
      return element("td", { class: kind }, element("span", { class: "label", "aria-hidden": true }, label), cells[key]);
    };
    const level = (key, label, kind) => {
      cells[key] = { fill: element("span"), text: element("b"), box: element("div", { class: `level ${kind}` }) };
      cells[key].box.append(element("i", { "aria-hidden": true }, cells[key].fill), cells[key].text);
      return element("td", { class: "wide" }, element("span", { class: "label", "aria-hidden": true }, label), cells[key].box);
    };
    cells.more = element("small");
    cells.why = element("span", { class: "why" });
    cells.button = element("button", { type: "button", hidden: !this.admin });
    cells.button.addEventListener("click", () => this.drain(name));
    const line = element(
      "tr",
      {},
      element("th", { scope: "row", class: "name" }, shortName(name), cells.more, cells.why),
      element("td", {}, (cells.state = element("span", { class: "state" }))),
      level("kv", "KV cache", ""),
      cell("running", "running", "number"),
      cell("waiting", "queue", "number"),
      cell("in_flight", "in flight", "number"),
      cell("work", "booked work", "number work"),
      level("hits", "hit rate, 15 min", "hits"),
      element("td", { class: "act" }, cells.button),
    );
    const row = { line, cells };
    this.rows.set(name, row);
    return row;
  }

  renew({ line, cells }, one) {
    const state = one.draining ? "draining" : one.health;
    cells.state.dataset.state = state;
    put(cells.state, state);
    line.toggleAttribute("data-out", one.health === "ejected");
    put(cells.more, [one.engine, one.models.join(", ")].filter(Boolean).join(" · "));
    put(cells.why, one.health === "ejected" ? one.last_failure : "");
    const old = one.load_age !== null && one.load_age > 10;
    setLevel(cells.kv, old ? null : one.kv_usage);
    cells.kv.box.classList.toggle("full", one.kv_usage > FULL);
    setLevel(cells.hits, one.hit_rate);
    put(cells.running, count(old ? null : one.running));
    put(cells.waiting, count(old ? null : one.waiting));
    put(cells.in_flight, count(one.in_flight));
    put(cells.work, one.pending_tokens ? `${tokens(one.pending_tokens)} tok · ${seconds(one.pending_seconds)}` : "0 tok");
    cells.draining = one.draining;
    put(cells.button, one.draining ? "Undrain" : "Drain");
    cells.button.setAttribute("aria-label", `${cells.button.textContent} ${shortName(one.replica)}`);
  }

  async drain(name) {
    const what = this.rows.get(name).cells.draining ? "undrain" : "drain";
    if (!this.key && !(await this.askKey(name, what))) return;
    const said = document.querySelector("#drained");
    try {
      const url = `${this.admin}/warmlane/replicas/${name}/${what}`;
      const headers = { authorization: `Bearer ${this.key}` };
      const response = await fetch(url, { method: "POST", headers, credentials: "omit" });
      if (response.status === 401) this.key = "";
      said.textContent = response.ok
        ? `${shortName(name)} ${what === "drain" ? "gets no new requests; those that run there finish" : "gets requests again"}.`
        : `Not done: ${await problem(response)}`;
    } catch {
      said.textContent = `The admin listener at ${this.admin} cannot be reached from this browser. On the gateway's machine: warmlane ${what} ${shortName(name)} --url ${this.admin}`;
    }
  }

  askKey(name, what) {
    put(
      document.querySelector("#key-why"),
      what === "drain"
        ? `${shortName(name)} gets no new requests; those that run there finish. The key is kept until this page is closed.`
        : `${shortName(name)} gets requests again.`,
    );
    put(document.querySelector("#key-go"), what === "drain" ? "Drain" : "Undrain");
    document.querySelector("#key").value = "";
    this.box.returnValue = "";
    this.box.showModal();
    return new Promise((done) =>
      this.box.addEventListener("close", () => done(this.box.returnValue === "go"), { once: true }),
    );
  }
}

function setLevel({ fill, text }, share) {
  fill.style.width = `${Math.min(1, share ?? 0) * 100}%`;
  put(text, share === null || share === undefined ? NONE : percent(share));
}
