"""One check, from the vote to the findings: the only place where SCOUT's collectives are ordered.

Every rank of the job runs `Check.run` at the end of the same optimizer step, and every decision in
it is taken from values that all ranks have, so all take the same way through it:

1. vote in the work group, then over the job: all enter, or nobody does;
2. replay, audit, gather the reports in the work group, judge;
3. if anybody anywhere is suspicious, repeat 2 at once; a mismatch of state is narrowed down;
4. if anything was found, every rank learns all of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scout_core.decision import replay_verdict, vote
from scout_core.decision.evidence import Signature
from scout_core.decision.origin import SPREADS, Event, Origins, Trace
from scout_core.decision.qualification import Qualification
from scout_core.decision.replay_verdict import Finding, Report
from scout_core.decision.rotation import Turn
from scout_core.decision.topology import LayoutName, Topology
from scout_core.decision.vote import Ballot, Dissent, Vote
from scout_core.evidence.exchange import Exchange, Ranks
from scout_core.evidence.folding import signature_of
from scout_core.integration.audit import Audit
from scout_core.integration.subject import Subject

ENTER = Ballot(True)
NOTHING = Qualification()


@dataclass(frozen=True)
class Repeated:
    """A finding and how often it came again at once."""

    finding: Finding
    reproduced: int
    repeats: int


@dataclass(frozen=True)
class Result:
    """What one check of one work group came to; equal on all members of the work group."""

    turn: Turn
    step: int
    site: str = ""
    rows: tuple[int, ...] = ()
    """Rows per local expert that were replayed, for an expert stage."""
    ballot: Ballot = ENTER
    found: tuple[Repeated, ...] = ()
    reports: Mapping[int, Report] = field(default_factory=dict)
    """First reports of the work group, by global rank."""
    known: Qualification = NOTHING
    shapes: str = ""
    """Shapes of the source's arguments: times of other shapes are not compared."""
    wild_anywhere: bool = False
    """Some rank of the job computed NaN or infinity, or could not replay."""
    entered: bool = False
    remark: str = ""
    """Something that went wrong in looking closer."""


class WorkGroups:
    """The groups this rank takes part in, for one layout."""

    def __init__(self, topology: Topology, layout: LayoutName, rank: int) -> None:
        mine = topology.layout(layout)[rank]
        places = topology.layout(layout)
        self.work: Ranks = tuple(
            r for r in range(topology.world_size) if places[r].work == mine.work
        )
        groups = {topology.peer_group(r, layout).ranks for r in self.work}
        self.peers: tuple[Ranks, ...] = tuple(sorted(groups))
        self.mine: Ranks = topology.peer_group(rank, layout).ranks
        self.replicas: tuple[Ranks, ...] = tuple(
            sorted({topology.replicas(r, layout) for r in self.work})
        )
        by_replica: dict[int, list[int]] = {}
        for r in self.work:
            by_replica.setdefault(places[r].d, []).append(r)
        self.gathers: tuple[Ranks, ...] = tuple(
            tuple(ranks) for ranks in by_replica.values() if len(ranks) > 1
        )
        """Ranks that gather their FSDP shards from each other: d equal, s free."""
        self.topology = topology

    @property
    def exchanges_inside(self) -> bool:
        """Some ranks of the job exchange data inside a layer: one makes the others wrong."""
        return any(len(row) > 1 for row in self.topology.rows)

    def peers_of(self, rank: int, layout: LayoutName) -> Ranks:
        """Global ranks that hold the same values as any rank of the job."""
        return self.topology.peer_group(rank, layout).ranks

    def join(self, exchange: Exchange) -> None:
        """Create the groups; collective."""
        exchange.join([self.work])
        exchange.join([self.mine])


class Check:
    """Runs one check; holds no state from one check to the next."""

    def __init__(
        self,
        exchange: Exchange,
        groups: WorkGroups,
        confirm_repeats: int,
        audit: Audit | None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a check.

        Args:
            audit: None leaves state at rest out.
            settle: see `Framework.settle`.
        """
        self._exchange = exchange
        self._groups = groups
        self._confirm_repeats = confirm_repeats
        self._audit = audit
        self._settle_updates = settle

    def run(
        self, turn: Turn, step: int, subject: Subject, known: Qualification, broken: str = ""
    ) -> Result:
        """Do the check.

        Args:
            known: what may be compared so far; new state units are armed by this check.
            broken: an internal error of this rank, or empty.
        """
        votes = self._vote(_vote_of(subject, turn, step, broken))
        ballot = vote.count(votes)
        result = Result(turn, step, votes[self._exchange.rank].site, ballot=ballot)
        if any(self._everywhere(not ballot.enter)):
            return result
        self._settle_updates()
        source = vote.source_of(self._groups.mine, turn.round)
        of_source = votes[source]
        reports = self._once(subject, source, of_source)
        known = known.with_units(reports, self._groups.replicas)
        findings = self._judge(reports, known)
        failed = any(report.missing for report in reports.values())
        wild = any(not report.finite for report in reports.values())
        suspicious, failed_anywhere, wild = self._everywhere(bool(findings), failed, wild)
        # After a NaN has spread all ranks agree on NaN: test the hardware on finite values.
        poisoned = wild and not suspicious and not failed_anywhere
        if poisoned:
            findings = self._judge(self._once(subject, source, of_source, poisoned), known)
            suspicious = any(self._everywhere(bool(findings)))
        again: list[list[Finding]] = []
        for _ in range(self._confirm_repeats if suspicious and not failed_anywhere else 0):
            repeated = self._once(subject, source, of_source, poisoned)
            again.append(self._judge(repeated, known))
        if suspicious:
            findings = self._narrow(findings)
        result = replace(
            result,
            found=tuple(_count(finding, again) for finding in findings),
            reports=reports,
            known=known,
            rows=of_source.rows,
            shapes=str([leaf[1] for leaf in of_source.leaves]),
            wild_anywhere=wild or failed_anywhere,
            entered=True,
        )
        if suspicious and not failed_anywhere and self._groups.exchanges_inside:
            result = self._settle(result, subject, poisoned)
        return result

    def share(self, news: bytes, is_news: bool) -> list[bytes]:
        """Let every rank of the job know every rank's news; costs one reduction when none has any.

        Args:
            news: empty on ranks that do not speak.
            is_news: without it `news` is told only because somebody else has some.

        Returns:
            News in rank order; empty when there is none.
        """
        if not any(self._everywhere(is_news)):
            return []
        everyone = tuple(range(self._exchange.world_size))
        return [part for part in self._exchange.all_gather(news, everyone) if part]

    def _vote(self, mine: Vote) -> dict[int, Vote]:
        payloads = self._exchange.all_gather(mine.to_wire(), self._groups.work)
        votes = map(Vote.from_wire, payloads)
        return dict(zip(self._groups.work, votes, strict=True))

    def _everywhere(self, *flags: bool) -> list[bool]:
        """Tell for each flag whether it is set on any rank of the job."""
        return [bool(value) for value in self._exchange.all_reduce_max([int(f) for f in flags])]

    def _once(
        self, subject: Subject, source: int, of_source: Vote, poisoned: bool = False
    ) -> dict[int, Report]:
        """Replay once on all ranks and gather the reports of the work group.

        A rank that fails before the broadcast keeps everybody out of it; one that fails after it
        reports Missing. Nobody waits for a rank that raised.
        """
        failure = _error_of(lambda: subject.prepare(of_source))
        mine = Report(missing=failure or "a peer could not prepare the replay")
        if not any(self._everywhere(bool(failure))):
            subject.receive(self._exchange, self._groups.mine, source)
            outcome: list[Report] = []
            failure = _error_of(lambda: outcome.append(self._with_state(subject.run(poisoned))))
            mine = outcome[0] if outcome else Report(missing=failure)
        payload = mine.to_wire()
        gathered = self._exchange.all_gather(payload, self._groups.work)
        reports = map(Report.from_wire, gathered)
        return dict(zip(self._groups.work, reports, strict=True))

    def _with_state(self, report: Report) -> Report:
        return report if self._audit is None else self._audit.added_to(report)

    def _judge(self, reports: Mapping[int, Report], known: Qualification) -> list[Finding]:
        groups = self._groups
        held = sorted(known.units & {name for report in reports.values() for name in report.state})
        state = replay_verdict.judge_coherence(reports) + replay_verdict.judge_rest(reports)
        named = {rank for finding in state for rank in finding.ranks}
        for finding in replay_verdict.judge_state(reports, groups.replicas, held):
            if finding.attributed or not named & set(finding.peers):
                state.append(finding)  # else: two replicas differ, and it is known which is bad
        blamed = frozenset(rank for finding in state for rank in finding.ranks)
        sharded = any(report.gather_s is not None for report in reports.values())
        gathers = groups.gathers if sharded else ()
        return state + replay_verdict.judge_replay(reports, groups.peers, gathers, blamed)

    def _settle(self, result: Result, subject: Subject, poisoned: bool) -> Result:
        """Drop ranks that are wrong because a partner inside the layer is; see `decision.origin`.

        Called on all ranks together, because partners are in other work groups.
        """
        groups, everyone = self._groups, tuple(range(self._exchange.world_size))
        traced: list[Trace] = []
        failure = _error_of(lambda: traced.append(subject.trace(poisoned)))
        spread = [each.finding for each in result.found if each.finding.reason in SPREADS]
        accused = [rank for finding in spread for rank in finding.ranks]
        blamed = [rank for each in result.found for rank in each.finding.ranks]
        payload = json.dumps([accused, blamed, traced[0] if traced else (), failure]).encode()
        told = [json.loads(part) for part in self._exchange.all_gather(payload, everyone)]
        traces = {rank: tuple(Event(*e) for e in told[rank][2]) for rank in everyone}
        suspects, named = (frozenset(r for part in told for r in part[i]) for i in (0, 1))
        origins = Origins.find(suspects, traces, groups.topology.rows, groups.peers_of, named)
        settled = [(each, origins.settle(each.finding)) for each in result.found]
        failed = "; ".join(sorted({part[3] for part in told if part[3]}))
        return replace(
            result,
            found=tuple(replace(each, finding=new) for each, new in settled if new is not None),
            remark=f"submodules could not be traced: {failed}" if failed else "",
        )

    def _narrow(self, findings: Sequence[Finding]) -> list[Finding]:
        """Replace the unit by the tensors in it that differ (parameter by parameter)."""
        units = sorted({f.what for f in findings if f.reason == replay_verdict.REASONS["state"]})
        mine = {
            f"{unit.name}\t{name}": list(signature_of({name: tensor}))
            for unit in (self._audit.units() if self._audit is not None else ())
            if unit.name in units
            for name, tensor in unit.tensors
        }
        gathered = self._exchange.all_gather(json.dumps(mine).encode(), self._groups.work)
        if not units:
            return list(findings)
        tables = {
            rank: {name: Signature(*value) for name, value in json.loads(data).items()}
            for rank, data in zip(self._groups.work, gathered, strict=True)
        }
        return [_narrowed(finding, tables) for finding in findings]


def _vote_of(subject: Subject, turn: Turn, step: int, broken: str) -> Vote:
    votes: list[Vote] = []
    failure = _error_of(lambda: votes.append(subject.vote(step, turn.recipe)))
    mine = votes[0] if votes else Vote(step, turn.recipe)
    return replace(mine, broken=broken or failure)


def _error_of(work: Callable[[], object]) -> str:
    """Guard of the replay: run the work and return what went wrong, or nothing."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 -- guard: peers get Missing instead of waiting
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _narrowed(finding: Finding, tables: Mapping[int, Mapping[str, Signature]]) -> Finding:
    if finding.reason != replay_verdict.REASONS["state"]:
        return finding
    prefix = f"{finding.what}\t"
    names = [name for name in tables[finding.peers[0]] if name.startswith(prefix)]
    different = [
        name.removeprefix(prefix)
        for name in names
        if len({tables[rank].get(name) for rank in finding.peers}) > 1
    ]
    return replace(finding, what=", ".join(different[:4]) or finding.what)


def _count(finding: Finding, again: Sequence[Sequence[Finding]]) -> Repeated:
    """Count in how many repeats the same ranks were blamed for the same kind of work."""
    same = sum(
        any(other.ranks == finding.ranks and other.reason == finding.reason for other in findings)
        for findings in again
    )
    return Repeated(finding, same, len(again))


def dissent_finding(dissent: Dissent, work: Ranks) -> Finding:
    """Turn a vote in which ranks held other work into a finding that is never called sdc."""
    return Finding(dissent.reason, dissent.ranks, work, "vote", dissent.text, comparable=False)
