"""Flight Recorder: torch's own record of collectives, from dump files or from a live process.

A second source, independent of SCOUT's observer: it is there when nothing of SCOUT was installed.
Reading needs no torch; only `serve`, which runs in the trainer, does.
"""

from __future__ import annotations

import http.client
import json
import pathlib
import socket
from collections.abc import Sequence
from typing import Any

from scout_core.decision.snapshots import RankSnapshot
from scout_core.errors import ScoutError
from scout_core.evidence.dump_assembly import assemble
from scout_core.evidence.dump_format import Dump, parse_dump, unpickle
from scout_core.evidence.dump_ranks import assign_ranks

TRACE = "/handler/fr_trace_json?includecollectives=true&onlyactive=false"
PICKLE = b"\x80"
"""First byte of every pickle that torch writes (protocol 2)."""


def read_dump(path: pathlib.Path) -> Dump:
    """Read one dump, pickle or JSON; the content decides, not the name.

    Raises:
        ScoutError: not a readable dump.
    """
    data = path.read_bytes()
    if data.startswith(PICKLE):
        return parse_dump(unpickle(data, str(path)), str(path))
    try:
        return parse_dump(json.loads(data), str(path))
    except ValueError as error:
        if isinstance(error, ScoutError):
            raise
        raise ScoutError(f"{path} is neither a pickle nor JSON: {error}") from error


def snapshots(dumps: Sequence[Dump]) -> tuple[list[RankSnapshot], list[tuple[Dump, str]]]:
    """Turn the dumps of a job into snapshots.

    Returns:
        (one snapshot per rank of the job, also of ranks without a dump; dumps that were not used,
        each with the reason).
    """
    by_rank, unnamed = assign_ranks(dumps)
    best = {rank: max(found, key=_latest) for rank, found in by_rank.items()}
    unused = [(dump, "neither its content nor its name tells which rank") for dump in unnamed]
    unused += [
        (dump, f"{best[rank].source} of the same rank {rank} shows more or as much")
        for rank, found in by_rank.items()
        for dump in found
        if dump is not best[rank]
    ]
    return assemble(best), unused


def read_live(socket_path: str, *, timeout_s: float) -> dict[str, Any]:
    """Fetch the trace of a live process that serves it (`serve`), as decoded JSON.

    Works while the process sits in a native wait or holds the GIL; not while it is stopped.

    Raises:
        ScoutError: no answer in time, or not a trace.
    """
    connection = _UnixConnection(socket_path, timeout_s)
    try:
        connection.request("POST", TRACE)
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise ScoutError(f"worker server at {socket_path} answered {response.status}")
        record = json.loads(body)
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ScoutError(f"no trace from {socket_path} in {timeout_s} s: {error!r}") from error
    finally:
        connection.close()
    if not isinstance(record, dict):
        raise ScoutError(f"worker server at {socket_path} sent no trace but {type(record)}")
    return record


def serve(socket_path: str) -> Any | None:
    """Serve this process's trace on a unix socket, from a thread that needs no GIL.

    Returns:
        The server, to be kept alive and ended with `shutdown()`; None when this torch has none
        (a private interface, checked with torch 2.13).
    """
    from torch._C import _distributed_c10d

    server = getattr(_distributed_c10d, "_WorkerServer", None)
    return None if server is None else server(socket_path)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _latest(dump: Dump) -> tuple[int, int, int]:
    """Of two dumps of one rank, the later one shows more; then the one that has stacks."""
    created = max((entry.created_ns for entry in dump.entries), default=0)
    counted = sum(status.enqueued for status in dump.status.values())
    return created, counted, sum(bool(entry.call_site) for entry in dump.entries)
