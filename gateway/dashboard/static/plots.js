// Lines over the last quarter of an hour, drawn by hand. The pointer or the arrow keys read single points.
import { clock, element, put } from "./text.js";

const SPAN_SECONDS = 900;
const GAP_SECONDS = 12; // points are 5 s apart: more is a gap, and no line
const HEIGHT = 132;
const EDGE = { left: 46, right: 10, top: 8, bottom: 20 };

export class Plot {
  /** `series`: [{name, kind, of: point => number | null}]. `top`: fixed, or null for what the figures need. */
  constructor({ title, series, format, top, area = false }) {
    Object.assign(this, { title, series, format, top, area, points: [], now: 0, cursor: null });
    this.read = element("span", { class: "read", role: "status" });
    this.svg = element("svg:svg", { role: "img", tabindex: 0 });
    const keys = series.map((one) => element("span", { class: `key ${one.kind}` }, one.name));
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, title), ...keys, this.read), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.pointTo(null));
    this.svg.addEventListener("blur", () => this.pointTo(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  show(points, now) {
    this.points = points;
    this.now = now;
    this.draw();
  }

  get width() {
    return this.svg.clientWidth || 600;
  }

  x(at) {
    return EDGE.left + (1 - (this.now - at) / SPAN_SECONDS) * (this.width - EDGE.left - EDGE.right);
  }

  y(value, top) {
    return HEIGHT - EDGE.bottom - Math.min(1, value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  draw() {
    const seen = this.points.filter((point) => this.now - point[0] < SPAN_SECONDS);
    const values = seen.flatMap((point) => this.series.map((one) => one.of(point)).filter((value) => value !== null));
    const top = this.top ?? roundUp(Math.max(0.02, ...values));
    const parts = [...this.axes(top)];
    for (const one of this.series) parts.push(...this.line(one, seen, top));
    if (!values.length) {
      parts.push(element("svg:text", { x: this.width / 2, y: HEIGHT / 2 - 4, "text-anchor": "middle" }, "nothing yet"));
    }
    const at = this.points[this.cursor]?.[0];
    if (at) parts.push(element("svg:line", { class: "cursor", x1: this.x(at), x2: this.x(at), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.told(seen));
    this.svg.replaceChildren(...parts);
    this.tell();
  }

  *axes(top) {
    const right = this.width - EDGE.right;
    for (const share of [0, 0.5, 1]) {
      const y = this.y(share * top, top);
      yield element("svg:line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y });
      yield element("svg:text", { x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, this.format(share * top));
    }
    for (const minutes of [15, 10, 5, 0]) {
      const anchor = minutes === 15 ? "start" : minutes === 0 ? "end" : "middle";
      const x = this.x(this.now - minutes * 60);
      yield element("svg:text", { x, y: HEIGHT - 5, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now");
    }
  }

  *line({ kind, of }, points, top) {
    let run = [];
    const runs = [];
    for (const point of points) {
      const value = of(point);
      if (value === null) continue;
      if (run.length && point[0] - run.at(-1)[2] > GAP_SECONDS) runs.push(run), (run = []);
      run.push([this.x(point[0]), this.y(value, top), point[0]]);
    }
    if (run.length) runs.push(run);
    const base = HEIGHT - EDGE.bottom;
    for (const one of runs) {
      const path = one.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      if (this.area && one.length > 1) {
        yield element("svg:path", { class: `area ${kind}`, d: `${path}L${one.at(-1)[0].toFixed(1)} ${base}L${one[0][0].toFixed(1)} ${base}Z` });
      }
      if (one.length > 1) yield element("svg:path", { class: `series ${kind}`, d: path });
      else yield element("svg:circle", { class: `dot ${kind}`, cx: one[0][0], cy: one[0][1], r: 2.5 });
    }
  }

  pointAt(offset) {
    let best = null;
    this.points.forEach((point, index) => {
      const far = Math.abs(this.x(point[0]) - offset);
      if (this.has(point) && (best === null || far < best.far)) best = { index, far };
    });
    this.pointTo(best && best.far < 40 ? best.index : null);
  }

  pointTo(index) {
    if (index === this.cursor) return;
    this.cursor = index;
    this.draw();
  }

  key(event) {
    const some = this.points.map((point, index) => (this.has(point) ? index : -1)).filter((index) => index >= 0);
    if (!some.length) return;
    const place = this.cursor === null ? some.length : some.indexOf(this.cursor);
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: some.length - 1 }[event.key];
    if (event.key === "Escape") this.pointTo(null);
    if (to === undefined) return;
    event.preventDefault();
    this.pointTo(some[Math.max(0, Math.min(some.length - 1, to))]);
  }

  has(point) {
    return this.series.some((one) => one.of(point) !== null);
  }

  tell() {
    const point = this.points[this.cursor];
    put(this.read, point ? `${clock(point[0])}  ${this.figures(point)}` : "");
  }

  figures(point) {
    return this.series.map((one) => `${one.name} ${one.of(point) === null ? "–" : this.format(one.of(point))}`).join("  ");
  }

  told(points) {
    const last = points.findLast((point) => this.has(point));
    const what = `${this.title}, last 15 minutes`;
    return last ? `${what}. At ${clock(last[0])}: ${this.figures(last)}. Arrow keys read single points.` : `${what}: nothing yet`;
  }
}

/** The next of 1, 2, 5, 10, ... */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
