"""What an agent is told at its start: its node, its trainers, and where the hubs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.ring import compress_ranks, expand_ranks
from scout_core.observer.contact import Contact
from scout_core.observer.limits import Limits

NUM_HUBS = 2
"""The first node's agent leads; the second's takes over."""


@dataclass(frozen=True)
class Node:
    """One machine of the job."""

    index: int
    """Position among the nodes, by their lowest rank."""
    host: str
    address: str
    """IP address, to tell a dead machine from a dead agent; empty when unknown."""
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """How its agent is addressed."""
        return str(self.index)


@dataclass(frozen=True)
class HubAddress:
    """Where a hub listens."""

    node: int
    """Index of the node whose agent carries it."""
    endpoint: str
    public_key: str


@dataclass(frozen=True)
class Start:
    """First message to an agent: enough to watch its trainers and to open its socket."""

    index: int
    host: str
    address: str
    run_dir: str
    contacts: tuple[Contact, ...]
    limits: Limits
    beat_s: float
    hub: bool
    port: int = 0
    """0 takes a free one; an agent that is started again gets its old one."""
    public_key: str = ""
    secret_key: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        contacts = [contact.to_json() for contact in self.contacts]
        return {**self.__dict__, "contacts": contacts, "limits": self.limits.__dict__}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        contacts = tuple(Contact.from_json(contact) for contact in plain["contacts"])
        limits = Limits.from_json(plain["limits"])
        return cls(**{**plain, "contacts": contacts, "limits": limits})


@dataclass(frozen=True)
class Plan:
    """Second message to an agent: the other nodes."""

    index: int
    """This node's."""
    beat_s: float
    hubs: tuple[HubAddress, ...]
    nodes: tuple[Node, ...] = ()
    """All of them; only hubs are told."""
    agent_keys: tuple[str, ...] = ()
    """Public keys that hubs let in."""
    job: str = ""
    topology: Topology | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        plain = {**self.__dict__, "hubs": [hub.__dict__ for hub in self.hubs]}
        plain["nodes"] = [{**n.__dict__, "ranks": compress_ranks(n.ranks)} for n in self.nodes]
        topology = self.topology
        if topology is not None:
            plain["topology"] = [topology.dense, topology.expert, topology.hosts]
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ScoutError: it is something else.
        """
        try:
            nodes = [{**n, "ranks": expand_ranks(n["ranks"])} for n in plain["nodes"]]
            topology = plain["topology"]
            return cls(
                **{
                    **plain,
                    "hubs": tuple(HubAddress(**hub) for hub in plain["hubs"]),
                    "nodes": tuple(Node(**node) for node in nodes),
                    "agent_keys": tuple(plain["agent_keys"]),
                    "topology": topology and Topology.from_coordinates(*topology),
                }
            )
        except (KeyError, TypeError) as error:
            raise ScoutError(f"observer plan cannot be read: {error!r}") from None
