"""The judge of transport.base: every transport passes this suite.

A transport plugs in with a Kit and a class of its own, in tests/transport/test_<name>.py:

    class TcpKit(Kit):
        name = "tcp"
        def make(self): return TcpTransport(self.ledger)
        def nowhere(self): return "tcp://127.0.0.1:1"
        def raw(self, address): return socket.create_connection(...)      # None where raw bytes cannot get in

    class TestTcpContract(TransportContract):
        kit_class = TcpKit

The rig has two transports (as two processes would), two reactors, one listener, all driven by the test's own thread:
a side whose reactor is not stepped is a peer that does not read. Nothing sleeps. When a test ends, the rig closes
everything and checks: on_close once for each channel, every buffer released exactly once, no descriptor left.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator

import pytest

from tests.conformance.transport_rig import DEADLINE_S, End, Kit, Recorder, Rig, descriptors, send
from torch_bps.errors import BytePSError, ConfigError, ProtocolError, VersionError
from torch_bps.transport.base import Buffer, Channel
from torch_bps.transport.reactor import EpollReactor
from torch_bps.wire.header import CONTROL, PUSH, RESULT, Header

KiB, MiB = 1 << 10, 1 << 20
SIZES = [0, 1, 63, 64, 65, 64 * KiB, MiB + 1, 16 * MiB]


def _bad(frame: int = PUSH, nbytes: int = 0, version: int = 0) -> bytes:
    data = bytearray(Header(frame, nbytes=nbytes).pack())
    data[2] += version
    return bytes(data)


HOSTILE = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(64), ProtocolError),
    "another version": (_bad(version=1), VersionError),
    "absurd size": (_bad(nbytes=1 << 40), ProtocolError),
    "unknown frame": (_bad(frame=33), ProtocolError),
}


class TransportContract:
    """Subclass as Test..., set kit_class."""

    kit_class: type[Kit] = Kit

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        gc.collect()  # what a test of torch.compile left in cycles would otherwise be closed meanwhile
        before = descriptors()
        rig = Rig(self.kit_class())
        yield rig
        rig.close()
        after = descriptors()
        assert after == before, f"left open {after.items() - before.items()}, closed {before.items() - after.items()}"

    # ---- frames

    @pytest.mark.parametrize("from_server", [False, True], ids=["to_server", "to_client"])
    def test_frames_arrive_whole_once_and_in_order(self, rig: Rig, from_server: bool) -> None:
        source, sink = rig.pair()[:: -1 if from_server else 1]
        rng = random.Random(1)
        expected = [send(rig, source, rng.randbytes(nbytes) or None, n) for n, nbytes in enumerate(SIZES)]
        rig.until(lambda: len(sink.log.frames) >= len(expected), "all frames")
        assert sink.log.frames == expected
        rig.until(lambda: rig.sent.alive == 0 and source.channel.queued_nbytes == 0, "release of what was sent")

    def test_both_directions_at_once(self, rig: Rig) -> None:
        near, far = rig.pair()
        rng = random.Random(2)
        expected: dict[str, list[tuple[Header, bytes | None]]] = {"near": [], "far": []}
        for n in range(24):
            expected["far"].append(send(rig, near, rng.randbytes(rng.randrange(400 * KiB)), n))
            expected["near"].append(send(rig, far, rng.randbytes(rng.randrange(400 * KiB)), n))
        rig.until(lambda: len(near.log.frames) + len(far.log.frames) >= 48, "all frames")
        assert far.log.frames == expected["far"]
        assert near.log.frames == expected["near"]

    def test_thousands_of_small_frames(self, rig: Rig) -> None:
        near, far = rig.pair()
        expected = [send(rig, near, bytes([n % 251]) * (n % 40), n) for n in range(5000)]
        rig.until(lambda: len(far.log.frames) >= len(expected), "all frames")
        assert far.log.frames == expected

    def test_an_empty_buffer_is_a_frame_without_payload(self, rig: Rig) -> None:
        near, far = rig.pair()
        expected = [send(rig, near, b"", 1), send(rig, near, b"x", 2)]
        rig.until(lambda: len(far.log.frames) >= 2, "both frames")
        assert far.log.frames == expected

    def test_one_buffer_may_be_sent_many_times(self, rig: Rig) -> None:
        near, far = rig.pair()
        buffer = rig.sent.buffer(b"abc" * 1000).retain(9)
        for n in range(10):
            near.channel.send(Header(PUSH, sequence=n, nbytes=3000), buffer)
        rig.until(lambda: len(far.log.frames) >= 10, "all frames")
        assert {data for _, data in far.log.frames} == {b"abc" * 1000}
        rig.until(lambda: rig.sent.alive == 0, "the last reference")

    @pytest.mark.parametrize("nbytes", [5, 5000, 3 * MiB])
    def test_receives_into_the_handlers_memory_or_hands_over_its_own(self, rig: Rig, nbytes: int) -> None:
        given: list[Buffer] = []

        def on_header(channel: Channel, header: Header) -> Buffer:
            given.append(rig.sent.buffer(bytearray(header.nbytes)))
            return given[-1]

        def on_frame(channel: Channel, header: Header, buffer: Buffer | None) -> None:
            if given and buffer is not given[-1]:
                given[-1].release()

        rig.accept_with = lambda: Recorder(on_header=on_header, on_frame=on_frame)
        near, far = rig.pair()
        expected = [send(rig, near, random.Random(n).randbytes(nbytes), n) for n in range(4)]
        rig.until(lambda: len(far.log.frames) >= 4, "all frames")
        assert far.log.frames == expected
        assert far.log.headers in ([], [header for header, _ in expected])

    def test_frames_sent_before_on_open_arrive(self, rig: Rig) -> None:
        near = rig.connect()
        expected = [send(rig, near, bytes([n]) * 1000, n) for n in range(10)]
        rig.until(lambda: rig.accepted and len(rig.accepted[0].log.frames) >= 10, "all frames")
        assert rig.accepted[0].log.frames == expected

    def test_channels_do_not_mix(self, rig: Rig) -> None:
        pairs = [rig.pair() for _ in range(8)]
        expected = [[send(rig, near, bytes([i, n]) * 300, n) for n in range(20)] for i, (near, _) in enumerate(pairs)]
        rig.until(lambda: all(len(far.log.frames) >= 20 for _, far in pairs), "all frames")
        assert [far.log.frames for _, far in pairs] == expected

    def test_reactors_in_threads(self, rig: Rig) -> None:
        done = threading.Event()

        def echo(channel: Channel, header: Header, buffer: Buffer | None) -> None:
            channel.send(header)

        def again(channel: Channel, header: Header, buffer: Buffer | None) -> None:
            if header.sequence == 200:
                done.set()
            else:
                channel.send(Header(PUSH, sequence=header.sequence + 1))

        rig.accept_with = lambda: Recorder(on_frame=echo)
        near, _ = rig.pair(Recorder(on_frame=again))
        stop = threading.Event()

        def loop(reactor: EpollReactor) -> None:
            while not stop.is_set():
                reactor.run_once(1.0)

        threads = [threading.Thread(target=loop, args=(reactor,)) for reactor in rig.reactors]
        for thread in threads:
            thread.start()
        rig.client_reactor.call(near.channel.send, Header(PUSH))
        arrived = done.wait(DEADLINE_S)
        stop.set()
        for thread, reactor in zip(threads, rig.reactors, strict=True):
            reactor.call(stop.is_set)
            thread.join(DEADLINE_S)
        assert arrived

    # ---- a peer that does not read

    def test_a_clogged_peer_never_blocks_send(self, rig: Rig) -> None:
        near, far = rig.pair()
        total = rig.kit.clog_nbytes or 64 * MiB
        buffer = rig.sent.buffer(bytearray(MiB)).retain(total // MiB - 1)
        for n in range(total // MiB):
            near.channel.send(Header(PUSH, sequence=n, nbytes=MiB), buffer)
        for _ in range(0 if rig.kit.one_reactor else 20):
            rig.step(rig.client_reactor)
        if rig.kit.clog_nbytes is not None:
            assert MiB < near.channel.queued_nbytes <= total + 64 * (total // MiB)
        assert rig.sent.alive <= 1  # 0 where the bytes were copied
        rig.until(lambda: near.channel.queued_nbytes == 0 and rig.sent.alive == 0, "the peer reads again")
        rig.until(lambda: len(far.log.frames) >= total // MiB, "all frames")
        assert [header.sequence for header, _ in far.log.frames] == list(range(total // MiB))

    def test_what_waits_may_be_overtaken_but_never_within_a_priority_or_by_a_control_frame(self, rig: Rig) -> None:
        near, far = rig.pair()
        rng = random.Random(3)
        sent = []
        for n in range(90):
            frame, priority = (CONTROL, 0) if n % 30 == 29 else (rng.choice((PUSH, RESULT)), rng.randint(-2, 2))
            header = Header(frame, sequence=n, nbytes=200 * KiB, priority=priority)
            near.channel.send(header, rig.sent.buffer(bytes([n]) * header.nbytes))
            sent.append(header)
        rig.until(lambda: len(far.log.frames) >= len(sent), "all frames")
        assert all(data == bytes([header.sequence]) * header.nbytes for header, data in far.log.frames)
        arrived = [header for header, _ in far.log.frames]
        for stretch in range(0, 90, 30):
            assert arrived[stretch + 29] == sent[stretch + 29]
            assert sorted(arrived[stretch : stretch + 29]) == sorted(sent[stretch : stretch + 29])
            for priority in range(-2, 3):
                here = [header.sequence for header in arrived[stretch : stretch + 29] if header.priority == priority]
                assert here == sorted(here)
        rig.until(lambda: rig.sent.alive == 0 and near.channel.queued_nbytes == 0, "release of what was sent")

    @pytest.mark.parametrize("how", ["close", "close with error", "peer closes with error"])
    def test_a_channel_that_dies_releases_what_is_queued(self, rig: Rig, how: str) -> None:
        near, far = rig.pair()
        buffer = rig.sent.buffer(bytearray(MiB)).retain(63)
        for n in range(64):
            near.channel.send(Header(PUSH, sequence=n, nbytes=MiB), buffer)
        channel = far.channel if how.startswith("peer") else near.channel
        channel.close(RuntimeError("cut") if "error" in how else None)
        rig.until_closed(near, far)
        rig.until(lambda: rig.sent.alive == 0, "release")
        assert near.channel.queued_nbytes == 0
        near.channel.send(Header(PUSH, nbytes=3), rig.sent.buffer(b"abc"))
        rig.until(lambda: rig.sent.alive == 0, "release of what was sent after the end")

    # ---- the end

    @pytest.mark.parametrize("by_server", [False, True], ids=["by_client", "by_server"])
    def test_close_is_orderly_on_both_sides(self, rig: Rig, by_server: bool) -> None:
        closing, other = rig.pair()[:: -1 if by_server else 1]
        closing.channel.close()
        assert closing.log.closed == []  # told from the loop, not from inside close()
        closing.channel.close(RuntimeError("too late"))
        rig.until_closed(closing, other)
        assert closing.log.closed == [None]
        assert other.log.closed == [None]

    def test_closing_from_both_sides_at_once(self, rig: Rig) -> None:
        near, far = rig.pair()
        near.channel.close()
        far.channel.close()
        rig.until_closed(near, far)
        assert near.log.closed == far.log.closed == [None]

    @pytest.mark.parametrize("by_server", [False, True], ids=["by_client", "by_server"])
    def test_a_cut_closes_both_sides(self, rig: Rig, by_server: bool) -> None:
        closing, other = rig.pair()[:: -1 if by_server else 1]
        error = RuntimeError("cut")
        closing.channel.close(error)
        rig.until_closed(closing, other)
        assert closing.log.closed == [error]
        if not rig.kit.cut_is_noticed:
            return
        assert isinstance(other.log.closed[0], BytePSError)
        assert isinstance(other.log.closed[0], ConnectionError)
        assert other.channel.peer in str(other.log.closed[0])

    @pytest.mark.parametrize("by_server", [False, True], ids=["by_client", "by_server"])
    def test_close_when_sent_delivers_everything_first(self, rig: Rig, by_server: bool) -> None:
        closing, other = rig.pair()[:: -1 if by_server else 1]
        send(rig, other, bytes(3 * MiB))  # unread input must not turn the end into a reset that loses the last bytes
        data = random.Random(3).randbytes(MiB)
        expected = [send(rig, closing, data, n) for n in range(12)]
        closing.channel.close_when_sent()
        send(rig, closing, b"too late")
        rig.until_closed(closing, other)
        assert other.log.frames == expected
        assert closing.log.closed == other.log.closed == [None]

    def test_close_when_sent_with_nothing_queued(self, rig: Rig) -> None:
        near, far = rig.pair()
        near.channel.close_when_sent()
        near.channel.close_when_sent()
        rig.until_closed(near, far)
        assert near.log.closed == far.log.closed == [None]

    def test_close_when_sent_before_on_open(self, rig: Rig) -> None:
        near = rig.connect()
        expected = send(rig, near, b"last words")
        near.channel.close_when_sent()
        rig.until(lambda: rig.accepted, "accept")
        rig.until_closed(near, rig.accepted[0])
        assert rig.accepted[0].log.frames == [expected]
        assert near.log.closed == [None]

    def test_connect_to_nobody(self, rig: Rig) -> None:
        address = rig.kit.nowhere()
        near = rig.connect(address=address)
        send(rig, near, b"lost")
        assert near.log.closed == []
        rig.until_closed(near)
        assert near.log.opened == 0
        assert isinstance(near.log.closed[0], ConnectionError)
        assert address in str(near.log.closed[0])
        assert "hint:" in str(near.log.closed[0])

    def test_close_while_connecting(self, rig: Rig) -> None:
        near = rig.connect()
        near.channel.close()
        rig.until_closed(near)
        assert near.log.opened == 0
        assert near.log.closed == [None]
        rig.until(lambda: all(end.log.closed for end in rig.accepted), "the other side")

    # ---- handlers that do what they may

    @pytest.mark.parametrize("on_server", [False, True], ids=["client", "server"])
    def test_close_from_inside_on_open(self, rig: Rig, on_server: bool) -> None:
        closing = Recorder(on_open=lambda channel: channel.close())
        if on_server:
            rig.accept_with = lambda: closing
        near = rig.connect(None if on_server else closing)
        rig.until(lambda: closing.closed and near.log.closed, "on_close")
        rig.until(lambda: all(end.log.closed for end in rig.accepted), "on_close of the other side")
        assert closing.closed == [None]
        assert closing.frames == []

    def test_close_from_inside_on_frame(self, rig: Rig) -> None:
        rig.accept_with = lambda: Recorder(on_frame=lambda channel, header, buffer: channel.close())
        near, far = rig.pair()
        for n in range(10):
            send(rig, near, b"x" * 100, n)
        rig.until_closed(near, far)
        assert [header.sequence for header, _ in far.log.frames] == [0]
        assert far.log.closed == [None]

    def test_send_from_inside_callbacks(self, rig: Rig) -> None:
        rig.accept_with = lambda: Recorder(
            on_frame=lambda channel, header, buffer: channel.send(header._replace(nbytes=0))
        )
        near, _far = rig.pair(Recorder(on_open=lambda channel: channel.send(Header(PUSH, sequence=7))))
        for n in range(50):
            send(rig, near, b"y" * n, n)
        rig.until(lambda: len(near.log.frames) >= 51, "all answers")
        assert [header.sequence for header, _ in near.log.frames] == [7, *range(50)]

    @pytest.mark.parametrize("method", ["on_open", "on_header", "on_frame"])
    def test_a_handler_that_raises_closes_only_its_channel(self, rig: Rig, method: str) -> None:
        good = rig.pair()
        error = RuntimeError("a bug in a handler")

        def fail(*_: object) -> None:
            raise error

        rig.accept_with = lambda: Recorder(**{method: fail})
        near = rig.connect()
        for n in range(3):
            send(rig, near, bytes(100), n)
        rig.until(lambda: len(rig.accepted) == 2 and (rig.accepted[1].log.closed or rig.accepted[1].log.frames), "it")
        if method == "on_header" and not rig.accepted[1].log.headers:
            pytest.skip("this transport has the payload already and asks for no memory")
        rig.until_closed(near, rig.accepted[1])
        assert rig.accepted[1].log.closed == [error]
        self._still_works(rig, good)

    def test_an_accept_that_raises_closes_only_its_channel(self, rig: Rig) -> None:
        good = rig.pair()
        accept_with = rig.accept_with

        def fail() -> Recorder:
            raise RuntimeError("no")

        rig.accept_with = fail
        near = rig.connect()
        rig.until_closed(near)
        rig.accept_with = accept_with
        self._still_works(rig, good)
        self._still_works(rig, rig.pair())

    # ---- listeners, strangers, descriptors, forks

    def test_names_and_addresses(self, rig: Rig) -> None:
        near, far = rig.pair()
        assert rig.server.name == near.channel.transport == far.channel.transport == rig.kit.name
        assert rig.listener.address.startswith(f"{rig.kit.name}://")
        assert near.channel.peer == rig.listener.address
        assert far.channel.peer

    def test_a_place_that_is_taken_is_a_config_error(self, rig: Rig) -> None:
        where = rig.kit.taken(rig.listener.address)
        with pytest.raises(ConfigError) as caught:
            rig.server.listen(rig.server_reactor, where, lambda channel: Recorder())
        assert where in str(caught.value)
        assert "hint:" in str(caught.value)
        self._still_works(rig, rig.pair())

    def test_a_closed_listener_accepts_no_more_and_its_channels_stay(self, rig: Rig) -> None:
        good = rig.pair()
        rig.listener.close()
        rig.listener.close()
        near = rig.connect()
        rig.until_closed(near)
        assert isinstance(near.log.closed[0], ConnectionError)
        assert len(rig.accepted) == 1
        self._still_works(rig, good)

    @pytest.mark.parametrize("kind", HOSTILE)
    def test_hostile_bytes_close_only_their_channel(self, rig: Rig, kind: str) -> None:
        data, error = HOSTILE[kind]
        good = rig.pair()
        stranger = rig.kit.raw(rig.listener.address)
        if stranger is None:
            pytest.skip("raw bytes cannot get into this transport")
        try:
            stranger.send(data)
            rig.until(lambda: len(rig.accepted) == 2 and rig.accepted[1].log.closed, "the stranger's end")
        finally:
            stranger.close()
        assert type(rig.accepted[1].log.closed[0]) is error
        assert rig.accepted[1].log.frames == []
        assert rig.kit.ledger.largest_nbytes <= 64 * KiB
        self._still_works(rig, good)
        self._still_works(rig, rig.pair())

    def test_channels_that_end_leave_no_descriptor(self, rig: Rig) -> None:
        rig.until_closed(*self._opened_and_closed(rig))
        before = len(descriptors())  # the first one's may still be among them: zmq closes its own in the background
        for _ in range(10):
            rig.until_closed(*self._opened_and_closed(rig))
        rig.until(lambda: len(descriptors()) <= before, f"no more than {before} descriptors")

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_child_lets_go_and_harms_nothing(self, rig: Rig) -> None:
        pair = rig.pair()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for transport in rig.transports:
                    if hasattr(transport, "close_in_child"):
                        transport.close_in_child()
                for reactor in rig.reactors:
                    reactor.close_in_child()
                left = descriptors().keys() - rig.descriptors_before.keys()
                code = 2 if left and rig.kit.child_closes_all else 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        self._still_works(rig, pair)
        self._still_works(rig, rig.pair())

    def _opened_and_closed(self, rig: Rig) -> tuple[End, End]:
        near, far = rig.pair()
        self._still_works(rig, (near, far))
        near.channel.close()
        return near, far

    def _still_works(self, rig: Rig, pair: tuple[End, End]) -> None:
        near, far = pair
        received = len(near.log.frames), len(far.log.frames)
        expected = send(rig, near, b"there"), send(rig, far, b"and back")
        rig.until(lambda: len(near.log.frames) > received[0] and len(far.log.frames) > received[1], "a frame each way")
        assert (far.log.frames[-1], near.log.frames[-1]) == expected
        assert near.log.closed == far.log.closed == []
