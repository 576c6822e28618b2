"""One function per primitive opcode, and the table of them. Conventions: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from flywheel.errors import TensorError
from flywheel.ir import NO_TOKEN, OPERATIONS, DType, InstructionKind
from flywheel.ir.access import tile, tile_rows
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import attention
from flywheel.vm.reference.operands import Operator, Params, flat, rows_of, split, store


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


BLOCK_WEIGHTS: Final = 1 << 17
"""Weights that a CPU converts to fp32 at a time: 512 KiB, which stay in its L2 cache until they are multiplied."""


def copy(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """x, or its elements `n_off`..`n_off + N_tile`, or those of each of its `M_tile` rows."""
    columns = tile(params)
    store(out, inputs[0] if columns is None else inputs[0].reshape(tile_rows(params), -1)[:, slice(*columns)])


def embed(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """ids [S], table [V, hidden] -> rows [S, hidden], perhaps times `scale`. Raises TensorError for an id without a
    row."""
    table, ids = rows_of(inputs[1], params["hidden"]), inputs[0].reshape(-1).long()
    if not bool(((ids >= 0) & (ids < table.shape[0])).all()):
        raise TensorError(f"ids {ids.tolist()[:8]} are not all in 0..{table.shape[0] - 1}")
    store(out, table[ids] if "scale" not in params else table[ids].float() * params["scale"])


def rmsnorm(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """x * rsqrt(mean(x^2) + eps) [* (w [+ `w_offset`])] over rows of `hidden` elements."""
    x = split(inputs[0], params["hidden"]).float()
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + params["eps"])
    store(out, scaled * (flat(inputs[1]) + params.get("w_offset", 0.0)) if len(inputs) > 1 else scaled)


def layernorm(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """(x - mean) * rsqrt(variance + eps) * w [+ b] over rows of `hidden` elements."""
    x = split(inputs[0], params["hidden"]).float()
    bias = flat(inputs[2]) if len(inputs) > 2 else None
    store(out, functional.layer_norm(x, x.shape[1:], flat(inputs[1]), bias, params["eps"]))


def matrix(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Columns `n_off`..`n_off + N_tile` of x @ W.T [+ bias], perhaps times `scale` and capped by `cap`. They fill all
    of `out`, [M, N_tile].

    x [M, K], W [N_out, K], bias [N_out].
    """
    depth, start, end = params["K"], params["n_off"], params["n_off"] + params["N_tile"]
    x = split(inputs[0], depth).float()
    weight = rows_of(inputs[1], depth)
    step = max(1, BLOCK_WEIGHTS // depth) if weight.device.type == "cpu" else end - start
    blocks = [_product(x, weight[first : min(first + step, end)]) for first in range(start, end, step)]
    result = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
    if len(inputs) > 2:
        result = result + inputs[2].reshape(-1)[start:end].float()
    store(out, attention.capped(result * params.get("scale", 1.0), params))


def silu_mul(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """silu(gate) * up."""
    store(out, functional.silu(flat(inputs[0])) * flat(inputs[1]))


def gelu_mul(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """gelu(gate) [* up], with tanh."""
    made = functional.gelu(flat(inputs[0]), approximate="tanh")
    store(out, made * flat(inputs[1]) if len(inputs) > 1 else made)


def gelu(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """x * Phi(x), with erf."""
    store(out, functional.gelu(inputs[0].float()))


def add(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """a + b, times the number `by` if there is one."""
    total = flat(inputs[0]) + flat(inputs[1])
    store(out, total * flat(inputs[2]) if len(inputs) > 2 else total)


def mul(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """a * b, or a * `scale`."""
    store(out, flat(inputs[0]) * (flat(inputs[1]) if len(inputs) == 2 else params["scale"]))


def softmax(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Softmax over dimension `dim`, which is the last by default."""
    store(out, inputs[0].float().softmax(params.get("dim", -1)))


def allreduce_shard(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """The sum of the shards, added in order."""
    total = flat(inputs[0])
    for shard in inputs[1:]:
        total = total + flat(shard)
    store(out, total)


def sample_argmax(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """The index of the largest element, the first among equals; one for each row where `out` [S] has several. NO_TOKEN
    where that element is NaN, which is larger than any number, or infinite."""
    largest, indices = inputs[0].reshape(out.numel(), -1).float().max(-1)
    store(out, torch.where(largest.isfinite(), indices, NO_TOKEN))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] in fp32, weight [N, K] -> [M, N]."""
    wide = weight.float()
    return torch.mv(wide, x[0]).unsqueeze(0) if x.shape[0] == 1 else x @ wide.T


_FUNCTIONS: Final[Mapping[str, Operator]] = {**vars(attention), **globals()}

OPS: Final[Mapping[InstructionKind, Operator]] = MappingProxyType(
    {op: _FUNCTIONS[row.kernel.name] for op, row in OPERATIONS.items() if row.kernel is not None}
)
"""What computes each opcode but NOP, which does nothing, and FUSED, whose recipes consist of these: here or in
attention.py the function of the kernel's name."""
