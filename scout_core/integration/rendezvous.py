"""How the observer agents of a job find each other: once, at the start, through the job's store.

Rank 0 gathers one contact per rank and tells the lowest rank of each node who is on it; those
start the agents, and the public keys go the same way. Traffic grows with the number of ranks, not
with its square. The store is not used again: it may be gone when a hang is to be explained.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

from scout_core.errors import ScoutError
from scout_core.evidence.ring import compress_ranks, expand_ranks
from scout_core.observer.contact import Contact
from scout_core.observer.plan import NUM_HUBS, HubAddress, Node
from scout_core.observer.wire import endpoint_of

_turns = itertools.count()  # every rank starts its watches in the same order
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class Neighbours:
    """What the lowest rank of a node is told by rank 0."""

    nodes: tuple[Node, ...]
    index: int
    """Which of the nodes is this one."""
    contacts: tuple[Contact, ...]
    """Trainers of this node."""

    @property
    def node(self) -> Node:
        """This node."""
        return self.nodes[self.index]

    @property
    def carries_hub(self) -> bool:
        """Its agent carries a hub."""
        return self.index < NUM_HUBS


class Rendezvous:
    """One meeting of all ranks; every step ends by the same deadline."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = PrefixStore(f"scout/hang/{next(_turns)}", store)
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = time.monotonic() + timeout_s

    def meet(self, contact: Contact, host: str) -> Neighbours | None:
        """Tell the others how to reach this trainer.

        Args:
            host: name of this machine.

        Returns:
            What the node's lowest rank needs to start the agent; None for every other rank.

        Raises:
            ScoutError: a rank did not come in time.
        """
        address = _address() if self._world_size > 1 else LOOPBACK
        mine = {"host": host, "address": address, "contact": contact.to_json()}
        self._set(f"contact/{self._rank}", mine)
        if self._rank == 0:
            self._place_all()
        told = self._get(f"place/{self._rank}")
        if not told:
            return None
        nodes = tuple(Node(**{**n, "ranks": expand_ranks(n["ranks"])}) for n in told["nodes"])
        contacts = tuple(Contact.from_json(plain) for plain in told["contacts"])
        return Neighbours(nodes, told["index"], contacts)

    def share_agent(self, place: Neighbours, public_key: str, port: int) -> None:
        """Tell the other nodes how to reach this one's agent; port 0 when it carries no hub."""
        endpoint = endpoint_of(place.node.address, port) if port else ""
        self._set(f"agent/{place.index}", {"endpoint": endpoint, "public_key": public_key})

    def share_failure(self, place: Neighbours, reason: str) -> None:
        """Tell the other nodes that this one has no agent."""
        self._set(f"agent/{place.index}", {"failed": reason})

    def hubs(self, place: Neighbours) -> tuple[HubAddress, ...]:
        """Return the hubs that started, the leading one first.

        Raises:
            ScoutError: none did.
        """
        told = [self._get(f"agent/{index}") for index in range(min(NUM_HUBS, len(place.nodes)))]
        found = tuple(
            HubAddress(index, **agent) for index, agent in enumerate(told) if "failed" not in agent
        )
        if not found:
            raise ScoutError(f"no observer hub started: {told[0]['failed']}")
        return found

    def agent_keys(self, place: Neighbours) -> tuple[str, ...]:
        """Return the public keys of all agents that started; only hubs need them."""
        told = [self._get(f"agent/{node.index}") for node in place.nodes]
        return tuple(agent["public_key"] for agent in told if "failed" not in agent)

    def _place_all(self) -> None:
        told = [self._get(f"contact/{rank}") for rank in range(self._world_size)]
        by_host: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            by_host.setdefault(each["host"], []).append(rank)
        nodes = [
            {"index": index, "host": host, "address": told[ranks[0]]["address"], "ranks": ranks}
            for index, (host, ranks) in enumerate(by_host.items())
        ]
        plain = [{**node, "ranks": compress_ranks(tuple(node["ranks"]))} for node in nodes]
        for node in nodes:
            contacts = [told[rank]["contact"] for rank in node["ranks"]]
            place = {"nodes": plain, "index": node["index"], "contacts": contacts}
            leader, *others = node["ranks"]
            self._set(f"place/{leader}", place)
            for rank in others:
                self._set(f"place/{rank}", None)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        left_s = max(0.001, self._deadline_s - time.monotonic())
        try:
            self._store.wait([key], datetime.timedelta(seconds=left_s))
        except RuntimeError as error:
            raise ScoutError(f"the observer's start waited in vain for {key}: {error}") from None
        return json.loads(self._store.get(key))


def host_name(hosts: Sequence[str], rank: int) -> str:
    """Return the name of this machine: as the topology knows it, or as it calls itself."""
    return (hosts[rank] if rank < len(hosts) else "") or socket.gethostname()


def _address() -> str:
    """Return the address by which other nodes of the job reach this one."""
    master = os.environ.get("MASTER_ADDR", "")
    port = int(os.environ.get("MASTER_PORT") or 1)
    try:
        family, _, _, _, target = socket.getaddrinfo(
            master or socket.gethostname(), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(target)  # sends nothing: asks the kernel for the route
            return str(route.getsockname()[0])
    except OSError:
        return LOOPBACK
