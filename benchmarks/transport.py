"""Latency and throughput of each transport between two processes, taking turns; inproc within one.

    python benchmarks/transport.py [--transports inproc,shm,tcp,zmq] [--sizes 64,64K,1M,4M]

The other process answers every frame with an empty one. "round trip" has one frame under way, "GB/s" has --window of
them: payloads one way, from ordinary memory, into memory of the receiver's (inproc hands them over and moves nothing).
This is the floor that everything above stands on: epoll loops in Python at both ends, no engine, no adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Lines, Result, Row, spread
from torch_bps.bench.table import nbytes_of
from torch_bps.transport import registry
from torch_bps.transport.arena import Arena
from torch_bps.transport.base import Buffer, Channel
from torch_bps.transport.inproc import InprocTransport
from torch_bps.transport.reactor import EpollReactor
from torch_bps.wire.header import PUSH, RESULT, Header

TRANSPORTS = ("inproc", *registry.SCHEMES)
DEADLINE_S = 60.0
_ROUNDS = 10
COLUMNS = (
    Column("transport", "transport"),
    Column("size (B)", "nbytes"),
    Column("round trip (us), median", "round_trip_s", ".1f", 1e6),
    Column("p99", "round_trip_p99_s", ".1f", 1e6),
    Column("GB/s", "gb_per_s", ".3f"),
)


class Answerer:
    """The receiving end: an empty frame for each that comes."""

    def on_open(self, channel: Channel) -> None: ...

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        return None

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        if buffer is not None:
            buffer.release()
        channel.send(Header(RESULT))

    def on_close(self, channel: Channel, error: Exception | None) -> None: ...


class Asker:
    """The sending end: keeps frames under way, and notes how long each took."""

    def __init__(self) -> None:
        self.is_open = False
        self.error: Exception | None = None
        self.times: list[float] = []
        self._left = self._outstanding = 0
        self._sent: list[float] = []

    def start(self, channel: Channel, buffer: Buffer, count: int, window: int) -> None:
        """Send `count` frames, `window` of them at a time."""
        self.times, self._sent = [], []
        self._left, self._outstanding = count, count
        self._buffer = buffer
        self._header = Header(PUSH, total=buffer.view.nbytes, nbytes=buffer.view.nbytes)
        for _ in range(min(window, count)):
            self._send(channel)

    def is_done(self) -> bool:
        """Whether every frame was answered."""
        return self._outstanding == 0

    def _send(self, channel: Channel) -> None:
        self._left -= 1
        self._sent.append(time.perf_counter())
        channel.send(self._header, self._buffer.retain())

    def on_open(self, channel: Channel) -> None:
        self.is_open = True

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        return None

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        self.times.append(time.perf_counter() - self._sent[len(self.times)])
        self._outstanding -= 1
        if self._left:
            self._send(channel)

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        self.error = error or ConnectionError(f"{channel.peer} closed the connection")


class Side:
    """One process's transports over one reactor, driven by the caller's thread."""

    def __init__(self) -> None:
        self.reactor = EpollReactor("byteps-bench")
        self._arena = Arena()
        self._transports: dict[str, Any] = {}

    def transport(self, scheme: str) -> Any:
        """Return the transport of that name."""
        if scheme not in self._transports:
            made = InprocTransport() if scheme == "inproc" else registry.make(scheme, self._arena)
            self._transports[scheme] = made
        return self._transports[scheme]

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Run the reactor until `done()`. Raises TimeoutError after DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{DEADLINE_S:g} s passed: {what}")
            self.reactor.run_once(1.0)

    def close(self) -> None:
        """Close everything."""
        for transport in self._transports.values():
            if hasattr(transport, "close"):
                transport.close()
        self._arena.close()
        self.reactor.stop()


def serve() -> None:
    """Be the other process: print the addresses, answer until standard input ends."""
    side = Side()
    ended: list[int] = []
    listeners = {}
    for scheme in registry.SCHEMES:
        where = f"byteps-bench-{time.monotonic_ns()}" if scheme == "shm" else "127.0.0.1:0"
        listeners[scheme] = side.transport(scheme).listen(side.reactor, where, lambda channel: Answerer())
    side.reactor.add(sys.stdin.fileno(), 1, ended.append)
    print(json.dumps({scheme: listener.address for scheme, listener in listeners.items()}), flush=True)
    while not ended:
        side.reactor.run_once(1.0)
    for listener in listeners.values():
        listener.close()
    side.close()


def measure(side: Side, ends: dict[str, tuple[Channel, Asker]], nbytes: int, window: int, seconds: float) -> list[Row]:
    """Return a row for each transport."""
    buffer = Buffer(memoryview(bytearray(nbytes)))

    def run(scheme: str, count: int, window: int) -> float:
        channel, asker = ends[scheme]
        began = time.perf_counter()
        asker.start(channel, buffer, count, window)
        side.until(lambda: asker.is_done() or asker.error is not None, f"{scheme}, {nbytes} bytes")
        if asker.error is not None:
            raise asker.error
        return time.perf_counter() - began

    counts = {scheme: max(3, int(seconds / 2 / _ROUNDS * 10 / run(scheme, 10, 1))) for scheme in ends}
    trips: dict[str, list[float]] = {scheme: [] for scheme in ends}
    rates: dict[str, list[float]] = {scheme: [] for scheme in ends}
    for _ in range(_ROUNDS):
        for scheme, count in counts.items():
            run(scheme, count, 1)
            trips[scheme] += ends[scheme][1].times
            frames = count * window
            rates[scheme].append(nbytes * frames / run(scheme, frames, window) / 1e9)
    rows = []
    for scheme in ends:
        trip = spread(trips[scheme])
        rows.append(
            {
                "transport": scheme,
                "nbytes": nbytes,
                "round_trip_s": trip["median"],
                "round_trip_min_s": trip["min"],
                "round_trip_p99_s": trip["p99"],
                "samples": trip["samples"],
                "gb_per_s": None if scheme == "inproc" else statistics.median(rates[scheme]),
            }
        )
    return rows


def compare(schemes: Sequence[str], sizes: Sequence[int], window: int, seconds: float) -> list[Row]:
    """Connect to the other process by every transport and measure all sizes."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        side = Side()
        ends: dict[str, tuple[Channel, Asker]] = {}
        try:
            addresses = json.loads(other.stdout.readline())
            side.transport("inproc").listen(side.reactor, "bench", lambda channel: Answerer())
            addresses["inproc"] = "inproc://bench"
            for scheme in schemes:
                asker = Asker()
                ends[scheme] = (side.transport(scheme).connect(side.reactor, addresses[scheme], asker), asker)
            side.until(lambda: all(asker.is_open or asker.error for _, asker in ends.values()), "connecting")
            return [row for nbytes in sizes for row in measure(side, ends, nbytes, window, seconds)]
        finally:
            for channel, _ in ends.values():
                channel.close()
            side.reactor.run_once()
            side.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--sizes", default="64,4K,64K,1M,4M")
    parser.add_argument("--window", type=int, default=4, help="frames under way")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each transport and size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    schemes = options.transports.split(",")
    if unknown := set(schemes) - set(TRANSPORTS):
        parser.error(f"--transports: {', '.join(sorted(unknown))} is none of {', '.join(TRANSPORTS)}")
    sizes = [nbytes_of(text) for text in options.sizes.split(",")]
    rows = compare(schemes, sizes, options.window, options.seconds)
    title = "Transports between two processes (inproc: within one)"
    settings = {"window": options.window, "seconds": options.seconds, "rounds": _ROUNDS}
    result = Result("transport", title, COLUMNS, rows, settings, Lines("nbytes", "gb_per_s", "transport"))
    result.print()
    if options.json:
        result.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
