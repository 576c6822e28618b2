"""Integers with a scale per group, back to floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flywheel.ir import DType
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference.operands import Params, store


def dequant(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """(q - zero) * scale: q [R, n] of type `qdtype`, one scale (and zero point) per `group` elements of a row.

    q is I8, U8, or I4: two's complement nibbles, two a byte along the row, the low one first. Scales, and zero points
    where there are any, are [R, ceil(n / group)]. Without zero points the mapping is symmetric.
    """
    quantised = integers(inputs[0], params["qdtype"])
    group, width = params["group"], quantised.shape[-1]
    groups = -(-width // group)
    number = torch.arange(width, device=quantised.device) // group
    value = quantised.reshape(-1, width).float()
    per_group = [_rows(operand, value.shape[0], groups)[:, number] for operand in inputs[1:]]
    if len(per_group) > 1:
        value = value - per_group[1]
    store(out, value * per_group[0])


def integers(packed: Tensor, qdtype: int) -> Tensor:
    """The integers that bytes hold, [..., n] as int8 or uint8."""
    if qdtype in (DType.I8, DType.U8):
        return packed.view(TORCH_DTYPES[DType(qdtype)])
    octets = packed.view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _rows(operand: Tensor, rows: int, groups: int) -> Tensor:
    return operand.reshape(rows, groups).float()
