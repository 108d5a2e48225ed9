#!/usr/bin/env python3
"""Stands in for the `vllm` command and lives a script: what each of its lives does, by port.

`serve MODEL ... --host H --port P`. The environment says where lives are counted (SCRIPT_DIRECTORY) and what they do
(SCRIPT, words with commas between; the last one is repeated):

- `ok`: an engine core that outlives its server, a model list, answers to chats;
- `oom-start`, `oom-load`: CUDA out of memory at once, or with the first chat; `taken`: somebody has the memory;
- `small-cache`: what vLLM 0.32 wrote (`data/`), unless `--max-model-len` is 3,168 or less;
- `crash`: ends with code 3; `slow`: never opens its port; `stubborn`: as `slow`, and ignores SIGTERM.

POST /engine-dies makes `/health` say 503 from then on, POST /hang makes all answers wait.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

OUT_OF_MEMORY = """\
(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate \
1.16 GiB. GPU 0 has a total capacity of 79.19 GiB of which 700.06 MiB is free.
"""
TAKEN = """\
ValueError: Free memory on device cuda:0 (61.5/79.19 GiB) on startup is less than desired GPU memory utilization \
(0.9, 71.27 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""
LAST_WORDS = (
    """\
  File "/venv/vllm/entrypoints/launchers/api_server/entry.py", line 195, in run_server_worker
"""
    * 60
    + """\
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
)
SMALL_CACHE = Path(__file__).with_name("data") / "vllm-0.32-cache-too-small.txt"


def flag(name: str, default: str = "") -> str:
    """The last one wins."""
    positions = [position for position, word in enumerate(sys.argv) if word == name]
    return sys.argv[positions[-1] + 1] if positions else default


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    life = ""
    is_dead = False
    resumes = threading.Event()

    def do_GET(self) -> None:
        self.resumes.wait()
        if self.path == "/v1/models":
            name = flag("--served-model-name", "scripted")
            self.answer(200, {"object": "list", "data": [{"id": name, "object": "model"}]})
        else:
            self.answer(503 if self.is_dead and self.path == "/health" else 200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/hang":
            self.resumes.clear()
        if self.path == "/engine-dies":
            Handler.is_dead = True
        if self.life == "oom-load" and self.path == "/v1/chat/completions":
            fail(OUT_OF_MEMORY + LAST_WORDS)
        time.sleep(float(os.environ.get("ANSWER_SECONDS", "0")))
        message = {"role": "assistant", "content": f"pid {os.getpid()}"}
        self.answer(200, {"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def next_life() -> str:
    lives = Path(os.environ["SCRIPT_DIRECTORY"]) / flag("--port")
    past = lives.read_text().splitlines() if lives.exists() else []
    lives.write_text("".join(f"{line}\n" for line in [*past, " ".join(sys.argv)]))
    script = os.environ["SCRIPT"].split(",")
    return script[min(len(past), len(script) - 1)]


def main() -> None:
    if "--version" in sys.argv:
        print("0.32.0")
        return
    Handler.life = life = next_life()
    Handler.resumes.set()
    if life == "crash":
        fail("it broke\n", 3)
    if life == "oom-start":
        fail(OUT_OF_MEMORY + LAST_WORDS)
    if life == "taken":
        fail(TAKEN + LAST_WORDS)
    if life == "small-cache" and int(flag("--max-model-len", "16384")) > 3_168:
        fail(SMALL_CACHE.read_text() + LAST_WORDS)
    if life == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen(["sleep", "300"])
    print(f"pids {os.getpid()} {engine.pid}", flush=True)
    if life in ("slow", "stubborn"):
        threading.Event().wait()
    http.server.ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


main()
