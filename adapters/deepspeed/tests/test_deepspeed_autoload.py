"""Autoload through torch's back-end hook: only on request, and it never breaks `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ARMED = "any(type(f).__module__ == 'scout_deepspeed.arming' for f in sys.meta_path)"


def outcome(code: str, **environment: str) -> str:
    """Standard output and error of a fresh interpreter."""
    kept = {k: v for k, v in os.environ.items() if k != "SCOUT_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("environment", "armed"),
    [({}, "False"), ({"SCOUT_AUTOLOAD": "0"}, "False"), ({"SCOUT_AUTOLOAD": "1"}, "True")],
)
def test_importing_torch_arms_only_on_request(environment: dict[str, str], armed: str) -> None:
    assert outcome(f"import sys, torch; print({ARMED})", **environment) == armed


def test_arming_imports_no_framework() -> None:
    code = "import sys, scout_deepspeed; print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    assert outcome(code) == "False False"


def test_a_failure_in_the_hook_is_said_and_goes_no_further() -> None:
    code = (
        "import sys; sys.modules['scout_deepspeed.arming'] = None\n"
        "import scout_deepspeed_autoload as a; a.hook(); print('alive')"
    )
    said = outcome(code, SCOUT_AUTOLOAD="1")
    assert "alive" in said
    assert "SCOUT_AUTOLOAD=1 did not work" in said
