"""Starts a node's co-located server as a child process, and ends it."""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import torch_bps
from torch_bps.config import child_environment
from torch_bps.errors import ConfigError, OperationTimeout
from torch_bps.wire import announcement

_START_TIMEOUT_S = 60.0


class ColocatedServer:
    """A server that lives and dies with this process (it watches a pidfd of it, so also after SIGKILL).

    Thread safety: one thread at a time.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Start it and wait until it is ready.

        Args:
            hosts: addresses to listen at, one for each interface.

        Raises:
            ConfigError: it ended at once (its output says why); OperationTimeout: it was not ready in time.
        """
        read_fd, write_fd = os.pipe()
        package = str(pathlib.Path(torch_bps.__file__).parent.parent)
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch_bps.server", "--host", ",".join(hosts)),
                    *("--parent", str(os.getpid()), "--ready-fd", str(write_fd)),
                ],
                pass_fds=[write_fd],
                stdin=subprocess.DEVNULL,
                env=child_environment(prepend_pythonpath=package),
            )
        finally:
            os.close(write_fd)
        try:
            self.announcement = self._read(read_fd)
        except BaseException:
            self.stop(0.0)
            raise
        finally:
            os.close(read_fd)

    def _read(self, fd: int) -> announcement.Announcement:
        text = b""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not text.endswith(b"\n"):
            if time.monotonic() > deadline_s:
                raise OperationTimeout(f"the co-located server was not ready within {_START_TIMEOUT_S:g} s")
            if select.select([fd], [], [], 0.5)[0]:
                piece = os.read(fd, 65536)
                if not piece:
                    raise ConfigError(
                        f"the co-located server ended at once (exit code {self.process.wait(5)})",
                        hint="its own output above says why",
                    )
                text += piece
        return announcement.decode(text)

    def stop(self, timeout_s: float) -> None:
        """End it: SIGTERM and up to `timeout_s` to drain, then SIGKILL. Blocks until it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
