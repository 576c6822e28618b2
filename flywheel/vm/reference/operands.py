"""What every operation needs: its type, its output and the ways to look at an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Params = Mapping[str, Any]

Op = Callable[[Sequence[Tensor], Tensor, Params], None]
"""`op(inputs, out, params)` writes all of `out`, which has the dtype to round to; KV_APPEND writes its rows of it.

Operands and params are as the table of operations has them. Sums and products are taken in fp32 and rounded once.
"""

Call = tuple[Op, tuple[Tensor, ...], Tensor, Params]
"""An operation with its operands: what is left of a task once a program is bound to memory."""


def store(out: Tensor, value: Tensor) -> None:
    """Round `value` to `out`, element by element in row-major order."""
    out.copy_(value.reshape(out.shape))


def rows_of(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width]; a matrix with longer rows gives their first `width` elements."""
    if tensor.dim() == 2 and tensor.shape[1] >= width:
        return tensor if tensor.shape[1] == width else tensor[:, :width]
    return split(tensor, width)


def split(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width], whatever its shape."""
    return tensor.reshape(-1, width)


def flat(tensor: Tensor) -> Tensor:
    """`tensor` as an fp32 vector."""
    return tensor.reshape(-1).float()
