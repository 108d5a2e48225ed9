"""Builds the wheel; with WARMLANE_COMPILE=1, the hot modules compiled by mypyc.

Compiled or not, the code is the same typed Python: mypyc turns it into a C extension that does one request's work in
less than half the time. Needs a C compiler and mypy. Modules stay interpreted where the compiled form would not pay
(run once) or not work (classes that other libraries inspect, as in `gateway/bodies.py`).
"""

import os

from setuptools import setup

COMPILED = [
    "gateway/prompt.py",
    "gateway/telemetry.py",
    *(
        f"gateway/core/{name}.py"
        for name in (
            "admission",
            "blocks",
            "filters",
            "flight",
            "health",
            "load",
            "model",
            "ownership",
            "pickers",
            "policy",
            "prefix_index",
            "rates",
            "replica",
            "router",
            "scorers",
        )
    ),
    *(f"gateway/proxy/{name}.py" for name in ("exchange", "front_door", "gate", "http_client", "relay", "upstream")),
]

if os.environ.get("WARMLANE_COMPILE") == "1":
    from mypyc.build import mypycify

    setup(ext_modules=mypycify(["--config-file=pyproject.toml", *COMPILED], opt_level="3", debug_level="0"))
else:
    setup()
