"""Integers, or floats of 8 bits, with a scale per group, back to floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flywheel.ir import DType
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference.operands import Params, store


def dequant(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """(q - zero) * scale: q [R, n] of type `qdtype`, one scale (and zero point) per `group` elements of a row.

    q is I8, U8, F8E4M3, or I4: two's complement nibbles, two a byte along the row, the low one first. Scales, and zero
    points where there are any, are [R, ceil(n / group)]. Without zero points the mapping is symmetric. With
    `rows_per_scale`, so many rows share theirs, [ceil(R / rows_per_scale), n / group], and `out` are rows `n_off`..
    `n_off + N_tile` alone.
    """
    packed, group, shared = inputs[0], params["group"], params.get("rows_per_scale", 1)
    packed = packed.reshape(-1, packed.shape[-1])
    total = packed.shape[0]
    start, stop = (params["n_off"], params["n_off"] + params["N_tile"]) if "rows_per_scale" in params else (0, total)
    value = numbers(packed[start:stop], params["qdtype"]).float()
    width = value.shape[-1]
    row = torch.arange(start, stop, device=value.device) // shared
    column = torch.arange(width, device=value.device) // group
    sizes = -(-total // shared), -(-width // group)
    per_group = [operand.reshape(sizes).float()[row][:, column] for operand in inputs[1:]]
    if len(per_group) > 1:
        value = value - per_group[1]
    store(out, value * per_group[0])


def numbers(packed: Tensor, qdtype: int) -> Tensor:
    """The numbers that bytes hold, [..., n] as int8, uint8 or float8_e4m3fn."""
    if qdtype in (DType.I8, DType.U8, DType.F8E4M3):
        return packed.view(TORCH_DTYPES[DType(qdtype)])
    octets = packed.view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
