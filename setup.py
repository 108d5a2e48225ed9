"""Builds the package, with the hot modules compiled by mypyc where that is possible.

Compiled or not, the code is the same typed Python: mypyc turns it into a C extension that does one request's work in
about 40 % of the time. WARMLANE_COMPILE says when: `1` always, `0` never, `auto` (the default) where mypy and a C
compiler with Python's headers are there. Modules stay interpreted where the compiled form would not pay (they run once)
or not work (classes that other libraries inspect, as in `gateway/bodies.py`).
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.errors import CompileError

COMPILED = [
    "gateway/prompt.py",
    "gateway/series.py",
    "gateway/telemetry.py",
    *(
        f"gateway/core/{name}.py"
        for name in (
            "admission",
            "belief",
            "blocks",
            "filters",
            "flight",
            "health",
            "load",
            "model",
            "outliers",
            "ownership",
            "pickers",
            "policy",
            "prefix_index",
            "rates",
            "replica",
            "router",
            "scorers",
            "settling",
            "sharing",
        )
    ),
    *(
        f"gateway/proxy/{name}.py"
        for name in (
            "answer_framing",
            "answer_notes",
            "body_budget",
            "call",
            "exchange",
            "forwarding",
            "front_door",
            "gate",
            "http_client",
            "incoming",
            "places",
            "relay",
            "replays",
            "request_head",
            "upstream",
            "upstreams",
        )
    ),
]


def has_compiler() -> bool:
    """Whether a C file that needs Python's headers compiles here."""
    # By this name, which setuptools provides: its own errors are of the same modules only then.
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler, get_python_inc

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        compiler = new_compiler()
        customize_compiler(compiler)
        try:
            compiler.compile([str(source)], output_dir=folder, include_dirs=[get_python_inc()])
        except (CompileError, OSError):
            return False
    return True


def wants_compiled() -> bool:
    wish = os.environ.get("WARMLANE_COMPILE", "auto")
    if wish != "auto":
        return wish == "1"
    if find_spec("mypyc") is None or not has_compiler():
        print("warmlane: no mypy or no C compiler here, so the package stays interpreted", file=sys.stderr)
        return False
    return True


if wants_compiled():
    from mypyc.build import mypycify

    # -O1 in several files takes 20 s to build on two cores, and -O3 in one 37 s for the same speed.
    extensions = mypycify(["--config-file=pyproject.toml", *COMPILED], opt_level="1", debug_level="0", multi_file=True)
    setup(ext_modules=extensions, options={"build_ext": {"parallel": os.cpu_count()}})
else:
    setup()
