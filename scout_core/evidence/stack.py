"""Python stacks as text: which line of a stack a person should look at.

Torch-free. A frame is "file.py:12 function", the innermost frame comes first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Final

MAX_FRAMES: Final = 60
_STANDARD_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep
_PACKAGES: Final = os.path.join(_STANDARD_LIBRARY, "site-packages") + os.sep
_DUMPED_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_DUMPED_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+) ")
_COMPILER: Final = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/_aot_autograd/")


def frames_of(frame: FrameType | None) -> list[str]:
    """Write down a live stack, innermost frame first."""
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def frames_of_thread(ident: int) -> list[str]:
    """Write down the stack of a thread of this process; empty when there is none."""
    return frames_of(sys._current_frames().get(ident))


def frames_in_dump(text: str, ident: int) -> list[str]:
    """Read one thread's stack from what `faulthandler` wrote."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        thread = _DUMPED_THREAD.match(line)
        if thread is not None:
            inside = int(thread["ident"], 16) == ident
            found = [] if inside else found  # the newest dump counts
        frame = _DUMPED_FRAME.match(line)
        if inside and frame is not None:
            found.append(f"{frame['path']}:{frame['line']} {frame['name']}")
    return found[:MAX_FRAMES]


def line_to_look_at(frames: Sequence[str], internal: Iterable[str]) -> str:
    """Return the innermost frame that is the user's; the innermost of all when none is.

    Args:
        internal: prefixes of paths that are nobody's program, such as torch's folder.
    """
    prefixes = tuple(internal)
    for frame in frames:
        if not is_inside(frame, prefixes):
            return frame
    return frames[0] if frames else ""


def is_inside(frame: str, prefixes: tuple[str, ...]) -> bool:
    """Tell whether a frame or path is below one of the prefixes, or in the standard library."""
    if frame.startswith((*prefixes, "<frozen")):
        return True
    return frame.startswith(_STANDARD_LIBRARY) and not frame.startswith(_PACKAGES)


def is_compiling(frames: Iterable[str]) -> bool:
    """Tell whether a stack is inside a compiler: torch.compile, or a function called compile."""
    return any(
        frame.rpartition(" ")[2] == "compile" or any(part in frame for part in _COMPILER)
        for frame in frames
    )
