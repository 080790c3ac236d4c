"""Which rank wrote which dump: from the content where it says so, from file names otherwise.

A dump does not name its rank. But a rank only lists groups that it belongs to, so it is in the
intersection of their members; and a send or receive names its own position in the group. What
remains open is decided by a number in the file names, whatever else they hold (host names, too).
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from scout_core.evidence.dump_format import Dump

Candidates = frozenset[int] | None
"""Global ranks that may have written a file; None: any."""

_NUMBER = re.compile(r"([A-Za-z]*)[^A-Za-z0-9]*(\d+)")


def assign_ranks(dumps: Sequence[Dump]) -> tuple[dict[int, list[Dump]], list[Dump]]:
    """Find the global rank of each dump.

    Returns:
        (global rank -> its dumps, the dumps of which the rank cannot be told).
    """
    possible = {dump.source: candidates(dump) for dump in dumps}
    fixed = {source: next(iter(c)) for source, c in possible.items() if c and len(c) == 1}
    _eliminate(possible, fixed)
    by_suffix: dict[str, list[str]] = {}
    for dump in dumps:
        by_suffix.setdefault(pathlib.PurePath(dump.source).suffix, []).append(dump.source)
    for sources in by_suffix.values():  # the same rank may be there as pickle and as JSON
        fixed |= _from_names(sources, possible, fixed)
    by_rank: dict[int, list[Dump]] = {}
    for dump in dumps:
        if dump.source in fixed:
            by_rank.setdefault(fixed[dump.source], []).append(dump)
    return by_rank, [dump for dump in dumps if dump.source not in fixed]


def candidates(dump: Dump) -> Candidates:
    """Return the global ranks that can have written a dump, by its content alone."""
    if dump.rank is not None:
        return frozenset({dump.rank})
    own = {
        dump.members[entry.group][entry.own_position]
        for entry in dump.entries
        if entry.own_position is not None
        and entry.own_position < len(dump.members.get(entry.group, ()))
    }
    sets = [frozenset(ranks) for ranks in dump.members.values()]
    sets += [frozenset({rank}) for rank in own]
    return frozenset.intersection(*sets) if sets else None


def _eliminate(possible: Mapping[str, Candidates], fixed: dict[str, int]) -> None:
    """A rank whose dump is known did not write the others that are still open."""
    while True:
        taken = set(fixed.values())
        found = {
            source: next(iter(left))
            for source, c in possible.items()
            if source not in fixed and c and len(left := c - taken) == 1
        }
        if not found or len(set(found.values())) < len(found):
            return
        fixed |= found


def _from_names(
    sources: Sequence[str], possible: Mapping[str, Candidates], fixed: Mapping[str, int]
) -> dict[str, int]:
    """Read the ranks from the first number field of the names that fits all open files."""
    taken = {fixed[source] for source in sources if source in fixed}
    sources = [source for source in sources if source not in fixed]
    if not sources:
        return {}
    fields = [dict(_numbers(pathlib.PurePath(source).name)) for source in sources]
    names = [key for key in fields[0] if all(key in field for field in fields)]
    for key in sorted(names):
        ranks = [field[key] for field in fields]
        allowed = all(
            (c := possible[source]) is None or rank in c
            for source, rank in zip(sources, ranks, strict=True)
        )
        if allowed and len(set(ranks)) == len(ranks) and not taken & set(ranks):
            return dict(zip(sources, ranks, strict=True))
    return {}


def _numbers(name: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ((priority, position), number): after the word "rank" first, then from the end."""
    found = _NUMBER.findall(name)
    for position, (word, digits) in enumerate(reversed(found)):
        if word.lower().endswith("rank"):
            yield (0, 0), int(digits)
        yield (1, position), int(digits)
