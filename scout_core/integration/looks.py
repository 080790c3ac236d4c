"""What a session looks at besides replays: communication, and how evenly the work is spread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from scout_core.config import ScoutConfig
from scout_core.evidence.clock import Clock
from scout_core.evidence.exchange import Exchange
from scout_core.integration.checker import Told
from scout_core.integration.framework import Framework
from scout_core.integration.job_facts import JobFacts
from scout_core.integration.probe import Probe
from scout_core.integration.rule_memory import Learner
from scout_core.integration.workload import Workload


class Look(Learner, Protocol):
    """Called at the end of every optimizer step, on all ranks together."""

    def on_step_end(self, step: int) -> Told | None:
        """Say what was seen, when something was due; collective then."""

    def close(self) -> None:
        """Take everything away."""


def open_looks(
    framework: Framework,
    facts: JobFacts,
    exchange: Exchange,
    clock: Clock,
    config: ScoutConfig,
    slow_ranks: Callable[[], Collection[int]],
) -> list[Look]:
    """Begin what the configuration asks for; collective.

    Args:
        slow_ranks: ranks known to compute slowly: their groups are late, not slow.
    """
    looks: list[Look] = []
    topology, device = facts.topology, framework.device
    if config.communication.probe_interval_steps:
        probe = Probe(exchange, clock, topology, facts.devices, config, device, slow_ranks)
        if probe.waves:
            looks.append(probe)
    if config.workload.interval_steps and topology.world_size > 1:
        looks.append(Workload(exchange, topology, framework, config))
    return looks
