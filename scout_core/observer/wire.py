"""Messages between agents and hubs: JSON over ZeroMQ, encrypted and authenticated by CURVE keys.

Every agent makes its own key pair; only public keys travel through the job's store, and a hub lets
in the keys it was told and nobody else. No call in here waits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils import z85

from scout_core.decision import snapshot_json
from scout_core.decision.snapshots import RankSnapshot
from scout_core.errors import ScoutError
from scout_core.evidence.ring import compress_ranks, expand_ranks

Message = dict[str, Any]

MAX_MESSAGE_BYTES: Final = 1 << 26
_LINGER_MS: Final = 500
_QUEUE: Final = 10_000  # messages kept for a peer that does not read


class Keys(NamedTuple):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str


def new_keys() -> Keys:
    """Make a key pair."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


class HubSocket:
    """What a hub hears all agents on; messages carry the sender's name."""

    def __init__(self, context: zmq.Context[Any], keys: Keys, beat_s: float) -> None:
        """Prepare the socket; nobody is let in before `allow`."""
        self._gate = context.socket(zmq.REP)
        self._gate.bind("inproc://zeromq.zap.01")  # where libzmq asks who may come in
        self._allowed: set[bytes] = set()
        self.socket = context.socket(zmq.ROUTER)
        _set_common(self.socket, keys, beat_s)
        self.socket.curve_server = True
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # an agent that was restarted keeps its name

    def bind(self, address: str, port: int) -> int:
        """Listen on an address; returns the port, a free one when `port` is 0.

        Raises:
            zmq.ZMQError: the address is not of this machine, or the port is taken.
        """
        if port == 0:
            return int(self.socket.bind_to_random_port(endpoint_of(address)))
        self.socket.bind(endpoint_of(address, port))
        return port

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], ...]:
        """To poll."""
        return self._gate, self.socket

    def allow(self, public_keys: Collection[str]) -> None:
        """Let these keys in."""
        self._allowed |= {z85.decode(key) for key in public_keys}

    def send(self, name: str, message: Message) -> None:
        """Send to one peer; a peer that is gone gets nothing."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self.socket.send_multipart([name.encode(), _encode(message)], zmq.DONTWAIT)

    def receive(self) -> Iterator[tuple[str, Message]]:
        """Yield what has arrived: (name of the sender, message)."""
        self._open_the_gate()
        for frames in _arrived(self.socket):
            if len(frames) == 2:
                yield frames[0].decode("ascii", "replace"), _decode(frames[1])

    def close(self) -> None:
        """Close both sockets; what is still queued is sent for a moment."""
        for each in self.sockets:
            each.close()

    def _open_the_gate(self) -> None:
        """Answer libzmq's authentication requests (ZMQ RFC 27)."""
        for frames in _arrived(self._gate):
            version, request, _, _, _, mechanism, *credentials = frames
            known = mechanism == b"CURVE" and credentials[0] in self._allowed
            answer = (b"200", b"OK") if known else (b"400", b"unknown key")
            self._gate.send_multipart([version, request, *answer, b"", b""])


class Link:
    """An agent's connection to one hub."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        server_key: str,
        *,
        name: str,
        keys: Keys,
        beat_s: float,
    ) -> None:
        """Connect in the background, again and again."""
        self.socket = context.socket(zmq.DEALER)
        _set_common(self.socket, keys, beat_s)
        self.socket.curve_serverkey = server_key.encode()
        self.socket.routing_id = name.encode()
        self.socket.reconnect_ivl_max = 1000
        self.socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Send, or drop the message when the hub has not read for long."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(_encode(message), zmq.DONTWAIT)

    def receive(self) -> Iterator[Message]:
        """Yield what has arrived."""
        for frames in _arrived(self.socket):
            yield _decode(frames[-1])

    def close(self) -> None:
        """Disconnect; what is still queued is sent for a moment."""
        self.socket.close()


def endpoint_of(address: str, port: int = 0) -> str:
    """Write an IP address, and a port unless it is 0, as ZeroMQ wants them."""
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port}" if port else f"tcp://{host}"


def pack(snapshot: RankSnapshot) -> Message:
    """Write a snapshot for the wire: members of groups as runs, not one by one."""
    bare = replace(snapshot, groups=tuple(replace(g, ranks=()) for g in snapshot.groups))
    members = [compress_ranks(group.ranks) for group in snapshot.groups]
    return {"snapshot": snapshot_json.to_json(bare), "members": members}


def unpack(message: Message) -> RankSnapshot:
    """Read what `pack` wrote.

    Raises:
        ScoutError: it is something else.
    """
    bare = snapshot_json.from_json(message.get("snapshot"))
    members = message.get("members")
    if not isinstance(members, list) or len(members) != len(bare.groups):
        raise ScoutError(f"rank {bare.rank}: members of {len(bare.groups)} groups are not given")
    groups = zip(bare.groups, members, strict=True)
    return replace(bare, groups=tuple(replace(g, ranks=expand_ranks(text)) for g, text in groups))


def _set_common(socket: zmq.Socket[Any], keys: Keys, beat_s: float) -> None:
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.ipv6 = True
    socket.linger = _LINGER_MS
    socket.sndhwm = socket.rcvhwm = _QUEUE
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.heartbeat_ivl = max(1, int(beat_s * 1000))
    socket.heartbeat_timeout = socket.heartbeat_ivl * 3


def _arrived(socket: zmq.Socket[Any]) -> Iterator[list[bytes]]:
    while True:
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        ScoutError: peers are authenticated, so this is another version of SCOUT.
    """
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ScoutError(
            f"message of {len(data)} bytes cannot be read; all nodes must run one version of SCOUT"
        )
    return message
