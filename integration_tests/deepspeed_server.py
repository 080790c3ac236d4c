"""Import DeepSpeed once in the fork server of the tests, without its just-in-time builds.

On a CPU `init_distributed` compiles `deepspeed_shm_comm` (about a minute, once per cache folder),
which training over gloo does not need. DeepSpeed asks `deepspeed.ops.__compatible_ops__` first, a
dict that keeps what is written to it: with False there it uses gloo alone and compiles nothing.
"""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

for _name in (
    # `deepspeed.initialize` imports this one, and torch._inductor with it.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.moe.layer",
    "scout_deepspeed.attach",
):
    importlib.import_module(_name)
