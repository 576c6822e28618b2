"""Turn integers, or 8-bit floats, with a scale for each group into floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flywheel.ir import DType
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference.operands import Params, store


def dequant(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """(q - zero) * scale: q [R, n] of type `qdtype`, one scale (and zero point) for `group` elements of a row.

    q is I8, U8, F8E4M3 or I4. I4 are two's complement nibbles, two a byte along the row, the low one first. Scales and
    zero points are [R, ceil(n / group)]. Without zero points the mapping is symmetric. With `rows_per_scale`, that many
    rows share a scale, so scales are [ceil(R / rows_per_scale), n / group], and `out` has only rows `n_off`..`n_off +
    N_tile`.
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
    """The numbers in packed bytes, [..., n] as int8, uint8 or float8_e4m3fn."""
    if qdtype in (DType.I8, DType.U8, DType.F8E4M3):
        return packed.view(TORCH_DTYPES[DType(qdtype)])
    octets = packed.view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
