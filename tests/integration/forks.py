"""A process that has imported torch and forks the ranks of tests: 30 ms each, where a new interpreter takes 2 s.

    rig.start_ranks ──(command, environment, its stdout)──> fork server ── fork ──> tests.integration.rank.main
                    <──────── pid, pidfd, exit code ──────────── waits for it

A fork is a session leader with the given environment, which ends as any interpreter does. Not as in a new one: modules
are imported already, hash seeds are alike, and C++ has seen the server's environment when torch was imported; so
start_ranks takes a new interpreter for settings that are not ours, and where a test asks for it (`fresh=True`).
"""

from __future__ import annotations

import array
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
END_S = 10.0
PRELOADED = (
    "hypothesis",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch_bps.backend.process_group",
    "torch_bps.core.runtime",
)
_MAX_REQUEST_NBYTES = 1 << 17


class Forked:
    """A rank that was forked: as much of subprocess.Popen as tests.integration.process needs."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self.returncode is None and select.select([self.pidfd], [], [], 0)[0]:
            self.returncode = json.loads(self._status.recv(64))
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout: float) -> int:
        if self.returncode is not None:
            return self.returncode
        if not select.select([self.pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code


class ForkServer:
    """The server, started at once; it ends when this process does."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._requests.settimeout(START_S)
        self._requests.recv(16)  # it is ready

    def fork(self, command: Sequence[str], env: Mapping[str, str]) -> Forked:
        """Run tests.integration.rank; the command's last word is its folder."""
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.settimeout(START_S)
        output, pipe = os.pipe()
        try:
            request = json.dumps([command[-1], dict(env)]).encode()
            socket.send_fds(self._requests, [request], [theirs.fileno(), pipe])
        finally:
            theirs.close()
            os.close(pipe)
        data, descriptors, _, _ = socket.recv_fds(status, 64, 1)
        return Forked(json.loads(data), descriptors[0], status, os.fdopen(output, "rb", buffering=0))

    def close(self) -> None:
        """End it."""
        self._requests.close()
        self._process.wait(END_S)


@functools.cache
def server() -> ForkServer:
    """Return this process's fork server, started by the first call; tests/conftest.py calls and ends it."""
    return ForkServer()


def fork(command: Sequence[str], env: Mapping[str, str]) -> Forked:
    return server().fork(command, env)


# ---- the server's side


def serve(requests: socket.socket) -> str:
    """Fork until the requests' other end is closed. Returns, in each forked child, the folder of its task."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    """pidfd -> (pid, where its exit code goes)"""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                poll.unregister(descriptor)
                pid, status = running.pop(descriptor)
                _answer(status, json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode(), [])
                os.close(descriptor)
                status.close()
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_NBYTES, 2)
            if not data:
                sys.exit()
            status_fd, output = descriptors
            pid = os.fork()
            if pid == 0:
                for other in [requests, *(status for _, status in running.values())]:
                    other.close()
                for other_fd in [status_fd, *running]:
                    os.close(other_fd)
                return _become_rank(data, output)
            os.close(output)
            pidfd = os.pidfd_open(pid)
            status = socket.socket(fileno=status_fd)
            running[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)
            _answer(status, json.dumps(pid).encode(), [pidfd])


def _answer(status: socket.socket, data: bytes, descriptors: list[int]) -> None:
    try:
        status.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    except (BrokenPipeError, ConnectionResetError):
        pass  # the test has given it up


def _become_rank(data: bytes, output: int) -> str:
    folder, env = json.loads(data)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = [folder]
    return str(folder)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the forks"
    from tests.integration import rank

    gc.collect()
    gc.freeze()  # else each fork copies and frees all of it when it ends, for 0.7 s
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.send(b"ready")
    folder = serve(requests)
    rank.main(Path(folder))


if __name__ == "__main__":
    main()
