from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flywheel.errors import TensorError
from flywheel.ir import DType
from flywheel.vm.elements import bf16_bits, stored, stored_type, values

FLOATS = arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(FLOATS)
def test_rounding_to_bf16_is_torch_s(array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    ours = values(bf16_bits(array), DType.BF16)
    theirs = torch.from_numpy(array.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs)) or np.isnan(array).any()


@given(arrays(np.uint16, st.integers(1, 20)))
def test_bf16_bits_survive_a_round_trip(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    wide = values(bits, DType.BF16)
    assert np.array_equal(bf16_bits(wide)[~np.isnan(wide)], bits[~np.isnan(wide)])
    assert np.isnan(values(bf16_bits(wide), DType.BF16)[np.isnan(wide)]).all()


def test_scalars_are_rounded_too() -> None:
    assert stored(np.array(1.0, np.float32), DType.BF16, (), "x").tobytes() == b"\x80\x3f"


def test_packed_elements_come_as_their_bytes_and_do_not_go_back() -> None:
    array = np.array([0x21, 0x43], np.uint8)
    assert stored(array, DType.I4, (1, 4), "w") is array
    with pytest.raises(TensorError, match="dtype I4: numpy holds only F32, F16"):
        stored_type(DType.I4)


@pytest.mark.parametrize(
    ("array", "dtype", "shape", "message"),
    [
        (np.zeros(3, np.int64), DType.I32, (3,), "ids: int64 is not int32, as I32 is stored"),
        (np.zeros(3, np.int32), DType.I32, (4,), r"ids: shape \[3\] is not the buffer's \[4\]"),
        (np.zeros(3, np.float64), DType.BF16, (3,), "ids: float64 is not uint16"),
        (np.zeros(3, np.uint8), DType.I4, (3,), r"ids: 3 bytes of uint8 are not the 2 of uint8 that hold I4 \[3\]"),
        (np.zeros(3, np.int8), DType.F8E4M3, (3,), "ids: 3 bytes of int8 are not the 3 of uint8"),
    ],
)
def test_another_type_or_shape_is_refused(
    array: np.ndarray[Any, Any], dtype: DType, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        stored(array, dtype, shape, "ids")
