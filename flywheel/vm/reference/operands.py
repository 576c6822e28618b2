"""What every operation needs: its type, its output and the ways to look at an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from flywheel.errors import InvalidProgramError

Params = Mapping[str, Any]

Op = Callable[[Sequence[Tensor], Tensor, Params], None]
"""`op(inputs, out, params)` writes all of `out`, which has the dtype to round to; KV_APPEND writes its rows of it.

Sums and products are taken in fp32 and rounded once. Raises InvalidProgramError, without naming the task, where the
operands' sizes do not fit each other.
"""

Call = tuple[Op, tuple[Tensor, ...], Tensor, Params]
"""An operation with its operands: what is left of a task once a program is bound to memory."""


def store(out: Tensor, value: Tensor) -> None:
    """Round `value` to `out`, element by element in row-major order."""
    if value.numel() != out.numel():
        raise InvalidProgramError(f"makes {value.numel()} elements for an output of {out.numel()}")
    out.copy_(value.reshape(out.shape))


def rows_of(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width]; a matrix with longer rows gives their first `width` elements."""
    if tensor.dim() == 2 and tensor.shape[1] >= width:
        return tensor if tensor.shape[1] == width else tensor[:, :width]
    return split(tensor, width)


def split(tensor: Tensor, width: int) -> Tensor:
    """`tensor` as rows [R, width], whatever its shape."""
    if tensor.numel() % width:
        raise InvalidProgramError(f"{tensor.numel()} elements are not rows of {width}")
    return tensor.reshape(-1, width)


def same_size(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both as fp32 vectors."""
    if left.numel() != right.numel():
        raise InvalidProgramError(f"operands of {left.numel()} and {right.numel()} elements")
    return left.reshape(-1).float(), right.reshape(-1).float()
