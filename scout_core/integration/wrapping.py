"""Wrap a method of one object, and take the wrapper away again whatever others wrapped later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from scout_core.evidence.capture import Undo


def wrap_method(target: Any, name: str, around: Callable[..., Any]) -> Undo:
    """Let `around(original, *args, **kwargs)` run instead of `target.name(*args, **kwargs)`.

    Only this object changes. When something else has wrapped the method later, undoing leaves the
    wrapper in place and makes it pass every call through.
    """
    had = vars(target).get(name)
    original = getattr(target, name)
    active = True

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    setattr(target, name, wrapped)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(target).get(name) is not wrapped:
            return
        if had is None:
            delattr(target, name)
        else:
            setattr(target, name, had)

    return undo
