"""How torch holds the elements of buffers: what models make of weights, and what the reference VM runs on; and whether
tensors are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from flywheel.ir.dtype import COMPUTE_DTYPES, DType

TORCH_DTYPES: Final[Mapping[DType, torch.dtype]] = MappingProxyType(
    {
        DType.F32: torch.float32,
        DType.F16: torch.float16,
        DType.BF16: torch.bfloat16,
        DType.F8E4M3: torch.float8_e4m3fn,
        DType.F8E5M2: torch.float8_e5m2,
        DType.I32: torch.int32,
        DType.I8: torch.int8,
        DType.I4: torch.uint8,
        DType.U8: torch.uint8,
        DType.BOOL: torch.bool,
    }
)
"""The torch type of each element type; I4, which torch lacks, as bytes of two elements each."""


def compute_type(dtype: torch.dtype) -> DType:
    """The element type of a torch type in which steps compute."""
    return next(each for each in COMPUTE_DTYPES if TORCH_DTYPES[each] == dtype)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite. Takes no memory, and waits for the device once."""
    ends = [end.double() for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]  # NaN if one is NaN
    return not ends or bool(torch.stack(ends).isfinite().all())


def first_not_finite(tensor: Tensor) -> tuple[tuple[int, ...], float] | None:
    """(index, value) of the first element, in row-major order, that is NaN or infinite; None if there is none."""
    if all_finite([tensor]):
        return None
    flat = tensor.detach().reshape(-1)
    place = int((~flat.isfinite()).to(torch.uint8).argmax())
    return tuple(int(each) for each in torch.unravel_index(torch.tensor(place), tensor.shape)), float(flat[place])


def sent(values: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 [n] on a device. The host waits for nothing that the device was given before."""
    here = torch.tensor(values, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
