"""The server's process: how it starts, what it refuses, what it survives, how it ends."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.rig import Process, start_ranks
from torch_bps.errors import PeerLostError
from torch_bps.wire import control
from torch_bps.wire.dtypes import DTYPE_BY_NAME, SUM
from torch_bps.wire.header import (
    CONTROL,
    FIRST_PRIVATE_FRAME,
    HEADER_NBYTES,
    HOME,
    PULL,
    PUSH,
    RESULT,
    WANT,
    Header,
    unpack,
)
from torch_bps.wire.ops import ALL_REDUCE

DEADLINE_S = 20.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server(Process):
    """A server on loopback, ready."""

    def __init__(self, *options: str) -> None:
        super().__init__([sys.executable, "-m", "torch_bps.server", *options], name="server")
        try:
            line = self.wait_for("ready at")
        except BaseException:
            self.close()
            raise
        self.control_port = int(re.findall(r"ready at [^ ]+:(\d+)", line)[0])
        self.data_port = int(re.findall(r"tcp://[^ ]+:(\d+)", line)[0])
        self.shm_name = re.findall(r"shm://([^ ,]+)", line)[0]

    def ends(self, code: int = 0) -> None:
        assert self.wait(time.monotonic() + DEADLINE_S) == code, self.output
        assert "Traceback" not in self.output

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def memory_nbytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


class Client:
    """A process of ranks, as far as the server can see, on the data port."""

    def __init__(self, server: Server, name: str = "somebody") -> None:
        self._sock = socket.create_connection(("127.0.0.1", server.data_port), DEADLINE_S)
        self._name = name

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except ConnectionError:
            pass  # refused before it had all

    def hello(self) -> control.AnyMessage | None:
        self.send(said(control.Hello(self._name, rank=7, host="here", pid=1)))
        return self.hear()

    def hear(self) -> control.AnyMessage | None:
        """Return the next message, None when the server has closed."""
        data = self._exactly(HEADER_NBYTES)
        if data is None:
            return None
        header = unpack(data)
        assert header.frame == CONTROL
        return control.decode(self._exactly(header.nbytes) or b"")

    def closed(self) -> bool:
        """Whether the server closes, whatever it says before."""
        try:
            while self._sock.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def _exactly(self, nbytes: int) -> bytes | None:
        data = b""
        while len(data) < nbytes:
            try:
                piece = self._sock.recv(nbytes - len(data))
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return data


# ---- starting


def test_it_is_ready_soon_and_without_torch(server: Server) -> None:
    # Processor time, not the clock: other tests may share the machine. It only computes until it is ready.
    assert server.cpu_s() < 0.5
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "numpy" in maps
    assert "libtorch" not in maps


def test_an_idle_server_does_nothing(server: Server) -> None:
    before_s = server.cpu_s()
    assert server.wait(time.monotonic() + 1.5) is None
    assert server.cpu_s() - before_s <= 0.03


def refused(*options: str, env: dict[str, str] | None = None) -> str:
    """Start a server that cannot run; return what it says."""
    with Process([sys.executable, "-m", "torch_bps.server", *options], env=env, name="server") as process:
        assert process.wait(time.monotonic() + DEADLINE_S) == 2, process.output
        output = process.output
    assert "Traceback" not in output
    assert output.count("byteps server: ") == 1
    return output


def test_a_port_that_is_taken() -> None:
    port = a_pair_of_ports() + 1  # the one before it is free, so that only the taken one is to blame
    with socket.create_server(("127.0.0.1", port)):
        for options in (["--port", str(port)], ["--port", str(port - 1)]):  # for control, for data
            output = refused("--host", "127.0.0.1", *options)
            assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in output
            assert "hint: " in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "nobody.invalid"], ["nobody.invalid"]),
        (["--host", "192.0.2.77"], ["192.0.2.77", "Cannot assign"]),
        (["--port", "65535"], ["--port 65535", "0 to 65534"]),
        (["--port", "-1"], ["--port -1"]),
        (["--port", "many"], ["--port", "many"]),
        (["--threads", "-3"], ["--threads -3", "0 to 64"]),
        (["--drain-timeout", "nan"], ["--drain-timeout nan"]),
        (["--rdzv-endpoint", "nonsense"], ["--rdzv-endpoint", "'nonsense' is no HOST:PORT"]),
        (["--rdzv-endpoint", "nobody.invalid:29400"], ["nobody.invalid", "--rdzv-endpoint"]),
        (["--rdzv-endpoint", "10.0.0.1:99999"], ["--rdzv-endpoint", "99999"]),
        (["--nonsense"], ["--nonsense"]),
    ],
    ids=lambda value: value[0] + value[-1] if value[0].startswith("--") else "",
)
def test_wrong_options_are_named(options: list[str], words: list[str]) -> None:
    output = refused(*options)
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    ("name", "value"),
    [("BYTEPS_SERVER_ENGINE_THREAD", "x"), ("BYTEPS_INTERFACE", "nope0"), ("BYTEPS_SHARED_MEMORY_BYTES", "1")],
)
def test_wrong_settings_are_named(name: str, value: str) -> None:
    output = refused(env={name: value})
    assert f"{name}={value!r}" in output
    assert "hint: " in output


# ---- ending


def test_sigterm_ends_an_idle_server(server: Server) -> None:
    server.kill(signal.SIGTERM)
    server.ends()


def test_ctrl_c_ends_an_idle_server(server: Server) -> None:
    server.kill(signal.SIGINT)
    server.ends()


def test_draining_waits_for_who_is_connected_and_lets_nobody_in(server: Server) -> None:
    with Client(server) as client:
        assert isinstance(client.hello(), control.Welcome)
        server.kill(signal.SIGTERM)
        server.wait_for("draining: SIGTERM")
        with pytest.raises(ConnectionRefusedError):
            Client(server, "another")
        client.send(said(control.Ping(5)))
        assert client.hear() == control.Pong(5)
        client.send(said(control.Bye()))
        assert client.hear() == control.Bye()
        server.ends()
    news = [line.partition(" INFO ")[2] for line in server.output.splitlines()]
    assert [line for line in news if line.startswith("rank ")] == [
        "rank 7 (host here, pid 1) is here",
        "rank 7 (host here, pid 1) has left",
    ]


def test_after_the_drain_timeout_who_is_connected_is_told() -> None:
    with Server("--drain-timeout", "0.2") as server, Client(server) as client:
        client.hello()
        server.kill(signal.SIGTERM)
        assert client.hear() == control.Bye("it was told to end")
        assert client.closed()
        server.ends()


def test_a_second_sigterm_ends_it_at_once(server: Server) -> None:
    with Client(server) as client:
        client.hello()
        server.kill(signal.SIGTERM)
        server.wait_for("draining")
        started = time.monotonic()
        server.kill(signal.SIGTERM)
        server.ends()
        assert time.monotonic() - started < 5  # the drain timeout is 10 s
        assert client.closed()


def sum_until_told(rank: int, world_size: int, stop_file: str) -> tuple[int, str]:
    """Sum until the file is there (all ranks stop after the same round) or an error comes."""
    dist.init_process_group("byteps")
    rounds = 0
    try:
        while True:
            tensor = torch.arange(50_000, dtype=torch.float64) * (rank + 1)
            tensor[0] = float(os.path.exists(stop_file))
            dist.all_reduce(tensor)
            assert torch.equal(tensor[1:], torch.arange(50_000)[1:] * 3.0)
            rounds += 1
            if rounds == 3:
                print("under way", flush=True)
            if tensor[0] > 0:
                break
    except PeerLostError as error:
        return rounds, str(error)
    dist.destroy_process_group()
    return rounds, ""


def test_sigterm_tells_a_job(tmp_path: Path) -> None:
    with Server("--drain-timeout", "0.2") as server:
        env = {"BYTEPS_SERVERS": f"127.0.0.1:{server.control_port}"}
        with start_ranks(sum_until_told, 2, str(tmp_path / "never"), env=env) as job:
            for rank in job.ranks:
                rank.wait_for("under way")
            server.kill(signal.SIGTERM)
            server.ends()
            for result in job.results(check=True):
                assert "it was told to end" in result.value[1]
                assert "all_reduce" in result.value[1]
                assert str(server.control_port) in result.value[1]


# ---- what others may send


def said(message: control.Message) -> bytes:
    header, payload = control.encode(message)
    return header.pack() + payload


def raw_message(text: bytes) -> bytes:
    return Header(CONTROL, nbytes=len(text)).pack() + text


RNG = random.Random(6)
HELLO = said(control.Hello("hostile", 1, "there", 2))
FROM_STRANGERS = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(100),
    "random bytes": RNG.randbytes(5000),
    "zeros": bytes(5000),
    "another version": b"BP\x09" + Header(CONTROL).pack()[3:],
    "too large": Header(PUSH, nbytes=1 << 62).pack(),
    "large before a hello": Header(PUSH, nbytes=1 << 30).pack(),
    "large hello": Header(CONTROL, nbytes=1 << 29).pack(),
    "data before a hello": Header(PUSH, nbytes=8).pack() + bytes(8),
    "no message": Header(CONTROL).pack(),
    "no json": raw_message(RNG.randbytes(64)),
    "json of no kind": raw_message(b'{"type":1}'),
    "a hello of wrong types": raw_message(b'{"type":"hello","process":[],"rank":"x"}'),
    "nested json": raw_message(b"[" * 60000),
    "a lane of nobody": said(control.Attach("x", 1)),
    "a message of servers": said(control.Welcome("x", [])),
    "a frame of a transport": Header(FIRST_PRIVATE_FRAME + 3).pack(),
    "unknown frame": Header(33).pack(),
    "two hellos": HELLO + HELLO,
}
AFTER_HELLO = {
    "a group not joined": lambda group: push(group),
    "a message of servers": lambda group: said(control.Welcome("x", [])),
    "an uplink": lambda group: said(control.Join(group, 2, 0, 0, uplink=True)),
    "negative index": lambda group: said(control.Join(group, 2, -1, 0)),
    "index out of range": lambda group: said(control.Join(group, 2, 2, 0)),
    "no members": lambda group: said(control.Join(group, 0, 0, 0)),
    "negative size": lambda group: said(control.Join(group, -3, 0, 0)),
    "no nodes": lambda group: said(control.Join(group, 2, 0, 0, num_nodes=0)),
    "node out of range": lambda group: said(control.Join(group, 2, 0, 0, num_nodes=2, node=2)),
    "joined twice": lambda group: join(group) * 2,
    "a number that is none": lambda group: raw_message(b'{"type":"join","group":1e400,"size":2,"index":0,"rank":0}'),
    "unknown op": lambda group: join(group) + push(group, op=99),
    "unknown dtype": lambda group: join(group) + push(group, dtype=99),
    "unknown reduce kind": lambda group: join(group) + push(group, redop=99),
    "a part of a float": lambda group: join(group) + push(group, nbytes=7),
    "a pull with payload": lambda group: join(group) + push(group, frame=PULL),
    "a result": lambda group: join(group) + push(group, frame=RESULT),
}


def join(group: int) -> bytes:
    return said(control.Join(group, 2, 0, 0))


def push(group: int, frame: int = PUSH, nbytes: int = 8, **fields: int) -> bytes:
    """A float32 all_reduce's push, but for what is given."""
    given = {"op": ALL_REDUCE, "dtype": DTYPE_BY_NAME["float32"].code, "redop": SUM, "flags": WANT | HOME, **fields}
    return Header(frame, group=group, nbytes=nbytes, total=nbytes, **given).pack() + bytes(nbytes)


def noise(server: Server) -> None:
    """Everything that somebody who means no good, or another program, may send to any of the ports."""
    for what, data in FROM_STRANGERS.items():
        with Client(server) as client:
            client.send(data)
            assert client.closed(), what
    for group, (what, data_of) in enumerate(AFTER_HELLO.items(), 50):
        with Client(server, what) as client:
            assert isinstance(client.hello(), control.Welcome), what
            client.send(data_of(group))
            assert client.closed(), what
    rng = random.Random(7)
    for _ in range(30):
        with Client(server) as client:
            client.send(rng.randbytes(rng.randrange(1, 200)))
            client.send(Header(PUSH).pack()[: rng.randrange(64)])
        with socket.create_connection(("127.0.0.1", server.control_port)) as raw:
            raw.sendall(rng.choice((b"GET / HTTP/1.0\r\n\r\n", rng.randbytes(300), b"\xff" * 64)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if rng.random() < 0.2 else socket.SOCK_STREAM) as raw:
            try:
                raw.connect("\0" + server.shm_name)
                raw.sendall(rng.randbytes(rng.randrange(1, 200)))
            except OSError:
                pass


def test_garbage_disturbs_nobody(tmp_path: Path, server: Server) -> None:
    stop = tmp_path / "stop"
    env = {"BYTEPS_SERVERS": f"127.0.0.1:{server.control_port}", "BYTEPS_TRANSPORT": "tcp"}
    with start_ranks(sum_until_told, 2, str(stop), env=env) as job:
        for rank in job.ranks:
            rank.wait_for("under way")
        before_nbytes = server.memory_nbytes()
        with Client(server) as half:  # stays, half a header sent
            half.send(Header(PUSH).pack()[:30])
            noise(server)
            stop.touch()
            for result in job.results(check=True):
                assert result.value[0] > 3
                assert result.value[1] == ""
    assert server.memory_nbytes() - before_nbytes < 64 << 20
    server.kill(signal.SIGTERM)
    server.ends()


def test_many_connections_that_say_nothing(server: Server) -> None:
    silent = [Client(server) for _ in range(200)]
    try:
        with Client(server) as client:
            assert isinstance(client.hello(), control.Welcome)
    finally:
        for client in silent:
            client._sock.close()
    server.kill(signal.SIGTERM)
    server.ends()


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["server", "--help"], 0, ["--rdzv-endpoint", "--drain-timeout", "BYTEPS_SERVERS"]),
        (["version"], 0, ["torch_bps "]),
        (["--version"], 0, ["torch_bps "]),
        (["--help"], 0, ["usage: byteps", "server"]),
        ([], 2, ["usage: byteps"]),
        (["sever"], 2, ["unknown command 'sever'", "usage: byteps"]),
        (["server", "--port", "x"], 2, ["--port"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line(arguments: list[str], code: int, words: list[str]) -> None:
    with Process([sys.executable, "-m", "torch_bps.cli.main", *arguments], name="byteps") as process:
        assert process.wait(time.monotonic() + DEADLINE_S) == code, process.output
        for word in words:
            assert word in process.output
        assert "Traceback" not in process.output


def test_a_fixed_port_has_data_beside_it() -> None:
    port = a_pair_of_ports()
    with Server("--host", "127.0.0.1", "--port", str(port)) as server:
        assert (server.control_port, server.data_port) == (port, port + 1)
        server.kill(signal.SIGTERM)
        server.ends()


def test_it_says_that_other_hosts_cannot_reach_it(server: Server) -> None:
    assert "--host" in server.wait_for("only ranks of this host")


def test_it_listens_at_several_addresses() -> None:
    with Server("--host", "127.0.0.1, 127.0.0.2") as server:
        found = re.findall(r"(zmq|tcp)://([^:]+):(\d+)", server.wait_for("ready at"))
        assert [(scheme, host) for scheme, host, _ in found] == [
            ("tcp", "127.0.0.1"),
            ("tcp", "127.0.0.2"),
            ("zmq", "127.0.0.1"),
        ]
        for _, host, port in found:
            socket.create_connection((host, int(port)), DEADLINE_S).close()
        server.kill(signal.SIGTERM)
        server.ends()


def a_pair_of_ports() -> int:
    """The first of two free neighbours, below what the kernel gives to whoever asks for any port (tests beside do)."""
    return next(port for port in range(20000 + os.getpid() % 10000, 32000) if is_free(port) and is_free(port + 1))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0 and port < 65536
