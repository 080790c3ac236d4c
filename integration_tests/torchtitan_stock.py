"""What a job of the stock entry imports in a test, by `experimental.custom_import`: one fault.

`python -m torchtitan.train` makes its Trainer in `__main__`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from integration_tests import torchtitan_flavors  # noqa: F401 -- registers the tiny flavors
from integration_tests.torchtitan_job import read_stock_fault
from integration_tests.torchtitan_rank import break_trainer

_trainer = sys.modules["__main__"].Trainer
_train_step = _trainer.train_step
_broken = read_stock_fault()


def _step_with_a_fault(self: Any, data_iterator: Any) -> None:
    if int(os.environ["RANK"]) == _broken.fault.rank and self.step - 1 == _broken.fault.step:
        break_trainer(self, _broken)
    _train_step(self, data_iterator)


_trainer.train_step = _step_with_a_fault
