"""What the hang observer costs a trainer, a node and the network."""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from scout_core.config import HangConfig
from scout_core.evidence import collectives
from scout_core.evidence.progress import Publisher
from scout_core.integration.agent_process import AgentProcess
from scout_core.integration.hang_watch import beat_of, limits_of
from scout_core.integration.responder import Responder
from scout_core.observer.contact import Contact
from scout_core.observer.plan import HubAddress, Node, Plan, Start

CALLS = 20_000
PAIRS = 15
CALLS_PER_PAIR = 400
FAST_BEAT_S = 0.1
MEASURED_S = 6.0


def main() -> None:
    """Print both tables."""
    console = Console()
    publisher = Publisher(rank=0)
    console.print(_trainer_table(publisher))
    console.print(_agent_table(publisher))


def _trainer_table(publisher: Publisher) -> Table:
    ring = publisher.ring
    order, name = ring.add_order(ring.add_group("bench", (0,), "gloo")), ring.text("all_reduce")
    number = ring.enter(order, 1, name)
    added_us = _added_by_the_observer_us(publisher)
    publish = [
        ("a boundary (layer, data, optimizer)", publisher.boundary),
        ("a collective that is entered", lambda: ring.enter(order, 1, name, numel=4)),
        ("a collective that is complete", lambda: ring.complete(number, order, 1)),
    ]
    table = Table("what", "measured", "aim", title="What the observer costs a trainer, CPU")
    for what, call in publish:
        table.add_row(f"publish {what}", f"{_median_us(call):.2f} us", "<= 1 us")
    table.add_row("observe one collective, in all", f"{added_us:.1f} us", "<= 15 us")
    table.add_row("1,000 collectives per step", f"{added_us:.1f} ms", "")
    return table


def _added_by_the_observer_us(publisher: Publisher) -> float:
    """Median difference between interleaved runs with and without the observer."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = torch.ones(8)

    def run_us(observed: bool) -> float:
        remove = collectives.observe(publisher) if observed else None
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(CALLS_PER_PAIR):
                dist.all_reduce(x)
            times.append(time.perf_counter() - begin)
        if remove is not None:
            remove()
        return min(times) / CALLS_PER_PAIR * 1e6

    differences = []
    for pair in range(PAIRS):
        order = (False, True) if pair % 2 else (True, False)
        times = {observed: run_us(observed) for observed in order}
        differences.append(times[True] - times[False])
    dist.destroy_process_group()
    return statistics.median(differences)


def _median_us(call: Callable[[], object]) -> float:
    runs, count = [], CALLS // 9
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        runs.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(runs)


def _agent_table(publisher: Publisher) -> Table:
    beat_s = beat_of(limits_of(HangConfig()))
    responder = Responder(threading.get_ident(), lambda: None, print)
    with tempfile.TemporaryDirectory() as folder:
        starts = [_start(folder, node, publisher, responder) for node in range(2)]
        times, agents = [], []
        for start in starts:
            begin = time.perf_counter()
            agents.append(AgentProcess(start, print))
            times.append(time.perf_counter() - begin)
        relay = Relay(agents[0].port)
        hubs = (HubAddress(0, f"tcp://127.0.0.1:{relay.port}", agents[0].public_key),)
        nodes = tuple(Node(n, f"host-{n}", "", (n,)) for n in range(2))
        keys = tuple(agent.public_key for agent in agents)
        for node, agent in enumerate(agents):
            agent.go(Plan(node, FAST_BEAT_S, hubs, nodes, keys))
        time.sleep(1.0)  # connected
        before, cpu = relay.total_bytes, _cpu_s(agents[0].pid)
        time.sleep(MEASURED_S)
        per_beat = (relay.total_bytes - before) / 2 / (MEASURED_S / FAST_BEAT_S)
        used = (_cpu_s(agents[0].pid) - cpu) / MEASURED_S
        sizes = [psutil.Process(agent.pid).memory_info().rss / 2**20 for agent in agents]
        publisher.ring.end(1)
        for agent in agents:
            agent.close(5.0)
    responder.close()
    per_hour = per_beat * 3600 / beat_s
    table = Table("what", "measured", title="One agent per node")
    table.add_row("start, until it watches", f"{statistics.median(times) * 1e3:.0f} ms")
    table.add_row("memory with a hub / without", f"{sizes[0]:.0f} / {sizes[1]:.0f} MiB")
    table.add_row("bytes per hour and agent, both ways, healthy", f"{per_hour / 1e3:.0f} kB")
    table.add_row(f"CPU of an agent with a hub, heartbeat {FAST_BEAT_S} s", f"{used:.2%} of a core")
    return table


def _start(folder: str, node: int, publisher: Publisher, responder: Responder) -> Start:
    contact = Contact(
        rank=0,
        pid=os.getpid(),
        ring=publisher.ring.descriptor,
        requests=responder.requests,
        replies=responder.replies,
        training_thread=threading.get_native_id(),
        training_ident=threading.get_ident(),
        helper_thread=responder.thread_id,
    )
    return Start(
        index=node,
        host=f"host-{node}",
        address="127.0.0.1",
        run_dir=folder,
        contacts=(contact,),
        limits=limits_of(HangConfig()),
        beat_s=FAST_BEAT_S,
        hub=node == 0,
    )


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Relay(threading.Thread):
    """A TCP relay in front of a hub that counts the bytes of all connections."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.total_bytes = 0
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.start()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    caller, callee = source.accept()[0], socket.create_connection(self._target)
                    selector.register(caller, selectors.EVENT_READ, callee)
                    selector.register(callee, selectors.EVENT_READ, caller)
                    continue
                try:
                    data = source.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                self.total_bytes += len(data)
                if data:
                    key.data.sendall(data)
                else:
                    selector.unregister(source)


if __name__ == "__main__":
    main()
