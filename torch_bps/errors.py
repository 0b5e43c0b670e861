"""The exception tree. Every error that torch_bps raises on purpose is one of these.

    BytePSError (torch.distributed.DistBackendError where torch is loaded, else RuntimeError)
    ├── ConfigError (ValueError)             a setting of the user's is wrong
    ├── ProtocolError (ConnectionError)      a peer sent bytes that the wire format forbids
    ├── VersionError (ConnectionError)       a peer speaks another wire version
    ├── MismatchError (ValueError)           ranks disagree about one operation
    ├── UnsupportedError (NotImplementedError)   a dtype, reduce kind or device that cannot be served
    ├── OperationTimeout (TimeoutError)      a deadline passed
    ├── PeerLostError (ConnectionError)      a rank or server died, froze, or left too early
    └── ClosedError (RuntimeError)           the group, or the whole runtime, was closed or forked

A server runs without torch, so the root's base is chosen by what is loaded when this module is first imported;
`torch_bps.BytePSError` (lazy, see torch_bps/__init__.py) imports torch first and so is always a DistBackendError.
"""

from __future__ import annotations

import sys
from typing import Any

_distributed = sys.modules.get("torch.distributed")
_Root: Any = getattr(_distributed, "DistBackendError", RuntimeError)


class BytePSError(_Root):  # type: ignore[misc]
    """Root of the tree.

    Args:
        what: one sentence: what happened, to which operation.
        hint: what the user can do about it; printed as a last line ``hint: ...``.
        facts: where it happened (``rank=3, host="a", server="tcp://..", operation="all_reduce float32[100] #12"``);
            printed one a line, indented, and kept as the dict attribute `facts`.
    """

    def __init__(self, what: str, *, hint: str = "", **facts: object) -> None:
        self.what = what
        self.hint = hint
        self.facts = {name: value for name, value in facts.items() if value is not None}
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.what]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def with_facts(self, **facts: object) -> BytePSError:
        """Return a copy of this error that carries more facts (those it already has win)."""
        return type(self)(self.what, hint=self.hint, **{**facts, **self.facts})


class ConfigError(BytePSError, ValueError):
    """A setting (environment variable, option, argument) has a value that cannot be used."""


class ProtocolError(BytePSError, ConnectionError):
    """A peer sent bytes that the wire format forbids; its connection is closed."""


class VersionError(BytePSError, ConnectionError):
    """A peer speaks another wire version."""


class MismatchError(BytePSError, ValueError):
    """The ranks of a group called different operations; the message lists each rank's view."""


class UnsupportedError(BytePSError, NotImplementedError):
    """This dtype, reduce kind, device or layout cannot be served."""


class OperationTimeout(BytePSError, TimeoutError):
    """The group's timeout passed; the message says who was being waited for."""


class PeerLostError(BytePSError, ConnectionError):
    """A rank or a server died, froze, or left before the operation was complete."""


class ClosedError(BytePSError, RuntimeError):
    """The group was destroyed, or the process is a forked child of the one that opened it."""


BY_NAME: dict[str, type[BytePSError]] = {
    cls.__name__: cls
    for cls in (
        BytePSError,
        ConfigError,
        ProtocolError,
        VersionError,
        MismatchError,
        UnsupportedError,
        OperationTimeout,
        PeerLostError,
        ClosedError,
    )
}
"""How an error crosses the wire: by class name (see wire.control.Failed), never by pickle."""


def told(error: BytePSError) -> tuple[str, str]:
    """Return the class name and the text of an error of this rank's as the other ranks are told it."""
    if isinstance(error, ClosedError):  # closed here; to them this rank is lost
        return PeerLostError.__name__, "it destroyed its process group, or ended"
    return type(error).__name__, error.what
