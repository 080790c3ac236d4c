"""Run an unchanged script with SCOUT armed: `torchrun ... -m scout_deepspeed.run train.py ...`."""

from __future__ import annotations

import pathlib
import runpy
import sys

from scout_core.errors import ScoutError


def main(argv: list[str]) -> None:
    """Run the script as `python script arguments...` would.

    Args:
        argv: script and its arguments.

    Raises:
        ScoutError: no script was named, or it does not exist.
    """
    if not argv:
        raise ScoutError("no script named; use: torchrun ... -m scout_deepspeed.run train.py ...")
    script = pathlib.Path(argv[0])
    if not script.is_file():
        raise ScoutError(f"script {argv[0]!r} is not a file; name the script that torchrun ran")
    sys.argv = argv
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
