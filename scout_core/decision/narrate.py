"""Turn findings into incidents: who, where, what, since when, how sure, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scout_core.decision.catalog import name_of
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Culprit, Incident, Kind, name_ranks
from scout_core.decision.replay_verdict import Finding
from scout_core.decision.topology import LayoutName, Topology

_WHAT = {
    "SDC_STATE": "holds different values in {what}",
    "SDC_AT_REST": "had {what} change between two updates, while nothing may write it,",
    "SDC_BROADCAST": "received other replay inputs than its peers",
    "SDC_GATHER": "gathered different parameters of {site}",
    "SDC_SHARD": "gathered corrupt parameters of {site}",
    "SDC_REPLAY_OUTPUT": "computes a different output of {site}",
    "SDC_REPLAY_INPUT_GRAD": "computes a different input gradient of {site}",
    "SDC_REPLAY_PARAMETER_GRAD": "computes different parameter gradients of {site}",
    "SDC_OPTIMIZER_UPDATE": "computes a different {site} update",
}


@dataclass(frozen=True)
class Scene:
    """Where and when the evidence was taken."""

    topology: Topology
    layout: LayoutName
    step: int
    site: str
    devices: Mapping[int, str]
    """Device name by global rank."""
    rows: tuple[int, ...] = ()
    """Rows per local expert that were replayed, for an expert stage."""

    @property
    def place(self) -> str:
        """The site, and at which shape."""
        return place_of(self.site, self.rows)

    @property
    def evidence(self) -> dict[str, Any]:
        """Site and shape as evidence."""
        return {"site": self.site, **({"rows": list(self.rows)} if self.rows else {})}

    def culprits(self, ranks: Sequence[int], module: str) -> tuple[Culprit, ...]:
        """Describe the ranks at fault."""
        places = self.topology.layout(self.layout)
        return tuple(
            Culprit(
                rank, self.topology.hosts[rank], self.devices.get(rank, ""), places[rank], module
            )
            for rank in ranks
        )


def place_of(site: str, rows: Sequence[int] = ()) -> str:
    """Name a site and the rows of its experts: "layers.1.experts at 2 x 16 rows"."""
    return f"{site} at {name_of(tuple(rows))} rows" if rows else site


def sdc(finding: Finding, reproduced: int, repeats: int, scene: Scene) -> Incident:
    """Describe a numerical disagreement; somebody is named only against a strict majority."""
    module = finding.what if finding.reason in ("SDC_STATE", "SDC_AT_REST") else scene.site
    culprits = scene.culprits(finding.ranks, module)
    kind = Kind.SDC if finding.comparable else Kind.NOT_COMPARABLE
    shown = scene.place if module == scene.site else module
    agree = len(finding.peers) - len(finding.ranks)
    what = _WHAT[finding.reason].format(what=finding.what, site=scene.place)
    votes = f"{agree} of {len(finding.peers)} peers agree against it, {_again(reproduced, repeats)}"
    if culprits:
        message = (
            f"{name_ranks(culprits)} {what} at step {scene.step} ({votes}); "
            "replace the machine and restart from the verified checkpoint"
        )
    else:
        message = (
            f"peers {list(finding.peers)} disagree at step {scene.step} on {shown} "
            f"({_again(reproduced, repeats)}) and nobody can be named: {finding.why}; "
            "run hardware diagnostics on all of them, restart from the verified checkpoint"
        )
    return Incident(
        kind=kind,
        reason=finding.reason,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=message,
        step=scene.step,
        culprits=culprits,
        peer_group=finding.peers,
        evidence={
            "agree": agree if culprits else 0,
            "reproduced": reproduced,
            "repeats": repeats,
            "what": finding.what,
            **scene.evidence,
            "signatures": {str(rank): value for rank, value in finding.signatures.items()},
        },
        action=Action.REPLACE_MACHINE if culprits else Action.DIAGNOSE_HARDWARE,
    )


def incoherent(finding: Finding, scene: Scene) -> Incident:
    """Describe parameters that were not their own masters cast down; no peers were asked."""
    culprits = scene.culprits(finding.ranks, finding.what)
    if culprits:
        message = (
            f"{name_ranks(culprits)} held values of {finding.what} that are not its own masters "
            f"cast down ({finding.why}; compared on this rank, no vote needed); "
            "replace the machine and restart from the verified checkpoint"
        )
    else:
        message = (
            f"ranks {list(finding.peers)} changed {finding.what} outside of the optimizer "
            f"({finding.why}); the next update undoes that: change the masters too"
        )
    return Incident(
        kind=Kind.SDC if culprits else Kind.NOT_COMPARABLE,
        reason=finding.reason,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=message,
        step=scene.step,
        culprits=culprits,
        peer_group=finding.peers,
        evidence={"what": finding.what, "seen": finding.why, "site": scene.site},
        action=Action.REPLACE_MACHINE if culprits else Action.ESCALATE,
    )


def other_work(finding: Finding, scene: Scene) -> Incident:
    """Describe ranks that did other work than their peers: never called sdc."""
    culprits = scene.culprits(finding.ranks, scene.site)
    who = name_ranks(culprits) if culprits else f"ranks {list(finding.peers)}"
    return Incident(
        kind=Kind.NOT_COMPARABLE,
        reason=finding.reason,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=(
            f"{who} did other work than the peers at step {scene.step}: {finding.why}; "
            "this is control flow, not hardware: compare the code path of these ranks"
        ),
        step=scene.step,
        culprits=culprits,
        peer_group=finding.peers,
        evidence={"site": scene.site, "why": finding.why},
        action=Action.ESCALATE,
    )


def state_differs_at_start(units: Sequence[str], peers: Sequence[int], scene: Scene) -> Incident:
    """Describe replicas that were never equal: configuration, not hardware."""
    shown = ", ".join(sorted(units)[:4])
    return Incident(
        kind=Kind.NOT_COMPARABLE,
        reason="STATE_DIFFERS_AT_START",
        status=Status.INCONCLUSIVE,
        message=(
            f"replicas {list(peers)} already differ in {shown} when first seen "
            f"(step {scene.step}); seed or load them alike; this state is not audited"
        ),
        step=scene.step,
        peer_group=tuple(peers),
        evidence={"units": sorted(units)},
        action=Action.ESCALATE,
    )


def straggler(
    ranks: Sequence[int],
    durations_s: Mapping[int, float],
    factors: Mapping[int, float],
    compares: str,
    scene: Scene,
) -> Incident:
    """Describe ranks that need longer for the same controlled work."""
    culprits = scene.culprits(ranks, scene.site)
    slow = max((factors.get(rank, float("inf")) for rank in ranks), default=float("inf"))
    return Incident(
        kind=Kind.STRAGGLER,
        reason="STRAGGLER_COMPUTE",
        status=Status.ATTRIBUTED,
        message=(
            f"{name_ranks(culprits)} needs {slow:.2f} times as long as its peers for the same "
            f"replay of {scene.place} ({compares}, step {scene.step}); check clocks, thermals and "
            "neighbours of that device; the latest checkpoint can be kept"
        ),
        step=scene.step,
        culprits=culprits,
        peer_group=tuple(sorted(durations_s)),
        evidence={
            "seconds": {str(rank): value for rank, value in sorted(durations_s.items())},
            "times_the_others": {str(rank): factors.get(rank) for rank in ranks},
            "compares": compares,
            **scene.evidence,
        },
        action=Action.REPLACE_MACHINE,
    )


def group_slowdown(
    durations_s: Mapping[int, float], factor: float, checks: int, compares: str, scene: Scene
) -> Incident:
    """Describe a whole peer group that became slower than it was: no rank stands out."""
    peers = tuple(sorted(durations_s))
    return Incident(
        kind=Kind.GROUP_SLOWDOWN,
        reason="SLOWDOWN_GROUP",
        status=Status.INCONCLUSIVE,
        message=(
            f"peers {list(peers)} all need {factor:.2f} times as long as before for the same "
            f"replay of {scene.place} ({compares}, rising for {checks} checks, step {scene.step}); "
            "look for shared causes: power, cooling, clocks, a software change; no rank is at fault"
        ),
        step=scene.step,
        peer_group=peers,
        evidence={
            "factor": factor,
            "checks": checks,
            "seconds": {str(rank): value for rank, value in sorted(durations_s.items())},
            "compares": compares,
            **scene.evidence,
        },
        action=Action.ESCALATE,
    )


def _again(reproduced: int, repeats: int) -> str:
    if not repeats:
        return "not repeated"
    return f"reproduced {reproduced}/{repeats}" if reproduced else "did not reproduce"
