"""Memory of a device as tensors, by its address."""

from __future__ import annotations

import ctypes
from math import prod
from types import SimpleNamespace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from flywheel.errors import GpuFaultError

_KINDS: Final = {torch.int32: "<i4", torch.float32: "<f4", torch.uint8: "|u1"}
"""Types of views, as an array interface names them."""


def view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor over memory that somebody else holds. Raises GpuFaultError where the address is not on the device."""
    kind = np.dtype(_KINDS[dtype])
    if device.type == "cpu":
        held = (ctypes.c_byte * (prod(shape) * kind.itemsize)).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(held).view(kind).reshape(shape))
    interface = {"data": (address, False), "shape": shape, "typestr": kind.str, "version": 3}
    made = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    if made.data_ptr() != address:  # torch copies what it takes for memory of another GPU
        raise GpuFaultError(f"memory at {address:#x}: torch does not see it on {device}")
    return made
