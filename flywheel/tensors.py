"""How torch holds the elements of buffers: what models make of weights, and what the reference VM runs on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from flywheel.ir.dtype import DType

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
