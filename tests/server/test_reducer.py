"""The reducer against torch: every dtype with every reduce kind, odd sizes, unaligned and read-only memory."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from torch_bps.errors import UnsupportedError
from torch_bps.server import reducer
from torch_bps.wire.dtypes import (
    AVG,
    BAND,
    BOR,
    BXOR,
    DTYPE_BY_NAME,
    DTYPES,
    HALF_CODES,
    MAX,
    MIN,
    NONE,
    PREMUL_SUM,
    PRODUCT,
    RAW,
    REDUCE_KINDS,
    SUM,
    accumulated_nbytes,
)
from torch_bps.wire.reductions import check, supported

DIVISOR = 3
PAIRS = [(dtype.name, redop) for dtype in DTYPES for redop in range(len(REDUCE_KINDS)) if supported(dtype.code, redop)]
HALVES = ["float16", "bfloat16"]


def code(name: str) -> int:
    return DTYPE_BY_NAME[name].code


def random_tensor(name: str, size: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.randint(0, 2, (size,), generator=generator).to(torch.bool)
    if dtype.is_floating_point:
        return (torch.randn(size, generator=generator) * 8).to(dtype)
    if dtype.is_complex:
        return torch.complex(torch.randn(size, generator=generator), torch.randn(size, generator=generator)).to(dtype)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)  # all bit patterns: sums wrap


def as_view(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()) if tensor.numel() else b"")


def as_tensor(data: memoryview, name: str) -> torch.Tensor:
    if not data.nbytes:
        return torch.empty(0, dtype=getattr(torch, name))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, name))


def combine(a: torch.Tensor, b: torch.Tensor, redop: int) -> torch.Tensor:
    """Return a op b by torch, in the dtype's own arithmetic."""
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has hardly any ops for them
        mask = (1 << 8 * a.dtype.itemsize) - 1
        function = {MIN: min, MAX: max}.get(redop) or (lambda x, y: int(PYTHON_OPS[redop](x, y)) & mask)
        return torch.tensor([function(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)], dtype=a.dtype)
    if a.dtype == torch.bool:
        name = {SUM: "or", PREMUL_SUM: "or", MAX: "or", BOR: "or", BXOR: "xor"}.get(redop, "and")
        return getattr(torch, f"logical_{name}")(a, b)
    return TORCH_OPS[redop](a, b)


PYTHON_OPS = {
    SUM: lambda x, y: x + y,
    AVG: lambda x, y: x + y,
    PREMUL_SUM: lambda x, y: x + y,
    PRODUCT: lambda x, y: x * y,
    BAND: lambda x, y: x & y,
    BOR: lambda x, y: x | y,
    BXOR: lambda x, y: x ^ y,
}
TORCH_OPS = {
    SUM: torch.add,
    AVG: torch.add,
    PREMUL_SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def expected(inputs: list[torch.Tensor], redop: int, divisor: int) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = [tensor.float() for tensor in inputs] if dtype in (torch.float16, torch.bfloat16) else inputs
    total = wide[0].clone()
    for tensor in wide[1:]:
        total = combine(total, tensor, redop)
    if redop == AVG:
        if dtype.is_floating_point or dtype.is_complex:
            total = total / divisor
        elif dtype in (torch.uint16, torch.uint32, torch.uint64):
            total = torch.tensor([value // divisor for value in total.tolist()], dtype=dtype)
        else:
            total = total.div(divisor, rounding_mode="trunc")
    return total.to(dtype)


def run(
    name: str, redop: int, views: list[memoryview], *, cuts: tuple[int, ...] = (2,), divisor: int = DIVISOR
) -> torch.Tensor:
    """Fold the views in groups that end at `cuts` (and the rest)."""
    out = memoryview(bytearray(views[0].nbytes))
    accumulator = reducer.Accumulator(code(name), redop, out)
    edges = [0, *[cut for cut in cuts if cut < len(views)], len(views)]
    for start, end in itertools.pairwise(edges):
        accumulator.fold(views[start:end], False, last=end == len(views))
    accumulator.finish(divisor)
    return as_tensor(out, name)


def assert_same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.dtype.is_complex:
        torch.testing.assert_close(actual, wanted, equal_nan=True)
        return
    a, b = (tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor for tensor in (actual, wanted))
    assert torch.equal(a, b), f"{actual[:8]} instead of {wanted[:8]}"


@pytest.mark.parametrize(("name", "redop"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_kind_is_torchs(name: str, redop: int) -> None:
    generator = torch.Generator().manual_seed(redop)
    for size in (0, 1, 7, 1001, 40_001 if not name.startswith("uint") or name == "uint8" else 501):
        inputs = [random_tensor(name, size, generator) for _ in range(3)]
        views = [as_view(tensor) for tensor in inputs]
        before = [bytes(view) for view in views]
        for number, cuts in ((2, ()), (3, ()), (3, (2,)), (3, (1, 2))):
            assert_same(run(name, redop, views[:number], cuts=cuts), expected(inputs[:number], redop, DIVISOR))
        assert [bytes(view) for view in views] == before, "an input was modified"


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES if dtype.code != RAW])
def test_one_input_is_copied(name: str) -> None:
    tensor = random_tensor(name, 9, torch.Generator().manual_seed(1))
    assert_same(run(name, SUM, [as_view(tensor)]), tensor)


@pytest.fixture(params=[True, False], ids=["torch", "numpy"])
def with_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(reducer, "_torch_sought", True)
        monkeypatch.setattr(reducer, "_torch", None)
    return bool(request.param)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("redop", [SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM])
def test_halves_are_rounded_once(name: str, redop: int, with_torch: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [random_tensor(name, 70_001, generator) for _ in range(5)]
    for number in (2, 5):
        actual = run(name, redop, [as_view(tensor) for tensor in inputs[:number]], cuts=(3,))
        assert_same(actual, expected(inputs[:number], redop, DIVISOR))


def test_rounding_twice_would_be_noticed() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [random_tensor("bfloat16", 1000, generator) for _ in range(4)]
    rounded_each_time = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    assert not torch.equal(rounded_each_time, expected(inputs, SUM, 1))


@pytest.mark.parametrize("name", HALVES)
def test_every_half_value_survives_conversion(name: str, with_torch: bool) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(getattr(torch, name))
    zeros = torch.zeros_like(every)
    actual = run(name, SUM, [as_view(every), as_view(zeros), as_view(zeros)], cuts=(1,))
    wanted = every + 0
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HALVES)
def test_ties_round_to_even(name: str, with_torch: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    base = random_tensor(name, 4096, generator)
    step = (base.float().abs().log2().floor() - (8 if name == "bfloat16" else 11)).exp2()  # half a last place
    inputs = [base, step.to(base.dtype), torch.zeros_like(base)]
    assert_same(run(name, SUM, [as_view(tensor) for tensor in inputs], cuts=()), expected(inputs, SUM, 1))


@pytest.mark.parametrize("name", HALVES)
def test_float32_partial_sums_of_halves(name: str, with_torch: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = [random_tensor(name, 1003, generator) for _ in range(4)]
    nodes = []
    for pair in (inputs[:2], inputs[2:]):
        out = memoryview(bytearray(accumulated_nbytes(code(name), as_view(pair[0]).nbytes)))
        accumulator = reducer.Accumulator(code(name), AVG, out, keep32=True)
        accumulator.fold([as_view(tensor) for tensor in pair], False, last=True)
        accumulator.finish(2)
        assert_same(as_tensor(out, "float32"), pair[0].float() + pair[1].float())
        nodes.append(out)
    result = memoryview(bytearray(1003 * 2))
    accumulator = reducer.Accumulator(code(name), AVG, result)
    accumulator.fold(nodes, True, last=True)
    accumulator.finish(4)
    total = (inputs[0].float() + inputs[1].float()) + (inputs[2].float() + inputs[3].float())
    assert_same(as_tensor(result, name), (total / 4).to(inputs[0].dtype))


@pytest.mark.parametrize("name", HALVES)
def test_every_nan_stays_one(name: str, with_torch: bool) -> None:
    sums = memoryview(bytearray(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F800000], np.uint32).tobytes()))
    out = memoryview(bytearray(8))
    accumulator = reducer.Accumulator(code(name), SUM, out)
    accumulator.fold([sums], True, last=True)
    accumulator.finish(1)
    assert as_tensor(out, name).isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_nan_and_infinity(name: str) -> None:
    dtype = getattr(torch, name)
    a = torch.tensor([math.nan, 1.0, math.inf, -math.inf, torch.finfo(dtype).max], dtype=dtype)
    b = torch.tensor([1.0, math.nan, -math.inf, -math.inf, torch.finfo(dtype).max], dtype=dtype)
    for redop in (SUM, PRODUCT, MIN, MAX, AVG):
        actual = run(name, redop, [as_view(a), as_view(b)], divisor=2)
        wanted = expected([a, b], redop, 2)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def test_integer_average_goes_toward_zero_also_with_many_ranks() -> None:
    values = np.array([-128, -127, -7, -1, 0, 1, 7, 127], np.int8)
    zeros = np.zeros(8, np.int8)
    for divisor in (1, 2, 3, 128, 300):
        actual = run("int8", AVG, [memoryview(bytearray(v.tobytes())) for v in (values, zeros)], divisor=divisor)
        assert actual.tolist() == [int(value / divisor) for value in values.tolist()]
    lowest = torch.tensor([-(2**63), 2**63 - 1], dtype=torch.int64)
    assert run("int64", AVG, [as_view(lowest), as_view(lowest * 0)]).tolist() == [-((2**63) // 3), (2**63 - 1) // 3]
    highest = memoryview(bytearray(b"\xff" * 8))
    assert run("uint64", AVG, [highest, memoryview(bytearray(8))]).tolist() == [(2**64 - 1) // 3]


@pytest.mark.parametrize("name", ["float32", "int64", "bfloat16", "float16", "complex64"])
def test_unaligned_and_read_only_memory(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = [random_tensor(name, 333, generator) for _ in range(3)]
    views = [memoryview(b"x" + bytes(as_view(tensor)))[1:] for tensor in inputs]
    room = bytearray(views[0].nbytes + 2)
    accumulator = reducer.Accumulator(code(name), SUM, memoryview(room)[1:-1])
    accumulator.fold(views[:2], False)
    accumulator.fold(views[2:], False, last=True)
    accumulator.finish(1)
    assert_same(as_tensor(memoryview(room)[1:-1], name), expected(inputs, SUM, 1))
    assert (room[0], room[-1]) == (0, 0)


def test_what_cannot_be_done_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"AVG of bool is not possible") as raised:
        check(code("bool"), AVG)
    assert raised.value.hint == "bool has SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR"
    with pytest.raises(UnsupportedError, match="MIN of complex64"):
        reducer.Accumulator(code("complex64"), MIN, memoryview(bytearray(8)))
    with pytest.raises(UnsupportedError, match="can only be moved"):
        check(RAW, SUM)
    for dtype, redop in ((99, SUM), (code("int8"), 99), (code("int8"), NONE), (-1, SUM), (code("float32"), BAND)):
        assert not supported(dtype, redop)
        with pytest.raises(UnsupportedError):
            check(dtype, redop)


def test_a_server_loads_torch_only_for_halves() -> None:
    program = """if True:
        import sys
        from torch_bps.server import reducer
        reducer.limit_threads()
        def add(dtype):
            out = memoryview(bytearray(8))
            sums = reducer.Accumulator(dtype, 1, out)
            sums.fold([out, out], False)
            sums.finish(1)
        add(9)
        assert "torch" not in sys.modules
        add(8)
        assert sys.modules["torch"].get_num_threads() == 1
    """
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=50)


def test_scratch_memory_is_reused_and_bounded() -> None:
    spare = reducer._Spare()
    first = spare.get(10)
    spare.put(first)
    assert spare.get(11) is not first
    assert spare.get(10) is first
    for size in range(100):
        spare.put(np.empty(size, np.float32))
    assert len(spare._free) == reducer._Spare._KEPT
    assert {code(name) for name in HALVES} == HALF_CODES
