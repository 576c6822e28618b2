from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import Buffer, BufferKind, DType, MemSpace, Page, PageAllocation


@pytest.mark.parametrize(
    ("dtype", "count", "expected"),
    [
        (DType.F32, 3, 12), (DType.F16, 3, 6), (DType.BF16, 3, 6), (DType.F8E4M3, 3, 3), (DType.F8E5M2, 3, 3),
        (DType.I32, 3, 12), (DType.I8, 3, 3), (DType.U8, 3, 3), (DType.BOOL, 3, 3),
        (DType.I4, 0, 0), (DType.I4, 1, 1), (DType.I4, 2, 1), (DType.I4, 3, 2), (DType.I4, 256, 128),
    ],
)  # fmt: skip
def test_bytes_of_elements_are_rounded_up_to_whole_bytes(dtype: DType, count: int, expected: int) -> None:
    assert dtype.nbytes(count) == expected


def test_codes_are_the_formats() -> None:
    assert [kind.name for kind in DType] == ["F32", "F16", "BF16", "F8E4M3", "F8E5M2", "I32", "I8", "I4", "U8", "BOOL"]
    assert [space.name for space in MemSpace] == ["HBM", "GLOBAL_SCRATCH", "SMEM", "REGISTER"]
    assert [kind.name for kind in BufferKind] == ["WEIGHT", "ACTIVATION", "KV_CACHE", "IO_INPUT", "IO_OUTPUT", "CONST"]
    for kind in (DType, MemSpace, BufferKind):
        assert [int(member) for member in kind] == list(range(len(kind)))  # type: ignore[call-overload]


def test_a_buffers_size_follows_from_its_shape() -> None:
    buffer = Buffer(0, "w", BufferKind.WEIGHT, DType.I4, (3, 5))
    assert (buffer.numel, buffer.nbytes) == (15, 8)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_strides_are_those_of_a_row_major_array(shape: list[int]) -> None:
    strides = Buffer(0, "b", BufferKind.ACTIVATION, DType.F32, shape).contiguous_strides()
    last = sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    assert last == Buffer(0, "b", BufferKind.ACTIVATION, DType.F32, shape).numel - 1
    assert strides[-1] == 1
    assert list(strides) == sorted(strides, reverse=True)


def test_scratch_is_the_sum_of_the_pages() -> None:
    pages = [Page(number, MemSpace.SMEM, 64 * (number + 1)) for number in range(3)]
    assert PageAllocation({}, pages).total_scratch_bytes == 384
