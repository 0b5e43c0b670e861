"""Control messages: small typed structs, JSON on the wire (so that another version can still read a Hello).

Called by core.client and server.service. msgspec checks types, so hostile bytes end in a ProtocolError here and
reach nothing else. Direction is written as C (a rank's client) -> S (a service: a server, or a rank for its node).

    C -> S  Hello      first message on a connection that is to be the control channel
    S -> C  Welcome | Refused
    C -> S  Attach     first message on a further lane of a process that said Hello
    C -> S  Join       one a group and service; answered by Joined
    C -> S  Leave      the group was destroyed here; no more frames of it
    C -> S  Cancel     this rank gives the operation up (timeout, its own error)
    S -> C  Failed     one operation, or (sequence -1) the whole group, cannot complete
    C -> S  Query      who has not contributed yet?  S -> C  Waiting
    C -> S  Ping       S -> C  Pong
    C -> S  Bye        the process is going; S -> C  Bye   once everything it was owed is sent
"""

from __future__ import annotations

import msgspec

from torch_bps.errors import ProtocolError
from torch_bps.wire.header import CONTROL, WIRE_VERSION, Header


class Message(msgspec.Struct, tag_field="type"):
    """Base of all control messages."""


class Hello(Message, tag="hello"):
    process: str
    """uuid hex of the process, made anew for each start of its runtime"""
    rank: int
    """for messages to people: the rank of the first group that the process opened"""
    host: str
    pid: int
    job: str = ""
    version: int = WIRE_VERSION
    release: str = ""
    token: str = ""
    """room for authentication"""


class Welcome(Message, tag="welcome"):
    service: str
    """uuid hex of the service's process"""
    endpoints: list[str]
    """further addresses of the same service, best first: "tcp://..", "shm://..", "zmq://.." """
    node: str = ""
    """identity of the host (core.topology): shm only works where it equals the client's own"""
    version: int = WIRE_VERSION
    release: str = ""
    nic_gbps: float = 0.0
    """rate of the host's link (BYTEPS_NIC_GBPS); 0: not set"""


class Refused(Message, tag="refused"):
    error: str
    """name of a class in errors.BY_NAME"""
    text: str
    hint: str = ""


class Attach(Message, tag="attach"):
    process: str
    lane: int
    token: str = ""


class Join(Message, tag="join"):
    group: int
    size: int
    """contributors at this service when frames are not BY_NODE"""
    index: int
    """this rank's place among them"""
    rank: int
    """this rank in the group, for messages to people"""
    num_nodes: int = 1
    node: int = 0
    """this rank's node, its contributor index in BY_NODE frames"""
    uplink: bool = False
    """the service sums for one node of several: it pushes each sum on to the servers before it answers"""


class Joined(Message, tag="joined"):
    group: int


class Leave(Message, tag="leave"):
    group: int


class Cancel(Message, tag="cancel"):
    group: int
    stream: int
    sequence: int
    error: str
    text: str


class Failed(Message, tag="failed"):
    group: int
    stream: int
    sequence: int
    """-1: every pending and later operation of the group"""
    error: str
    text: str
    hint: str = ""
    ranks: list[int] = []


class Query(Message, tag="query"):
    group: int
    stream: int
    sequence: int


class Waiting(Message, tag="waiting"):
    group: int
    stream: int
    sequence: int
    missing: list[int]
    """ranks (or, for BY_NODE slots, nodes) that have not contributed"""


class Ping(Message, tag="ping"):
    number: int


class Pong(Message, tag="pong"):
    number: int


class Bye(Message, tag="bye"):
    reason: str = ""


AnyMessage = (
    Hello | Welcome | Refused | Attach | Join | Joined | Leave | Cancel | Failed | Query | Waiting | Ping | Pong | Bye
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(AnyMessage)


def encode(message: Message) -> tuple[Header, bytes]:
    """Return the frame (header, payload) of a control message."""
    payload = _encoder.encode(message)
    return Header(CONTROL, nbytes=len(payload)), payload


def decode(payload: bytes | memoryview) -> AnyMessage:
    """Return the message in a CONTROL frame's payload.

    Raises:
        ProtocolError: it is not a control message.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed control message {bytes(payload[:80])!r}: {error}") from None
