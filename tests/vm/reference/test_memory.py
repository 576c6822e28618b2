from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flywheel.errors import InvalidProgramError, TensorError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram, MemSpace, Page, PageAllocation
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference.memory import Arena, check_tensors, tensor_shape

WEIGHT = Buffer(3, "w", BufferKind.WEIGHT, DType.BF16, (4, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"buffer 3 \(w\), WEIGHT BF16 \[4, 2\]: no tensor given"),
        ({"w": torch.zeros(2, 4, dtype=torch.bfloat16)}, r"buffer 3 .* shape is \[2, 4\], not \[4, 2\]"),
        ({"w": torch.zeros(4, 2)}, r"buffer 3 .* dtype is torch.float32, not torch.bfloat16"),
        ({"w": torch.zeros(4, 2, dtype=torch.bfloat16), "b": torch.zeros(1)}, "tensor 'b': the program takes no"),
    ],
)
def test_a_wrong_tensor_is_named(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        check_tensors([WEIGHT], given)


def test_the_right_tensors_pass() -> None:
    check_tensors([WEIGHT], {"w": torch.zeros(4, 2, dtype=torch.bfloat16)})


def test_int4_rows_are_packed_two_a_byte() -> None:
    assert tensor_shape(Buffer(0, "q", BufferKind.WEIGHT, DType.I4, (3, 8))) == (3, 4)
    with pytest.raises(InvalidProgramError, match=r"buffer 0 \(q\): I4 rows of an odd length, 7"):
        tensor_shape(Buffer(0, "q", BufferKind.WEIGHT, DType.I4, (3, 7)))


@pytest.mark.parametrize("dtype", list(DType))
def test_poison_is_not_a_number(dtype: DType) -> None:
    buffer = Buffer(0, "a", BufferKind.ACTIVATION, dtype, (3, 2))
    arena = Arena(MegakernelProgram(buffers=(buffer,)), torch.device("cpu"))
    arena.poison()
    tensor = arena.tensors()[0]
    assert tensor.dtype is TORCH_DTYPES[dtype]
    if tensor.is_floating_point():
        assert bool(tensor.float().isnan().all())
    else:
        assert bool((tensor.view(torch.uint8) == 0xFF).all())


def test_poison_spares_inputs() -> None:
    buffers = (
        Buffer(0, "in", BufferKind.IO_INPUT, DType.I32, (1,)),
        Buffer(1, "out", BufferKind.IO_OUTPUT, DType.F32, (1,)),
    )
    arena = Arena(MegakernelProgram(buffers=buffers), torch.device("cpu"))
    arena.tensors()[0].fill_(5)
    arena.poison()
    assert arena.tensors()[0].item() == 5
    assert arena.tensors()[1].isnan().item()


def test_buffers_of_one_page_share_its_bytes_and_no_others() -> None:
    buffers = tuple(
        Buffer(number, f"a{number}", BufferKind.ACTIVATION, dtype, (6,))
        for number, dtype in enumerate((DType.F32, DType.BF16, DType.F32))
    )
    pages = PageAllocation({0: 0, 1: 0, 2: 1}, tuple(Page(page, MemSpace.GLOBAL_SCRATCH, 24) for page in range(2)))
    arena = Arena(MegakernelProgram(buffers=buffers, pages=pages), torch.device("cpu"))
    first, second, third = (arena.tensors()[number] for number in range(3))
    first.fill_(1.0)
    third.fill_(1.0)
    second.zero_()
    assert first.tolist() == [0.0] * 3 + [1.0] * 3
    assert third.tolist() == [1.0] * 6
