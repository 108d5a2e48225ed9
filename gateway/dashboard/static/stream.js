// The stream of frames, for as long as somebody looks: it comes back when the gateway does, and rests while the page is
// hidden. `fetch` rather than EventSource, which gives up for good at the first answer that is no 200.

const SILENCE_MS = 6_000; // a frame comes each second: after this the line is dead, whatever the socket says
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 4_000;

export class Stream {
  constructor(url, onFrame, onState) {
    Object.assign(this, { url, onFrame, onState, wait: FIRST_WAIT_MS, timer: 0, control: null });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.start()));
    window.addEventListener("online", () => this.start());
  }

  start() {
    if (document.hidden) return;
    clearTimeout(this.timer);
    this.control?.abort();
    this.control = new AbortController();
    this.read(this.control).catch(() => {});
  }

  rest() {
    clearTimeout(this.timer);
    this.control?.abort();
    this.control = null;
  }

  async read(control) {
    let why = "the gateway does not answer";
    let silence = setTimeout(() => control.abort(), SILENCE_MS);
    try {
      const response = await fetch(this.url, { signal: control.signal, cache: "no-store" });
      if (response.ok) {
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
          clearTimeout(silence);
          silence = setTimeout(() => control.abort(), SILENCE_MS);
          const frames = (text + value).split("\n\n");
          text = frames.pop();
          for (const frame of frames) {
            if (control !== this.control) return;
            this.onFrame(JSON.parse(frame.slice("data: ".length)));
            this.wait = FIRST_WAIT_MS;
          }
        }
      } else {
        why = response.status === 503 ? "the gateway is not ready for it" : `HTTP ${response.status}`;
      }
    } catch {
      // the line was cut, or was silent for too long
    } finally {
      clearTimeout(silence);
      if (control === this.control) {
        this.onState(why);
        this.timer = setTimeout(() => this.start(), this.wait * (0.75 + Math.random() / 2));
        this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
      }
    }
  }
}
