"""A product with an int4 matrix by Humming's kernels, which it compiles for a GPU and a shape when they are first used.

Import it only where humming is installed.

Source: vllm-project/humming 0.1.20, `layer.py` and `schema/compressed_tensors.py`.
"""

from __future__ import annotations

import torch
from humming.layer import HummingLayer

from flywheel.errors import KernelCompileError
from flywheel.ir import DType
from flywheel.models.decoder import MAX_BATCH
from flywheel.models.formats import WeightFormat
from flywheel.models.packing import describe, matrix_parts
from flywheel.models.quantise import shape_of
from flywheel.rivals.products import Coded, Layered


def layer_of(matrix: Coded, dtype: torch.dtype) -> Layered:
    """A matrix [N, K] on a GPU, with scales of groups of a row in `dtype`, as Humming reads it from compressed-tensors.

    Raises KernelCompileError where Humming does not take it or does not compile its kernel.
    """
    height, width = shape_of(matrix.codes)
    own = WeightFormat(DType.I4, 1, width // matrix.scales.shape[1], matrix.zeros is not None)
    said = describe(own, [])
    config = {name: said[name] for name in ("quant_method", "format")} | said["config_groups"]["group_0"]["weights"]
    try:
        layer = HummingLayer(shape_n=height, shape_k=width, weight_config=config, torch_dtype=dtype)
        layer.to(matrix.codes.device)
        layer.load_from_tensors(matrix_parts(matrix.codes, matrix.scales, matrix.zeros, own))
        layer.transform()
        for rows in (1, 4, MAX_BATCH):  # compiles
            layer(torch.zeros((rows, width), dtype=dtype, device=matrix.codes.device))
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise KernelCompileError(f"Humming, {height} x {width}: {type(error).__name__}: {line}") from error
    return Layered(layer, tuple(part.detach() for part in layer.parameters()))
