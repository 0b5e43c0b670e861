"""Keeps torch.compile out of our Python frames.

A compiled program calls the process group from C++, and Dynamo would try to compile what it meets there.
`torch._disable_dynamo` would do too, but imports torch._dynamo (1.3 s) when first called, and costs 0.6 us a call.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch._C._dynamo import eval_frame


def skip(*classes: type) -> None:
    """Let no method of `classes`, nor anything called by one, be compiled."""
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for cls in classes:
        for code in _codes(cls):
            eval_frame.set_code_exec_strategy(code, strategy)


def _codes(cls: type) -> Iterator[types.CodeType]:
    for value in vars(cls).values():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield function.__code__
