"""The fixed header in front of every frame, 64 bytes, little endian.

    offset  size  field
    0       2     magic      b"BP"
    2       1     version    WIRE_VERSION; another one is refused before anything else is read
    3       1     frame      CONTROL .. BOARD (below), RELEASE.. (private to a transport)
    4       1     op         wire.ops row
    5       1     dtype      wire.dtypes code
    6       1     redop      wire.dtypes reduce kind
    7       1     flags      WANT | BY_NODE | ACC32 | HOME
    8       8     group      the group's id
    16      8     stream     0 for collectives, else wire.ops.stream_of
    24      8     sequence   number of the operation in its stream
    32      4     block      wire.ops
    36      4     part       partition of the block
    40      8     total      nbytes of the whole block as this rank sees it (compared, so a mismatch is an error)
    48      8     nbytes     payload bytes that follow this header
    56      4     root       root rank of a rooted collective, else 0
    60      4     priority   int32, smaller = sooner; below URGENT: its rank waits for it

Frames: PUSH carries a partition to an engine. PULL asks for a block's partition. RESULT carries one back, and has the
key of the PUSH or PULL it answers (for point-to-point see server.engine). DONE answers a PUSH without WANT once its
slot is drained. DECLARE only states the operation to its home engine, so that ranks that disagree are noticed.
CONTROL carries a wire.control message as payload and has zeros elsewhere. BOARD lends a rank's board (torch_bps.local)
to another rank of its host, as payload in shared memory.

Flags: WANT: the pusher wants the result. BY_NODE: contributors are nodes, not ranks (the payload is a node's sum).
ACC32: the payload is the float32 partial sum of a half type (nbytes is twice the partition's). HOME: this engine is
the operation's home: every contributor will state the operation here.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from torch_bps.errors import ProtocolError, VersionError

WIRE_VERSION: Final = 1
MAGIC: Final = b"BP"
HEADER: Final = struct.Struct("<2sBBBBBBQQQIIQQIi")
HEADER_NBYTES: Final = 64
assert HEADER.size == HEADER_NBYTES

CONTROL, PUSH, PULL, RESULT, DONE, DECLARE, BOARD = 1, 2, 3, 4, 5, 6, 7
FRAME_NAMES: Final = {1: "CONTROL", 2: "PUSH", 3: "PULL", 4: "RESULT", 5: "DONE", 6: "DECLARE", 7: "BOARD"}
FIRST_PRIVATE_FRAME: Final = 64
"""Frames from here on belong to the transport that sends them (shm's RELEASE); handlers never see them."""

URGENT: Final = -(1 << 29)
"""Priorities below this are of operations that block their caller."""

WANT, BY_NODE, ACC32, HOME = 1, 2, 4, 8

MAX_PAYLOAD_NBYTES: Final = 1 << 30
"""No frame carries more: a larger number in a header is a ProtocolError, before any memory is taken for it."""


class Header(NamedTuple):
    """One frame's header without magic and version; see the table above."""

    frame: int
    op: int = 0
    dtype: int = 0
    redop: int = 0
    flags: int = 0
    group: int = 0
    stream: int = 0
    sequence: int = 0
    block: int = 0
    part: int = 0
    total: int = 0
    nbytes: int = 0
    root: int = 0
    priority: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return HEADER.pack(MAGIC, WIRE_VERSION, *self)


Key = tuple[int, int, int, int, int]
"""(group, stream, sequence, block, part): one slot."""


def key_of(header: Header) -> Key:
    """Return the slot that a frame is about."""
    return header[5:10]


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Return the header in the first 64 bytes of `data`.

    Raises:
        ProtocolError: wrong magic, unknown frame, or a payload over MAX_PAYLOAD_NBYTES.
        VersionError: another wire version.
    """
    magic, version, *fields = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"the peer's bytes {bytes(data[:8])!r} are no torch_bps frame",
            hint="another program may be talking to this port",
        )
    if version != WIRE_VERSION:
        raise VersionError(
            f"the peer speaks wire version {version}, this process {WIRE_VERSION}",
            hint="install the same torch_bps version on every machine",
        )
    header = Header(*fields)
    if header.frame not in FRAME_NAMES and header.frame < FIRST_PRIVATE_FRAME:
        raise ProtocolError(f"unknown frame {header.frame}")
    if header.nbytes > MAX_PAYLOAD_NBYTES:
        raise ProtocolError(f"a frame of {header.nbytes} bytes is over the limit of {MAX_PAYLOAD_NBYTES}")
    return header
