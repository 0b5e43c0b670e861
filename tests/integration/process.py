"""One child process with its output at hand, ended for certain with everything that it started.

Made by rig; used directly for servers and anything else that is not a rank.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.integration import forks

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A command, started at once, in a session of its own, stdout and stderr read as they come.

    Thread safety: methods may be called from any thread.

    Args:
        command: program and arguments.
        env: added to this process's environment (which conftest has cleared of BYTEPS_*).
        name: for messages.
        fork: fork it from a process that has imported torch (tests.integration.forks).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "process",
        fork: bool = False,
    ) -> None:
        self.name = name
        self._text = ""
        self._grown = threading.Condition()
        self._closed_output = False
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
        self._popen: subprocess.Popen[bytes] | forks.Forked
        self._pidfd: int | None
        if fork:
            self._popen = forks.fork(command, environment)
            self._pidfd = self._popen.pidfd
        else:
            self._popen = subprocess.Popen(
                list(command),
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._popen.pid)
        self._reader = threading.Thread(target=self._read, name=f"rig-reader-{self.pid}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        with self._grown:
            return self._text

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """Wait until `text` has been printed and return its (whole) line.

        Raises:
            AssertionError: it ended first, or the time passed.
        """
        deadline = time.monotonic() + timeout_s
        with self._grown:
            while True:
                for line in self._text.splitlines(keepends=True):
                    if text in line and line.endswith("\n"):
                        return line.rstrip("\n")
                left_s = deadline - time.monotonic()
                if self._closed_output or left_s <= 0:
                    why = "it ended" if self._closed_output else f"{timeout_s} s passed"
                    raise AssertionError(f"{self.name} never printed {text!r}: {why}\n{self._text[-6000:]}")
                self._grown.wait(left_s)

    def wait(self, deadline: float) -> int | None:
        """Return the exit code (negative: signal), or None if it still runs at `deadline` (time.monotonic)."""
        if self._popen.returncode is None and self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        code = self._popen.poll()
        if code is not None and not self._session():
            self._reader.join(5.0)  # nobody holds the pipe any more: all of the output is read
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to this process alone, not to its children."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def orphans(self, grace_s: float) -> list[str]:
        """Return what it started and left running, once it has ended; waits up to `grace_s` for that to go."""
        if self._popen.poll() is None:
            return []
        deadline = time.monotonic() + grace_s
        pause = threading.Event()
        while (pids := self._session()) and time.monotonic() < deadline:
            pause.wait(0.02)
        return [f"{pid} {_read(f'/proc/{pid}/cmdline')}".replace("\0", " ") for pid in pids]

    def close(self) -> None:
        """End it and its session now; harmless when repeated."""
        deadline = time.monotonic() + 10.0
        pause = threading.Event()
        while pids := self._session():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._popen.poll()
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: cannot end {pids}")
            pause.wait(0.002)
        self._popen.wait(10.0)
        self._reader.join(10.0)
        if self._popen.stdout and not self._reader.is_alive():
            self._popen.stdout.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _session(self) -> list[int]:
        """Return the living processes of the session that this process leads (or led)."""
        if self._pidfd is None:
            return []
        members = []
        for entry in os.listdir("/proc"):
            fields = _stat(int(entry)) if entry.isdigit() else []
            if fields and fields[0] not in "ZX" and int(fields[3]) == self.pid:
                members.append(int(entry))
        return members

    def _read(self) -> None:
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        while piece := os.read(descriptor, 1 << 16):
            with self._grown:
                self._text += piece.decode(errors="replace")
                self._grown.notify_all()
        with self._grown:
            self._closed_output = True
            self._grown.notify_all()


def alive(pid: int) -> bool:
    """Return whether the process runs: one that has ended but that nobody has waited for does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Return [state, ppid, pgrp, session, ...] from /proc/PID/stat, [] if there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
