"""Is a machine alive? Tells a dead machine from one whose observer agent died."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Collection, Sequence
from typing import Final

PORTS: Final = (22, 9)
"""A machine that is alive answers a connection to any port, if only by refusing it."""
REACH_S: Final = 0.3


def reachable(
    addresses: Collection[str], *, ports: Sequence[int] = PORTS, timeout_s: float = REACH_S
) -> set[str]:
    """Return the addresses whose machine answers within the timeout; all are asked at once."""
    found: set[str] = set()
    waiting: dict[int, tuple[socket.socket, str]] = {}
    poller = select.poll()
    for address in addresses:
        for port in ports:
            probe = _connect(address, port, found)
            if probe is not None:
                waiting[probe.fileno()] = (probe, address)
                poller.register(probe, select.POLLOUT)
    deadline = time.monotonic() + timeout_s
    while waiting and set(addresses) - found and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000):
            probe, address = waiting.pop(descriptor)
            poller.unregister(descriptor)
            if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
                found.add(address)
            probe.close()
    for probe, _ in waiting.values():
        probe.close()
    return found


def _connect(address: str, port: int, found: set[str]) -> socket.socket | None:
    """Begin to connect; None when the outcome is known at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = probe.connect_ex((address, port))
    if code == errno.EINPROGRESS:
        return probe
    if code in (0, errno.ECONNREFUSED):
        found.add(address)
    probe.close()
    return None
