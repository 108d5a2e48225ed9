"""llama.cpp's own HTTP server, from a wheel that brings it:  serve_llama.py MODEL PORT SLOTS CONTEXT [--metrics]

Runs with the Python that has xllamacpp (`install.sh`), which starts the server of llama.cpp in its own threads.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

model, port, slots, context = sys.argv[1:5]
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = ["tiny"]
params.port = int(port)
params.n_parallel = int(slots)
params.n_ctx = int(context)
params.cpuparams.n_threads = 1
params.endpoint_metrics = "--metrics" in sys.argv
params.ui = False
server = xllamacpp.Server(params)
print("ready", server.listening_address, flush=True)
signal.pause()
