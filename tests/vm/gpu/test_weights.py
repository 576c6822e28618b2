from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flywheel.errors import TensorError, WeightsError
from flywheel.ir import DType
from flywheel.vm.abi import Layout
from flywheel.vm.gpu import weights as module
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.weights import ResidentWeights, fragments_bytes

Fragments = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


@pytest.fixture(autouse=True)
def no_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in the host's memory packs without a compiled kernel."""
    if "host_gpu" in request.fixturenames:
        monkeypatch.setattr(module, "compile_variant", lambda *arguments: None)


def bits(rows: int, width: int) -> npt.NDArray[np.uint16]:
    return np.arange(1, rows * width + 1, dtype=np.uint16).reshape(rows, width)


def held(gpu: Any, address: int, count: int) -> npt.NDArray[np.uint16]:
    array = gpu.held[address]
    start = address - array.ctypes.data
    return array[start : start + 2 * count].view(np.uint16)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 3), (33, 40), (1, 64)])
def test_fragments_hold_each_element_where_its_lane_reads_it(
    host_gpu: Any, fragments: Fragments, rows: int, width: int
) -> None:
    matrix = bits(rows, width)
    weights = ResidentWeights(host_gpu, DType.BF16)
    address = weights.put("w", matrix, (rows, width), DType.BF16, Layout.FRAGMENTS)
    expected = fragments(matrix)
    assert fragments_bytes((rows, width), DType.BF16) == expected.nbytes
    assert np.array_equal(held(host_gpu, address, expected.size), expected)
    block = expected.reshape(-(-rows // 16), -(-width // 16), 32, 8)[0, 0]
    assert block[0, 0] == matrix[0, 0]
    assert np.count_nonzero(expected) == rows * width


def test_a_weight_moves_once_for_each_layout(host_gpu: Any) -> None:
    with ResidentWeights(host_gpu, DType.BF16) as weights:
        rows = weights.put("w", bits(16, 16), (16, 16), DType.BF16, Layout.ROWS)
        packed = weights.put("w", bits(16, 16), (16, 16), DType.BF16, Layout.FRAGMENTS)
        moved = host_gpu.uploaded_bytes
        assert weights.put("w", bits(16, 16), (16, 16), DType.BF16, Layout.ROWS) == rows
        assert weights.put("w", bits(16, 16), (16, 16), DType.BF16, Layout.FRAGMENTS) == packed
        assert host_gpu.uploaded_bytes == moved
        assert (weights.get("w", Layout.ROWS), weights.get("w", Layout.FRAGMENTS)) == (rows, packed)
        assert np.array_equal(held(host_gpu, rows, 256), bits(16, 16).ravel())
        assert set(host_gpu.held) == {rows, packed}
    assert host_gpu.held == {}


def test_weights_on_the_device_are_packed_from_there(host_gpu: Any, fragments: Fragments) -> None:
    matrix = bits(20, 20)
    theirs = host_gpu.alloc(matrix.nbytes)
    host_gpu.upload(theirs, matrix)
    moved = host_gpu.uploaded_bytes
    weights = ResidentWeights(host_gpu, DType.BF16)
    address = weights.put("w", theirs.address, (20, 20), DType.BF16, Layout.FRAGMENTS)
    assert np.array_equal(held(host_gpu, address, 1024), fragments(matrix))
    copied = weights.put("w", theirs.address, (20, 20), DType.BF16, Layout.ROWS)
    assert copied != theirs.address and np.array_equal(held(host_gpu, copied, 400), matrix.ravel())
    assert host_gpu.uploaded_bytes == moved


def test_a_borrowed_weight_stays_its_owner_s(host_gpu: Any) -> None:
    theirs = host_gpu.alloc(64)
    with ResidentWeights(host_gpu, DType.F16) as weights:
        weights.borrow("w", theirs.address)
        assert weights.get("w", Layout.ROWS) == theirs.address
    assert set(host_gpu.held) == {theirs.address}


def test_a_weight_that_is_not_there_is_named(host_gpu: Any) -> None:
    weights = ResidentWeights(host_gpu, DType.F16)
    weights.borrow("w", 256)
    with pytest.raises(WeightsError, match="weight w: not on the GPU as FRAGMENTS"):
        weights.get("w", Layout.FRAGMENTS)


def test_fragments_of_another_type_are_refused(host_gpu: Any) -> None:
    weights = ResidentWeights(host_gpu, DType.F16)
    with pytest.raises(WeightsError, match="weight w: BF16 cannot be multiplied in programs of F16"):
        weights.put("w", bits(16, 16), (16, 16), DType.BF16, Layout.FRAGMENTS)
    assert host_gpu.held == {}


def test_an_array_of_another_shape_is_refused(host_gpu: Any) -> None:
    weights = ResidentWeights(host_gpu, DType.F16)
    with pytest.raises(TensorError, match=r"w: shape \[16, 16\] is not the buffer's \[16, 8\]"):
        weights.put("w", bits(16, 16), (16, 8), DType.F16, Layout.ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 3), (33, 40), (272, 2048)])
def test_the_gpu_packs_as_the_definition_says(
    gpu: Gpu, fragments: Fragments, dtype: DType, rows: int, width: int
) -> None:
    kind = np.uint32 if dtype is DType.F32 else np.uint16
    matrix = (np.arange(rows * width, dtype=kind) % 0x7000 + 1).reshape(rows, width)
    stored = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.uint16}[dtype]
    with ResidentWeights(gpu, dtype) as weights:
        weights.put("w", matrix.view(stored), (rows, width), dtype, Layout.FRAGMENTS)
        (packed,) = weights._owned
        expected = fragments(matrix)
        assert np.array_equal(gpu.download(packed, kind, expected.shape), expected)
