#!/usr/bin/env python3
"""What the installed vLLM knows, for the planner's test: `{"version", "flags", "variables"}` as JSON on stdout."""

import json

import vllm
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def flags() -> set[str]:
    """Without the `--no-` forms, and those that only print."""
    options = {
        option.removeprefix("--").replace("_", "-")
        for action in make_arg_parser(FlexibleArgumentParser())._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    negated = {name for name in options if name.startswith("no-") and name.removeprefix("no-") in options}
    return options - negated - {"help"}


if __name__ == "__main__":
    print(
        json.dumps(
            {"version": vllm.__version__, "flags": sorted(flags()), "variables": sorted(envs.environment_variables)}
        )
    )
