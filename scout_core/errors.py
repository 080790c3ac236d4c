"""The one exception SCOUT raises for a mistake of the user."""

from __future__ import annotations


class ScoutError(ValueError):
    """A mistake of the user: names the value, the place, the rule it breaks and the way out.

    A fault found in training is never an exception; it is a `Verdict` and an `Incident`.
    """
