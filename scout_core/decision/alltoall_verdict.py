"""Who damaged the payload of an all-to-all replay.

Every element carries its rank pair, so damage is known by pair. One pair accuses a sender, a
receiver and what lies between them alike. Only a rank that is in every damaged pair, together with
different partners, is named: its partners exchange sound parts with each other meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Culprit, Incident, Kind, name_ranks
from scout_core.decision.topology import Topology

REASON = "SDC_ALLTOALL"
Pair = tuple[int, int]
"""Global ranks of sender and receiver."""


class Exchanged(NamedTuple):
    """What one group found when it replayed its all-to-all, and when it repeated it."""

    ranks: tuple[int, ...]  # the group, ascending
    damaged: frozenset[Pair]
    repeats: int
    reproduced: int  # repeats that were damaged too


def culprit_of(damaged: Collection[Pair]) -> int | None:
    """Return the one rank that explains all damaged pairs, if there is one."""
    common = set.intersection(*(set(pair) for pair in damaged)) if damaged else set()
    partners = {rank for pair in damaged for rank in pair} - common
    own = any(sender == receiver for sender, receiver in damaged)
    return next(iter(common)) if len(common) == 1 and (own or len(partners) > 1) else None


def to_incidents(
    found: Sequence[Exchanged], topology: Topology, devices: Mapping[int, str], step: int
) -> tuple[Incident, ...]:
    """Describe every group whose payload was damaged.

    Args:
        devices: name by global rank.
    """
    return tuple(_incident(each, topology, devices, step) for each in found if each.damaged)


def _incident(
    found: Exchanged, topology: Topology, devices: Mapping[int, str], step: int
) -> Incident:
    rank = culprit_of(found.damaged) if found.reproduced else None
    culprits: tuple[Culprit, ...] = ()
    if rank is not None:
        device, place = devices.get(rank, ""), topology.expert[rank]
        culprits = (Culprit(rank, topology.hosts[rank], device, place, "all-to-all"),)
    pairs = sorted(found.damaged)
    shown = ", ".join(f"{sender} -> {receiver}" for sender, receiver in pairs[:4])
    again = f"reproduced {found.reproduced}/{found.repeats}"
    if culprits:
        message = (
            f"{name_ranks(culprits)} has a part in every damaged payload of an all-to-all among "
            f"ranks {list(found.ranks)} at step {step} ({shown}; {again}); "
            "replace the machine and restart from the verified checkpoint"
        )
    else:
        message = (
            f"an all-to-all among ranks {list(found.ranks)} delivered other bytes than were sent "
            f"at step {step} ({shown}; {again}), and sender, receiver or link may be at fault; "
            "diagnose the network between them, restart from the verified checkpoint"
        )
    return Incident(
        kind=Kind.SDC,
        reason=REASON,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=message,
        step=step,
        culprits=culprits,
        peer_group=found.ranks,
        evidence={
            "damaged": [list(pair) for pair in pairs],
            "reproduced": found.reproduced,
            "repeats": found.repeats,
        },
        action=Action.REPLACE_MACHINE if culprits else Action.DIAGNOSE_NETWORK,
    )
