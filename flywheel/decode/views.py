"""Memory of a device as tensors, by its address."""

from __future__ import annotations

import ctypes
from math import prod
from types import SimpleNamespace
from typing import Final

import numpy as np
import torch
from torch import Tensor

_KINDS: Final = {torch.int32: "<i4", torch.float32: "<f4", torch.uint8: "|u1"}
"""Types of views, as an array interface names them."""


def view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor over memory that somebody else holds; there is some behind the address, at least."""
    kind = np.dtype(_KINDS[dtype])
    if device.type == "cpu":
        held = (ctypes.c_byte * (prod(shape) * kind.itemsize)).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(held).view(kind).reshape(shape))
    interface = {"data": (address, False), "shape": shape, "typestr": kind.str, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
