"""The progress ring and what a trainer publishes in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.snapshots import Phase
from scout_core.errors import ScoutError
from scout_core.evidence import ring as layout
from scout_core.evidence.progress import Publisher, watch_layers, watch_loader, watch_optimizer
from scout_core.evidence.ring import RingReader, compress_ranks, expand_ranks
from scout_core.evidence.ring_writer import RingWriter

RANKS = st.lists(st.integers(0, 20_000), max_size=40)


def read(publisher: Publisher | RingWriter) -> RingReader:
    ring = publisher.ring if isinstance(publisher, Publisher) else publisher
    return RingReader.open(f"/proc/{os.getpid()}/fd/{ring.descriptor}")


@given(RANKS)
def test_ranks_survive_their_short_form(ranks: list[int]) -> None:
    assert expand_ranks(compress_ranks(tuple(ranks))) == tuple(ranks)


@given(st.integers(0, 100), st.integers(2, 5000), st.integers(1, 64))
def test_a_strided_group_of_any_size_is_a_few_bytes(first: int, size: int, stride: int) -> None:
    ranks = tuple(range(first, first + size * stride, stride))
    assert len(compress_ranks(ranks)) < 30
    assert expand_ranks(compress_ranks(ranks)) == ranks


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**31), st.text()), max_size=700))
def test_a_reader_sees_the_last_records_as_they_were_published(
    records: list[tuple[bool, int, str]],
) -> None:
    writer = RingWriter(rank=7)
    order = writer.add_order(writer.add_group("dp", (7, 9), "gloo"))
    operations, progress = [], None
    for boundary, value, words in records:
        if boundary:
            writer.progress(value, writer.text(words), value, writer.text(words[::-1]))
            progress = (value, words, words[::-1])
        else:
            writer.enter(order, value, writer.text(words), numel=value, tag=-value)
            operations.append((len(operations) + 1, value, words, -value))
    state = read(writer).state()
    assert state.rank == 7
    kept = [(o.number, o.sequence, o.operation, o.tag) for o in state.operations]
    assert kept == operations[-layout.OPERATION_SLOTS :]
    if progress is not None:
        assert (state.progress.step, state.progress.phase, state.progress.detail) == progress
    if operations:
        assert state.orders[0].entered == operations[-1][1]
    writer.close()


WRITER = """
import sys, time
from scout_core.evidence.ring_writer import RingWriter
writer = RingWriter(0)
order = writer.add_order(writer.add_group("g", (0,), "gloo"))
names = [writer.text(f"text {i}") for i in range(7)]
print(writer.descriptor, flush=True)
i = 0
while True:
    i += 1
    writer.progress(i, names[i % 7], 3 * i, names[i % 7])
    writer.complete(writer.enter(order, i, names[i % 7], numel=5 * i, tag=-i), order, i)
"""


@pytest.fixture
def busy_writer() -> Iterator[subprocess.Popen[str]]:
    """A torch-free process that publishes as fast as it can; prints its ring's descriptor."""
    child = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    yield child
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def assert_consistent(reader: RingReader) -> int:
    progress = reader.progress()
    assert progress.operation == 3 * progress.step % 2**32
    assert progress.step == 0 or progress.phase == progress.detail == f"text {progress.step % 7}"
    for operation in reader.state().operations[-20:]:
        i = operation.sequence
        expected = (f"text {i % 7}", 5 * i, -i)
        assert (operation.operation, operation.numel, operation.tag) == expected
    return progress.step


def test_a_reader_beside_a_busy_writer_accepts_no_torn_record(
    busy_writer: subprocess.Popen[str],
) -> None:
    assert busy_writer.stdout is not None
    reader = RingReader.open(f"/proc/{busy_writer.pid}/fd/{busy_writer.stdout.readline().strip()}")
    deadline, last = time.monotonic() + 20, 0
    while last < 20_000 and time.monotonic() < deadline:
        newest = assert_consistent(reader)
        assert newest >= last
        last = newest
    assert last >= 20_000


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.011])
def test_a_killed_writer_leaves_a_readable_ring(
    busy_writer: subprocess.Popen[str], after_s: float
) -> None:
    assert busy_writer.stdout is not None
    reader = RingReader.open(f"/proc/{busy_writer.pid}/fd/{busy_writer.stdout.readline().strip()}")
    deadline = time.monotonic() + 20
    while reader.progress().step < 1 + after_s * 1e5 and time.monotonic() < deadline:
        pass
    os.kill(busy_writer.pid, signal.SIGKILL)
    busy_writer.wait()
    assert assert_consistent(reader) > 0


def test_threads_publish_without_losing_a_record() -> None:
    writer = RingWriter(0)
    order = writer.add_order(writer.add_group("g", (0,), "gloo"))
    name = writer.text("op")

    def publish() -> None:
        for i in range(100):
            writer.complete(writer.enter(order, i, name), order, i)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    state = read(writer).state()
    assert state.counters.operations == state.counters.completions == 400
    assert [operation.number for operation in state.operations] == list(range(1, 401))
    assert all(operation.done_ns for operation in state.operations)
    writer.close()


def test_the_reader_needs_neither_torch_nor_pydantic_nor_numpy() -> None:
    code = (
        "import sys, scout_core.evidence.ring, scout_core.evidence.ring_writer;"
        "print(sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert found.stdout.strip() == "[]"


def test_texts_and_groups_that_do_not_fit_are_counted_not_raised() -> None:
    writer = RingWriter(0)
    fits = writer.text("fits")
    assert writer.text("x" * layout.SIZE_BYTES) == 0
    assert writer.text("fits") == fits != 0
    indices = [writer.add_group(str(i), (0,), "gloo") for i in range(layout.GROUP_SLOTS + 1)]
    assert indices[-1] == -1
    assert writer.add_order(indices[-1]) == -1
    assert read(writer).state().lost == 3
    writer.close()


def test_memory_that_is_no_ring_is_refused_with_the_rule() -> None:
    with pytest.raises(ScoutError, match="same version"):
        RingReader(b"x" * layout.SIZE_BYTES)
    with pytest.raises(ScoutError, match="same version"):
        RingReader(b"")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(rank=3)
    yield made
    made.ring.close()


def test_everything_before_the_first_step_counts_as_initialisation(publisher: Publisher) -> None:
    reader = read(publisher)
    with publisher.during(Phase.DATA):
        assert reader.progress().phase == "initialize"
    publisher.enter_loop_phase(Phase.FORWARD, 0)
    assert reader.progress().phase == "initialize"
    with publisher.during(Phase.CHECKPOINT):
        assert reader.progress().phase == "checkpoint"
    publisher.end_step(1)
    assert reader.progress().phase == "unknown"
    with publisher.during(Phase.DATA):
        assert reader.progress().phase == "data"


def evaluate_and_raise(publisher: Publisher, seen: list[str]) -> None:
    with publisher.during(Phase.EVALUATION):
        with publisher.during(Phase.DATA):
            seen.append(read(publisher).progress().phase)
        seen.append(read(publisher).progress().phase)
        raise KeyError


def test_phases_nest_and_come_back_even_when_the_block_raises(publisher: Publisher) -> None:
    publisher.end_step(1)
    seen: list[str] = []
    with pytest.raises(KeyError):
        evaluate_and_raise(publisher, seen)
    assert seen == ["data", "evaluation"]
    assert read(publisher).progress().phase == "unknown"


def test_the_coordinate_is_the_step_and_the_boundary_in_it(publisher: Publisher) -> None:
    publisher.end_step(41)
    first = read(publisher).progress()
    publisher.boundary(publisher.ring.text("here"))
    second = read(publisher).progress()
    assert (first.step, second.step, second.detail) == (41, 41, "here")
    assert second.operation == first.operation + 1


def test_an_exception_that_ends_a_trainer_is_in_its_ring(publisher: Publisher) -> None:
    publisher.fail(RuntimeError("loss is nan\nsecond line"))
    state = read(publisher).state()
    assert (state.end, state.end_reason) == (layout.FAILED, "RuntimeError: loss is nan")


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_layers_publish_forward_and_backward_and_leave_gradients_alone(
    publisher: Publisher,
) -> None:
    expected, model = gradients(small_model()), small_model()
    publisher.end_step(1)
    remove = watch_layers(publisher, {"first": model[0], "last": model[2]})
    before = read(publisher).counters().progress
    found = gradients(model)
    assert read(publisher).counters().progress - before == 4
    progress = read(publisher).progress()
    assert (progress.phase, progress.detail) == ("backward", "backward first")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_optimizer_publishes_its_step(publisher: Publisher) -> None:
    publisher.end_step(1)
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    remove = watch_optimizer(publisher, optimizer)
    optimizer.step()
    assert read(publisher).progress().phase == "optimizer"
    remove()
    before = read(publisher).counters()
    optimizer.step()
    assert read(publisher).counters() == before


class Recording(torch.utils.data.Dataset[int]):
    """Notes the phase that is visible while an item is loaded."""

    def __init__(self, reader: RingReader) -> None:
        self.reader, self.phases = reader, list[str]()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.phases.append(self.reader.progress().phase)
        return index


def test_waiting_for_a_batch_is_the_phase_data_and_working_on_it_is_not(
    publisher: Publisher,
) -> None:
    publisher.end_step(1)
    reader = read(publisher)
    dataset = Recording(reader)
    loader: Any = torch.utils.data.DataLoader(dataset)
    original = type(loader)
    remove = watch_loader(publisher, loader)
    assert isinstance(loader, original)
    between = [reader.progress().phase for _ in loader]
    assert dataset.phases == ["data"] * 3
    assert between == ["unknown"] * 3
    assert reader.progress().detail == "data loader is exhausted"
    remove()
    assert type(loader) is original
