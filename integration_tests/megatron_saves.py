"""Checkpoints of a loop on megatron-core alone, gated as adapters/megatron/README.md describes."""

from __future__ import annotations

import pathlib
import queue
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from scout_megatron.sites import unwrapped

from integration_tests.megatron_cases import RankResult
from integration_tests.megatron_results import digest
from scout_core.decision.labels import Choice, Failure, Label
from scout_core.integration.gate_service import GateService
from scout_core.integration.restoring import restore
from scout_core.integration.session import Session


class Saves:
    """Weights in Megatron's torch_dist format, in one folder per step."""

    def __init__(self, session: Session, folder: pathlib.Path, chunks: list[Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gate: GateService = session.open_gate(folder)
        self._folder = folder
        self._chunks = chunks
        self._digests: dict[int, str] = {}
        # Megatron would spawn a server for it; in a synchronous save this process alone uses it.
        filesystem_async._results_queue = queue.Queue()
        assert restore(self._gate, self._load).num_checkpoints == 0

    def save(self, step: int, result: RankResult) -> None:
        """Save after a step, if the gate allows it."""
        path = self._folder / f"step-{step}"
        label = self._gate.begin_save(step, str(path)).label
        result.saved[step] = label.value
        if label in (Label.CONDEMNED, Label.REFUSED):
            return
        if self._gate.rank == 0:
            path.mkdir()
        self._gate.settle()  # all ranks see the folder
        dist_checkpointing.save(self._state(), str(path))
        self._digests[step] = self._digest()
        self._gate.add_pending(step, str(path), lambda: "")
        self._gate.settle()

    def go_back(self, result: RankResult) -> None:
        """Load what the gate chooses after a corruption, and tell whether it is what was saved."""
        chosen = restore(self._gate, self._load, Failure.SDC, accept_uncertified=True).choice
        assert chosen.step is not None, chosen.why
        result.went_back_to = chosen.step
        result.is_restored = self._digest() == self._digests[chosen.step]

    def _load(self, choice: Choice) -> None:
        state = dist_checkpointing.load(self._state(), choice.path)
        for index, chunk in enumerate(self._chunks):
            unwrapped(chunk).load_state_dict(state[f"model{index}"])

    def _state(self) -> dict[str, Any]:
        return {
            f"model{index}": _sharded(chunk, index if len(self._chunks) > 1 else None)
            for index, chunk in enumerate(self._chunks)
        }

    def _digest(self) -> str:
        return digest([p.data for chunk in self._chunks for p in chunk.parameters()])


def _sharded(chunk: Any, stage: int | None) -> Any:
    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    return unwrapped(chunk).sharded_state_dict()
