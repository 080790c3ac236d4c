"""Run an unchanged script with SCOUT: `torchrun ... -m scout_megatron pretrain_gpt.py ... --scout`.

Without an option that begins with `--scout`, or `--help`, nothing of SCOUT is loaded. Without a
script, `--help` shows SCOUT's options alone: Megatron's own fails in 0.18.2.
"""

from __future__ import annotations

import argparse
import pathlib
import runpy
import sys

USAGE = "torchrun ... -m scout_megatron pretrain_gpt.py ... --scout"
HELP = ("-h", "--help")


def main(argv: list[str]) -> None:
    """Run the script as `python script arguments...` would.

    Args:
        argv: script and its arguments.
    """
    if not argv:
        raise SystemExit(f"scout: no script named; use: {USAGE}")
    if argv[0] in HELP:
        _show_options()
        return
    script = pathlib.Path(argv[0])
    if not script.is_file():
        raise SystemExit(f"scout: script {argv[0]!r} is not a file; use: {USAGE}")
    sys.argv = argv
    sys.path[0] = str(script.resolve().parent)
    if any(arg.startswith("--scout") or arg in HELP for arg in argv[1:]):
        _watched(argv[0])
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _show_options() -> None:
    from scout_megatron.options import add_options

    add_options(argparse.ArgumentParser(usage=USAGE, add_help=False)).print_help()


def _watched(script: str) -> None:
    from scout_core.errors import ScoutError
    from scout_megatron.training import watch

    try:
        watch()
        runpy.run_path(script, run_name="__main__")
    except ScoutError as error:
        raise SystemExit(f"scout: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
