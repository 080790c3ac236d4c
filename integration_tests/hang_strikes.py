"""What can happen to one process in the middle of training."""

from __future__ import annotations

import ctypes
import os
import signal

import torch.distributed as dist

from integration_tests.hang_jobs import Trainer, elsewhere


def happens(what: str, trainer: Trainer) -> None:
    """The faulty rank is struck in the middle of training."""
    for step in trainer.steps(100_000):
        dist.all_reduce(trainer.x)
        if trainer.faulty and step == 5:
            _STRIKES[what]()


def spin() -> None:
    """Spin in Python."""
    while True:
        pass


def keep_the_gil() -> None:
    """Stay in one C call that does not give the GIL up."""
    ctypes.PyDLL(None).sleep(3600)


_STRIKES = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": elsewhere,
    "spin": spin,
    "GIL kept": keep_the_gil,
}
