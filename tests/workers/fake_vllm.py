#!/usr/bin/env python3
"""Stands in for the `vllm` command: two processes, `/health` on --port, and ways to misbehave, by the model's name.

`serve MODEL --host H --port P`: prints the ids of both processes, then answers 200. GET of /end ends the leader and
leaves its child. Models: `ok`; `silent` (never opens its port); `broken` (prints why and exits 3); `stubborn` (ignores
SIGTERM); `wild` (its child leads a session of its own); `loud` (prints one long line, a progress bar and bytes that are
no text). `--version` prints FAKE_VERSION, and the file ENGINE_LOG names is printed before the port opens.
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/end":
            os._exit(4)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(os.environ.get("FAKE_VERSION", "0.32.0+cpu"))
        return
    model = sys.argv[2]
    if model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The engine: outlives a leader that is killed, as vLLM's does for seconds or for ever.
    engine = subprocess.Popen(["sleep", "300"], start_new_session=model == "wild")
    print(f"pids {os.getpid()} {engine.pid} colour={os.environ.get('COLOUR')}", flush=True)
    if model == "broken":
        print("CUDA out of memory, say", file=sys.stderr, flush=True)
        engine.kill()
        sys.exit(3)
    if model == "loud":
        sys.stdout.buffer.write(b"x" * 200_000 + b"\nbar 10%\rbar 100%\r\nbad \xff byte\n")
        sys.stdout.flush()
    if "ENGINE_LOG" in os.environ:
        print(Path(os.environ["ENGINE_LOG"]).read_text(encoding="utf-8"), file=sys.stderr, flush=True)
    if model == "silent":
        threading.Event().wait()
    http.server.ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


main()
