"""Import Megatron once, then fork the ranks of each job: 1-3 s a job instead of 10-25.

Started by `megatron_harness.MegatronServer` as a process of its own, because other frameworks must
not see Megatron's CPU shim, and because a second version of megatron-core runs beside the installed
one. Reads pickled jobs from stdin, writes pickled outcomes to stdout.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from typing import BinaryIO

from integration_tests import megatron_shim
from integration_tests.torchtitan_server import run_job


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one job after the other until stdin is closed."""
    megatron_shim.install()
    from integration_tests.megatron_rank import run_rank

    if importlib.util.find_spec("megatron.training") is not None:
        importlib.import_module("integration_tests.megatron_pretrain")
    pickle.dump("ready", answers)
    answers.flush()
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(run_job(job, run_rank), answers)
        answers.flush()


if __name__ == "__main__":
    to_parent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not mix with the answers
    serve(sys.stdin.buffer, to_parent)
