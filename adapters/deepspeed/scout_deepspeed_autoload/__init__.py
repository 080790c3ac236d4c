"""Arms SCOUT at the end of `import torch`, in processes that ask for it with SCOUT_AUTOLOAD=1.

torch calls `hook` as a device backend (entry point group "torch.backends"), in every process of the
environment, and turns any exception in it into a failure of `import torch`. It therefore lives in
a package of its own that imports nothing, does nothing unless it was asked, and never raises. It is
off with TORCH_DEVICE_BACKEND_AUTOLOAD=0 too, torch's own switch.
"""

from __future__ import annotations

import os
import sys

SWITCH = "SCOUT_AUTOLOAD"


def hook() -> None:
    """Arm SCOUT for DeepSpeed if the environment says SCOUT_AUTOLOAD=1."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        from scout_deepspeed.arming import arm

        arm()
    except Exception as error:  # noqa: BLE001 -- guard: it would break every `import torch`
        print(f"scout: {SWITCH}=1 did not work: {error!r}", file=sys.stderr)
