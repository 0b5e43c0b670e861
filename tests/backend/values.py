"""Values to compare, and the direct computation that collectives are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist

SIZES = (1, 2, 3)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
SUMMED = (*FLOATS, *INTS, *COMPLEX, torch.bool)
MOVED = (*SUMMED, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
OPS = dist.ReduceOp


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert bits(actual) == bits(expected)


def bits(tensor: torch.Tensor) -> list[int]:
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.detach().reshape(-1))
    return plain.view(torch.uint8).tolist()


def expected_sum(parts: list[torch.Tensor], op: object) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        if op in (OPS.SUM, OPS.AVG):
            total = total + part
        elif op == OPS.PRODUCT:
            total = total * part
        elif op == OPS.MIN:
            total = torch.minimum(total, part)
        elif op == OPS.MAX:
            total = torch.maximum(total, part)
        elif op == OPS.BAND:
            total = total & part
        elif op == OPS.BOR:
            total = total | part
        else:
            total = total ^ part
    if op == OPS.AVG:
        wide = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        if total.is_complex():  # part by part: torch's own division rounds otherwise
            total = torch.view_as_complex(torch.view_as_real(total) / len(parts))
        elif total.is_floating_point():
            total = wide / len(parts)
        else:
            total = torch.div(total, len(parts), rounding_mode="trunc")
    return total.to(parts[0].dtype)


def options(kind, **fields):
    result = kind()
    for name, value in fields.items():
        setattr(result, name, value)
    return result
