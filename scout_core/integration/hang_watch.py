"""The out-of-band hang watch of one trainer: everything that `enable_resiliency` starts for it.

The trainer publishes (ring, collectives), its node's agent watches, a hub judges.
None of it ever raises into training or makes a peer wait: what cannot be started is said in one
event, "hang_cover_lost", and the job goes on without cover.
"""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import torch
from torch._C._distributed_c10d import Store

from scout_core.config import HangConfig
from scout_core.decision.snapshots import Phase
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence import collectives, flight_recorder, progress
from scout_core.evidence.progress import Publisher, Undo
from scout_core.evidence.ring import CLOSED, EXITING, RUNNING
from scout_core.integration.agent_process import AgentProcess
from scout_core.integration.rendezvous import Neighbours, Rendezvous, host_name
from scout_core.integration.responder import Responder
from scout_core.observer.contact import Contact
from scout_core.observer.limits import Limits
from scout_core.observer.plan import Plan, Start
from scout_core.report.events import RunDir

START_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 1.0
"""How long the lowest rank of a node waits at its end for the agent to end first."""
MIN_BEAT_S: Final = 0.2
MAX_BEAT_S: Final = 4.0
BEATS_PER_LIMIT: Final = 8
PHASES: Final = {"step": Phase.UNKNOWN, **{phase.value: phase for phase in Phase}}
"""What `HangWatch.phase` understands."""


class HangWatch:
    """Publishes this trainer's progress and keeps its node's observer agent running.

    Made by `start`, which all ranks call together; also a context manager. The methods are for
    the training thread.
    """

    _running: ClassVar[HangWatch | None] = None

    def __init__(self, rank: int, run_dir: RunDir) -> None:
        """Prepare an unstarted watch; use `start`."""
        self._rank = rank
        self._run_dir = run_dir
        self._pid = os.getpid()
        self._publisher = Publisher(rank)
        self._agent: AgentProcess | None = None
        self._undo: list[Undo] = []
        self._closed = False
        self._blind = False
        self._trace_socket = ""
        self._pauses: list[AbstractContextManager[None]] = []
        self.lost = ""
        """Why there is no hang cover; empty while there is."""
        self._responder = Responder(threading.get_ident(), self._tick, self._lose_helper)

    @property
    def run_dir(self) -> pathlib.Path:
        """Folder of the run."""
        return self._run_dir.path

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        world_size: int,
        run_dir: RunDir,
        config: HangConfig,
        store: Store,
        topology: Topology | None = None,
        job: str = "",
        device: str = "",
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start watching; all ranks call it together, at the same point of the program.

        Args:
            store: any store that all ranks share; used during this call only.
            topology: gives addresses and host names; ranks on the same host share an agent.
            timeout_s: for the whole call; without all ranks by then the job has no hang cover.
        """
        watch = cls(rank, run_dir)
        cls._running = watch
        watch._observe()
        try:
            rendezvous = Rendezvous(store, rank, world_size, timeout_s)
            host = host_name(topology.hosts if topology is not None else (), rank)
            place = rendezvous.meet(watch._contact(device), host)
            if place is not None:
                watch._start_agent(place, rendezvous, limits_of(config), topology, job)
        except (ScoutError, OSError, RuntimeError) as error:
            watch._lose(str(error))
        return watch

    @classmethod
    def is_running(cls) -> bool:
        """Tell whether a watch of this process has been started and not closed."""
        return cls._running is not None

    def phase(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        """Publish a phase for a block: "data", "evaluation", "checkpoint", "step", ...

        Raises:
            ScoutError: there is no such phase.
        """
        if name not in PHASES:
            raise ScoutError(f"phase {name!r} does not exist; it is one of {', '.join(PHASES)}")
        return self._publisher.during(PHASES[name], detail)

    def step(self, number: int) -> None:
        """Publish that optimizer step `number` has ended; the first one ends initialisation."""
        self._publisher.end_step(number)

    def boundary(self, detail: str = "") -> None:
        """Publish that the training thread has come this far."""
        self._publisher.boundary(self._publisher.ring.text(detail))

    def pause(self) -> None:
        """Say that the job is idle on purpose: no silence counts until `resume`."""
        pause = self._publisher.during(Phase.IDLE)
        pause.__enter__()
        self._pauses.append(pause)

    def resume(self) -> None:
        """End the last `pause`; without one, nothing happens."""
        if self._pauses:
            self._pauses.pop().__exit__(None, None, None)

    def watch_layers(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Publish forward and backward of these modules, by qualified name."""
        self._undo.append(progress.watch_layers(self._publisher, layers))

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish the start of each optimizer step."""
        self._undo.append(progress.watch_optimizer(self._publisher, optimizer))

    def watch_loader(self, loader: Iterable[Any]) -> None:
        """Publish the phase "data" while the loop waits for a batch of this loader."""
        self._undo.append(progress.watch_loader(self._publisher, loader))

    def fail(self, error: BaseException) -> None:
        """Publish that this trainer ends by an exception."""
        if not self._closed and os.getpid() == self._pid:
            self._publisher.fail(error)

    def close(self) -> None:
        """Stop watching and put everything back as it was; also done at exit."""
        self._end(CLOSED)

    def _end(self, state: int) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        type(self)._running = None
        atexit.unregister(self._at_exit)
        while self._undo:
            self._undo.pop()()
        if self._publisher.ring.ended == RUNNING:
            self._publisher.ring.end(state)
        self._responder.close()
        if self._agent is not None:
            self._agent.close(CLOSE_TIMEOUT_S)
        self._publisher.ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _observe(self) -> None:
        """Install what publishes; each part can be taken away again."""
        try:
            self._undo.append(collectives.observe(self._publisher))
        except ScoutError as error:
            self._emit("collectives_not_observed", reason=str(error))
            self._serve_flight_recorder()
        self._undo.append(_on_uncaught(self.fail))
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """The process ends without `close`: its exit code will tell how."""
        self._end(EXITING)

    def _serve_flight_recorder(self) -> None:
        """Let torch's own record stand in where SCOUT does not see the operations."""
        folder = tempfile.mkdtemp(prefix="scout-")  # private: mode 0700
        self._undo.append(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        path = f"{folder}/trace"
        server = flight_recorder.serve(path)
        if server is not None:
            self._trace_socket = path
            self._undo.append(server.shutdown)

    def _contact(self, device: str) -> Contact:
        return Contact(
            rank=self._rank,
            pid=self._pid,
            ring=self._publisher.ring.descriptor,
            requests=self._responder.requests,
            replies=self._responder.replies,
            training_thread=threading.get_native_id(),
            training_ident=threading.get_ident(),
            helper_thread=self._responder.thread_id,
            dump_signal=self._responder.dump_signal,
            internal=progress.INTERNAL,
            device=device,
            trace_socket=self._trace_socket,
        )

    def _start_agent(
        self,
        place: Neighbours,
        rendezvous: Rendezvous,
        limits: Limits,
        topology: Topology | None,
        job: str,
    ) -> None:
        beat_s = beat_of(limits)
        start = Start(
            index=place.index,
            host=place.node.host,
            address=place.node.address,
            run_dir=str(self._run_dir.path.resolve()),
            contacts=place.contacts,
            limits=limits,
            beat_s=beat_s,
            hub=place.carries_hub,
        )
        try:
            agent = AgentProcess(start, self._lose)
        except (ScoutError, OSError) as error:
            rendezvous.share_failure(place, str(error))
            raise
        rendezvous.share_agent(place, agent.public_key, agent.port)
        hub = place.carries_hub
        plan = Plan(
            index=place.index,
            beat_s=beat_s,
            hubs=rendezvous.hubs(place),
            nodes=place.nodes if hub else (),
            agent_keys=rendezvous.agent_keys(place) if hub else (),
            job=job,
            topology=topology if hub else None,
        )
        agent.go(plan)
        self._agent = agent

    def _tick(self) -> None:
        """On the helper thread, a few times a second."""
        agent = self._agent
        if agent is not None and not self._closed:
            agent.tick()
        if self._publisher.blind and not self._blind:
            self._blind = True
            self._emit("collectives_not_observed", reason=self._publisher.blind)

    def _lose_helper(self, error: Exception) -> None:
        self._lose(f"the helper thread ended: {type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self._emit("hang_cover_lost", reason=reason)

    def _emit(self, event: str, **fields: Any) -> None:
        self._run_dir.emit(event, rank=self._rank, step=self._publisher.step, **fields)


def limits_of(config: HangConfig) -> Limits:
    """Translate the configuration into limits per phase."""
    return Limits(
        step_s=config.stall_timeout_s,
        initialize_s=config.initialize_timeout_s,
        data_s=config.data_timeout_s or config.stall_timeout_s,
        evaluation_s=config.evaluation_timeout_s,
        checkpoint_s=config.checkpoint_timeout_s,
    )


def beat_of(limits: Limits) -> float:
    """Return the seconds between two heartbeats of an agent."""
    return min(MAX_BEAT_S, max(MIN_BEAT_S, limits.shortest_s / BEATS_PER_LIMIT))


def _on_uncaught(hook: Callable[[BaseException], None]) -> Undo:
    """Call a hook with the exception that ends this process; returns the undo."""
    original = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        hook(error)
        original(kind, error, traceback)

    def remove() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = original

    sys.excepthook = excepthook
    return remove
