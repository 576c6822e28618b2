"""The int4 product of Triton on the CPU, by Triton's interpreter."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from flywheel.rivals.products import Words
from flywheel.rivals.triton_product import CONFIGS, _product_kernel, launch, multiply_words


def _widened(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@cache
def interpret() -> None:
    """Let `multiply_words` take tensors on the CPU, for the rest of the process. Skips a test where Triton compiles.

    The interpreter holds bfloat16 as its bits, and multiplies these; so its operands are widened before.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, for the GPU; a test marked gpu runs that kernel")
    multiplies = InterpreterBuilder.create_dot

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *others: object) -> TensorHandle:
        return multiplies(self, _widened(a), _widened(b), *others)

    InterpreterBuilder.create_dot = create_dot

    @multiply_words.register_kernel("cpu")  # type: ignore[untyped-decorator]
    def _(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return product(x, Words(words, scales, zeros), 0)


def product(x: Tensor, matrix: Words, config: int) -> Tensor:
    """The product by one of CONFIGS."""
    with torch.no_grad():
        return launch(_product_kernel, x, matrix, CONFIGS[config].all_kwargs())
