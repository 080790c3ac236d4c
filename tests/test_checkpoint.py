"""Saving and restoring through the gate, with DCP on real ranks."""

from __future__ import annotations

import contextlib
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scout_core.config import ScoutConfig
from scout_core.decision.labels import Label
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.checkpoint import Manager, open_checkpoint
from scout_core.integration.dcp_storage import DcpStorage
from scout_core.integration.restore_state import StateDict, TrainingState
from scout_core.integration.restoring import NoTrustedCheckpoint
from scout_core.integration.saves import Job
from scout_core.integration.trust_record import TrustStore
from scout_core.testing import run_ranks

RANKS = 2


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A run's folder, in memory where there is one: the speed of a disk is not tested here."""
    shared = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield pathlib.Path(folder)


class Trainer:
    """A tiny job whose state is easy to tell: after n steps every run has the same parameters."""

    def __init__(
        self,
        run: pathlib.Path,
        wrap: str = "ddp",
        config: dict[str, Any] | None = None,
        storage: Callable[[pathlib.Path], Manager] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if wrap == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.phases: list[str] = []
        exchange = GroupExchange(torch.device("cpu"), timeout_s=15)
        settings = {"memory_dir": str(run / "memory"), **(config or {})}
        values = {"checkpoint": settings, "hang": {"checkpoint_timeout_s": 15}}
        self.checkpoint = open_checkpoint(
            run / "checkpoints" if storage is None else storage(run / "checkpoints"),
            exchange,
            Job(2),
            ScoutConfig.parse(values, "this test"),
            TrainingState(self.model, self.optimizer),
            self.emit,
            self.phase,
        )
        self.service = self.checkpoint.service
        self.step = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield
        self.phases.append("step")

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def state_dict(self) -> StateDict:
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "step": self.step,
        }

    def train(self, outcomes: str, save: str = "sync") -> list[Label]:
        """One step, check and save per letter: c clean, x sdc, s straggler, i inconclusive."""
        words = {"c": "clean", "x": "sdc", "s": "straggler", "i": "inconclusive", "h": "hang"}
        labels = []
        for letter in outcomes:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(4, 6, generator=generator)
            self.optimizer.zero_grad()
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.service.record(self.step, self.step % 2, words[letter])
            write = self.checkpoint.save if save == "sync" else self.checkpoint.async_save
            labels.append(write(self.step, self.state_dict()))
        return labels

    def state(self) -> list[float]:
        """All parameters and second moments, exactly."""
        moments = [self.optimizer.state[p]["exp_avg_sq"] for p in self.model.parameters()]
        return numbers([*self.model.parameters(), *moments])


def numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [float(x) for tensor in whole for x in tensor.detach().flatten()]


def labels_in(run: pathlib.Path) -> dict[int, str]:
    entries = TrustStore(run / "checkpoints").load().checkpoints
    return {entry.step: entry.label.value for entry in entries}


def disturbed_and_undisturbed(rank: int, run: str, wrap: str, save: str) -> Any:
    trainer = Trainer(pathlib.Path(run), wrap)
    trainer.train("cccccc", save)
    trainer.step = trainer.checkpoint.restore("sdc")
    step = trainer.step
    trainer.train("c" * (8 - step), save)
    trainer.checkpoint.close()
    other = Trainer(pathlib.Path(run) / "other", wrap)
    other.train("cccccccc")
    other.checkpoint.close()
    return step, trainer.state(), other.state()


@pytest.mark.parametrize(("wrap", "save"), [("ddp", "sync"), ("fsdp2", "async")])
def test_going_back_to_the_verified_gives_the_state_of_an_undisturbed_run(
    run: pathlib.Path, wrap: str, save: str
) -> None:
    for step, disturbed, undisturbed in run_ranks(
        RANKS, disturbed_and_undisturbed, str(run), wrap, save
    ):
        assert step == 4
        assert disturbed == undisturbed
    assert not (run / "memory").exists()


def save_in_memory_and_on_disk(rank: int, run: str) -> Any:
    trainer = Trainer(pathlib.Path(run))
    labels = trainer.train("ccccc")
    return [label.value for label in labels]


def test_the_latest_lies_in_memory_and_the_cycles_checkpoint_on_disk(run: pathlib.Path) -> None:
    labels = run_ranks(RANKS, save_in_memory_and_on_disk, str(run))
    assert labels == [["unproven", "candidate", "unproven", "candidate", "unproven"]] * RANKS
    record = TrustStore(run / "checkpoints").load()
    places = {entry.step: entry.path for entry in record.checkpoints}
    assert set(places) == {2, 4, 5}  # step 1 and 3 lay in memory and are no longer the latest
    assert [places[2], places[4]] == ["step-00000002", "step-00000004"]
    assert pathlib.Path(places[5]).is_relative_to(run / "memory")
    chosen = run_ranks(RANKS, restore_in_new_processes, str(run), "straggler")
    assert chosen[0][0] == 5
    again = TrustStore(run / "checkpoints").load()
    assert [(entry.step, entry.path) for entry in again.checkpoints][-1] == (5, "step-00000005")
    assert again.failure.value == "none"


def restore_in_new_processes(rank: int, run: str, failure: str | None) -> Any:
    trainer = Trainer(pathlib.Path(run))
    trainer.train("")
    step = trainer.checkpoint.restore(failure)
    trainer.checkpoint.close()
    return step, trainer.checkpoint.restored, trainer.state()


class FailsOnOneRank:
    """State that one rank cannot write."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __reduce__(self) -> Any:
        if self.fails:
            raise OSError(28, "no space left on device")
        return (FailsOnOneRank, (False,))


def fail_to_save(rank: int, run: str, faulty: int, memory: str) -> Any:
    trainer = Trainer(pathlib.Path(run), config={"memory_dir": memory})
    trainer.train("cccc")
    broken = {**trainer.state_dict(), f"extra-{rank}": FailsOnOneRank(rank == faulty)}
    with pytest.raises(CheckpointException) as raised:
        trainer.checkpoint.save(5, broken)
    trainer.step = 5
    labels = trainer.train("c")
    step = trainer.checkpoint.restore("none")
    events = [event for event, _ in trainer.events]
    return sorted(raised.value.failures), labels[0].value, step, events


@pytest.mark.parametrize("memory", ["", "memory"])
def test_a_save_that_fails_on_one_rank_raises_on_all_and_leaves_the_former(
    run: pathlib.Path, memory: str
) -> None:
    faulty = random.randrange(RANKS)
    place = memory and str(run / memory)
    for failed, label, step, events in run_ranks(RANKS, fail_to_save, str(run), faulty, place):
        assert failed == [faulty]
        assert (label, step) == ("unproven", 6)
        assert "save_failed" in events
        assert ("memory_checkpoints_off" in events) == bool(memory)
    assert 5 not in labels_in(run)
    assert not list(run.rglob("*.partial"))


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_after_a_corruption_nothing_is_written(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("cccc")
    assert trainer.train("xc") == [Label.CONDEMNED, Label.CONDEMNED]
    trainer.checkpoint.service.close()  # old ones are removed in the background
    written = {path.name for path in run.rglob("step-*")}
    assert written
    assert max(written) == "step-00000004"
    assert [event for event, _ in trainer.events] == ["save_refused"] * 2


@pytest.mark.usefixtures("alone")
def test_the_hang_observer_is_told_of_every_save_and_load(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("c")
    trainer.checkpoint.restore("none")
    assert trainer.phases == ["checkpoint", "step"] * 2


@pytest.mark.usefixtures("alone")
def test_a_new_run_starts_at_0_and_one_without_a_proof_says_so(run: pathlib.Path) -> None:
    assert Trainer(run).checkpoint.restore() == 0
    trainer = Trainer(run)
    trainer.train("ccc")
    with pytest.raises(NoTrustedCheckpoint, match=r"none of 2 checkpoints .*scout ckpt list"):
        trainer.checkpoint.restore("sdc")
    assert trainer.checkpoint.restore("sdc", start_over=True) == 0
    assert set(labels_in(run).values()) == {"abandoned"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("clean", "step"), [(True, 5), (False, 2)])
def test_after_a_hang_a_replay_of_the_catalogue_decides(
    run: pathlib.Path, clean: bool, step: int
) -> None:
    trainer = Trainer(run)
    trainer.train("ccccc")
    at_5 = trainer.state()
    seen: list[bool] = []

    def sweep() -> bool:
        seen.append(trainer.state() == at_5)
        return clean

    trainer.train("h")
    assert trainer.checkpoint.restore("hang", sweep=sweep) == step
    assert seen == [True]  # what is replayed is the newest checkpoint's state
    assert (trainer.state() == at_5) is clean


@pytest.mark.usefixtures("alone")
def test_after_a_hang_without_a_replay_the_proven_is_taken(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("ccccch")
    assert trainer.checkpoint.restore("hang") == 2


@pytest.mark.usefixtures("alone")
def test_a_state_dict_that_forgets_values_is_refused(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("cc")
    fresh = torch.optim.AdamW(trainer.model.parameters())
    partial = {"model": trainer.model.state_dict(), "optim": fresh.state_dict(), "step": 0}
    with pytest.raises(ScoutError, match=r"optim\.state\.0\.exp_avg"):
        trainer.checkpoint.restore("none", partial)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", ["nested", "stateful", "bare", "canonical"])
def test_model_and_optimizer_come_back_from_any_layout(run: pathlib.Path, layout: str) -> None:
    trainer = Trainer(run)
    trainer.train("cc")
    model, optimizer = trainer.model, trainer.optimizer
    names, moments = get_state_dict(model, optimizer)
    state: StateDict = {
        "nested": {**trainer.state_dict(), "schedule": {"lr": [0.1, 0.2]}, "rng": torch.ones(3)},
        "stateful": {"net": model, "opt": optimizer},
        "bare": model.state_dict(),
        "canonical": {"m": names, "o": moments},
    }[layout]
    wanted, groups = trainer.state(), optimizer.state_dict()["param_groups"]
    trainer.checkpoint.save(3, state)
    trainer.checkpoint.close()
    fresh = Trainer(run)
    assert fresh.checkpoint.restore() == 3
    parameters = sum(p.numel() for p in model.parameters())
    assert numbers(fresh.model.parameters()) == wanted[:parameters]
    if layout != "bare":
        assert fresh.state() == wanted
        assert fresh.optimizer.state_dict()["param_groups"] == groups
    rest = fresh.checkpoint.restored
    if layout == "nested":
        assert rest["step"] == 2
        assert rest["schedule"] == {"lr": [0.1, 0.2]}
        assert torch.equal(rest["rng"], torch.ones(3))
    else:
        assert rest == {}


@pytest.mark.usefixtures("alone")
def test_objects_with_a_state_are_filled_in_place(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("ccc")
    wanted = trainer.state()
    trainer.checkpoint.save(4, {"net": trainer.model, "opt": trainer.optimizer})
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.optimizer.state.clear()
    trainer.model(torch.ones(1, 6)).sum().backward()
    trainer.optimizer.step()
    state = {"net": trainer.model, "opt": trainer.optimizer}
    assert trainer.checkpoint.restore("straggler", state) == 4
    assert trainer.state() == wanted


@pytest.mark.usefixtures("alone")
def test_what_a_kill_left_half_written_is_cleared_at_the_next_start(run: pathlib.Path) -> None:
    left = run / "checkpoints" / "step-00000009.partial"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    other = run / "checkpoints" / "mine.partial"
    other.mkdir()
    Trainer(run)
    assert not left.exists()
    assert other.exists()


class MemoryIsFull(DcpStorage):
    """A manager on a machine whose memory file system has no space left."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(timeout_s=15)
        self.folder = folder

    def save(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        if "memory" in folder.parts:
            folder.mkdir()
            raise OSError(28, "No space left on device")
        super().save(state_dict, folder)


@pytest.mark.usefixtures("alone")
def test_when_memory_is_full_the_latest_goes_to_disk(run: pathlib.Path) -> None:
    trainer = Trainer(run, storage=MemoryIsFull)
    assert trainer.train("ccc") == [Label.UNPROVEN, Label.CANDIDATE, Label.UNPROVEN]
    events = [event for event, _ in trainer.events]
    assert events.count("memory_checkpoints_off") == 1
    paths = [entry.path for entry in TrustStore(run / "checkpoints").load().checkpoints]
    assert paths == [f"step-0000000{step}" for step in (1, 2, 3)]
    trainer.checkpoint.service.close()
    assert not list(run.rglob("*.partial"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("memory", ["", "/proc/nowhere"])
def test_without_memory_all_goes_to_disk_and_only_the_last_ones_stay(
    run: pathlib.Path, memory: str
) -> None:
    trainer = Trainer(run, config={"memory_dir": memory, "keep_last": 1})
    trainer.train("c" * 9)
    trainer.checkpoint.close()
    assert labels_in(run) == {6: "verified", 7: "unproven", 8: "candidate", 9: "unproven"}
    folders = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert folders == [f"step-{step:08d}" for step in labels_in(run)]


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_done_again_overwrites_nothing(run: pathlib.Path) -> None:
    trainer = Trainer(run)
    trainer.train("cccccc")
    trainer.step = trainer.checkpoint.restore("sdc")
    assert trainer.step == 4
    trainer.train("cc")
    entries = TrustStore(run / "checkpoints").load().checkpoints
    assert [entry.path for entry in entries if entry.step == 6] == [
        "step-00000006",
        "step-00000006.1",
    ]
    assert [entry.label.value for entry in entries if entry.step == 6] == [
        "abandoned",
        "candidate",
    ]


@pytest.mark.usefixtures("alone")
def test_a_candidate_that_was_saved_before_its_check_is_copied_to_disk(
    run: pathlib.Path,
) -> None:
    trainer = Trainer(run)
    trainer.service.record(1, 0, "clean")
    trainer.checkpoint.save(2, trainer.state_dict())
    trainer.service.record(2, 1, "clean")
    trainer.checkpoint.save(3, trainer.state_dict())
    places = {e.step: e.path for e in TrustStore(run / "checkpoints").load().checkpoints}
    assert places[2] == "step-00000002"
    assert labels_in(run)[2] == "candidate"
    assert (run / "checkpoints" / "step-00000002" / ".metadata").exists()
