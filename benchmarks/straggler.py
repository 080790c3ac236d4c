"""Straggler rules in simulation: false alarms and detection, ours beside two simpler ones.

    python -m benchmarks.straggler [--json] [--quick] [--docs]

Peer groups of 3 to 64, noise of 1 to 5 % (normal, heavy-tailed, with hiccups, wandering), one rank
slower by 5 to 100 %. `--docs` writes the table and the plot of docs/stragglers.md. About four
minutes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from scout_core.lab.simulate import RULES, Figures, Noise, NoiseKind, measure

PEERS = (3, 4, 8, 16, 64)
NOISES: tuple[tuple[NoiseKind, float], ...] = (
    ("gauss", 0.01),
    ("gauss", 0.02),
    ("gauss", 0.03),
    ("gauss", 0.05),
    ("heavy", 0.03),
    ("hiccup", 0.03),
    ("wander", 0.01),
)
SLOWDOWNS = (0.05, 0.10, 0.20, 0.50, 1.00)
CHECKS = {3: 40_000, 4: 40_000, 8: 30_000, 16: 15_000, 64: 6_000}
CHECKS_OF_SIMPLE_RULES = 2_000
TRIALS = 100
DOCS = pathlib.Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- begin: benchmarks.straggler -->", "<!-- end: benchmarks.straggler -->"


def run(quick: bool) -> list[Figures]:
    """Measure every rule in every setting."""
    settings = [
        (rule, peers, kind, scatter)
        for kind, scatter in NOISES
        for peers in PEERS
        for rule in RULES
    ]
    shown = track(settings, "simulating", console=Console(stderr=True))
    return [
        measure(
            rule,
            peers,
            Noise(kind, scatter),
            checks=(CHECKS[peers] if rule == "scout" else CHECKS_OF_SIMPLE_RULES)
            // (20 if quick else 1),
            trials=TRIALS // (10 if quick else 1),
            slowdowns=SLOWDOWNS,
            seed=number,
        )
        for number, (rule, peers, kind, scatter) in enumerate(shown)
    ]


def to_markdown(figures: Sequence[Figures]) -> str:
    """One row per setting; detection is the share found within 3 checks, then within 5."""
    slowdowns = [f"+{slowdown:.0%}" for slowdown in SLOWDOWNS]
    head = ["noise", "N", "false alarms: SCOUT", "paper", "fixed 10 %", *slowdowns, "innocents"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    by_setting: dict[tuple[str, float, int], dict[str, Figures]] = {}
    for row in figures:
        by_setting.setdefault((row.noise, row.scatter, row.peers), {})[row.rule] = row
    for (noise, scatter, peers), rules in by_setting.items():
        ours = rules["scout"]
        cells = [
            f"{noise} {scatter:.0%}",
            str(peers),
            _rate(ours),
            *(f"{rules[rule].false_positives:.1%}" for rule in ("paper", "fixed")),
            *(f"{by[3]:.0%} / {by[5]:.0%}" for by in ours.found.values()),
            f"{ours.innocent:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rate(figures: Figures) -> str:
    """False alarms per check; none in n checks is written as such."""
    if figures.false_positives == 0:
        return f"0 of {figures.checks:,}"
    return f"{figures.false_positives:.1e}"


def plot(figures: Sequence[Figures], path: pathlib.Path) -> None:
    """Draw false alarms of the three rules, and what SCOUT's finds within three checks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=90)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _plot_false_alarms(left, figures)
    _plot_detection(right, figures)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})


def _plot_false_alarms(axes: Any, figures: Sequence[Figures]) -> None:
    for rule, colour in zip(RULES, ("C0", "C3", "C7"), strict=True):
        rows = [r for r in figures if (r.rule, r.noise, r.scatter) == (rule, "gauss", 0.03)]
        peers = [row.peers for row in rows]
        rates = [max(row.false_positives, 1 / row.checks) for row in rows]
        none = [row.false_positives == 0 for row in rows]
        axes.loglog(peers, rates, color=colour, linewidth=1, label=rule)
        faces = ["white" if empty else colour for empty in none]
        axes.scatter(peers, rates, c=faces, edgecolors=colour, zorder=3)
    axes.axhline(1e-4, color="black", linewidth=0.7, linestyle="--")
    axes.set_xticks(PEERS, [str(size) for size in PEERS])
    axes.minorticks_off()
    axes.set(xlabel="peers N", ylabel="false alarms per check")
    axes.set_title("gauss 3 %; open: none seen, drawn at one in all", fontsize=8)
    axes.legend(fontsize=8)


def _plot_detection(axes: Any, figures: Sequence[Figures]) -> None:
    settings: tuple[tuple[NoiseKind, float, str], ...] = (
        ("gauss", 0.01, "-"),
        ("gauss", 0.03, "--"),
        ("heavy", 0.03, ":"),
    )
    ours = {(r.noise, r.scatter, r.peers): r for r in figures if r.rule == "scout"}
    percents = [100 * slowdown for slowdown in SLOWDOWNS]
    for kind, scatter, line in settings:
        for peers, colour in ((3, "C0"), (8, "C1"), (64, "C2")):
            found = ours[kind, scatter, peers].found
            shares = [found[slowdown][3] for slowdown in SLOWDOWNS]
            label = f"N={peers}, {kind} {scatter:.0%}"
            axes.plot(percents, shares, line, color=colour, label=label)
    axes.set(xlabel="slow-down in percent", ylabel="named within 3 checks", xscale="log")
    axes.set_xticks(percents, [f"{percent:.0f}" for percent in percents])
    axes.minorticks_off()
    axes.legend(fontsize=6)


def write_docs(figures: Sequence[Figures]) -> None:
    """Replace the table of docs/stragglers.md and its plot."""
    page = DOCS / "stragglers.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{to_markdown(figures)}\n{END}{after}", encoding="utf-8")
    plot(figures, DOCS / "stragglers.png")


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the checks")
    parser.add_argument("--docs", action="store_true", help="write docs/stragglers.md")
    arguments, _ = parser.parse_known_args()
    figures = run(arguments.quick)
    if arguments.json:
        print(json.dumps({"straggler": [row.to_json() for row in figures]}))
    else:
        print(to_markdown(figures))
    if arguments.docs:
        write_docs(figures)


if __name__ == "__main__":
    main()
