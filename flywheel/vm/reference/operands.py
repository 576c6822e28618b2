"""What every operation uses: its type, its output, and views of an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Params = Mapping[str, Any]

Operator = Callable[[Sequence[Tensor], Tensor, Params], None]
"""`op(inputs, out, params)` writes all of `out`, rounded to its dtype. KV_APPEND writes only its rows.

Operands and params follow the table of operations. Sums and products are computed in fp32 and rounded once.
"""

Call = tuple[Operator, tuple[Tensor, ...], Tensor, Params]
"""An operation with its operands. Binding a program to memory turns a task into such calls."""


def store(out: Tensor, value: Tensor) -> None:
    """Round `value` to `out`, element by element in row-major order."""
    out.copy_(value.reshape(out.shape))


def rows_of(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width]. A matrix with longer rows gives their first `width` elements."""
    if tensor.dim() == 2 and tensor.shape[1] >= width:
        return tensor if tensor.shape[1] == width else tensor[:, :width]
    return split(tensor, width)


def split(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width], whatever its shape."""
    return tensor.reshape(-1, width)


def flat(tensor: Tensor) -> Tensor:
    """`tensor` as an fp32 vector."""
    return tensor.reshape(-1).float()
