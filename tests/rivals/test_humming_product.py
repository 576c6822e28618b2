from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from flywheel.ir import DType
from flywheel.models.catalog import CATALOG
from flywheel.models.formats import parse_formats
from flywheel.models.quantise import dequantise, quantise
from flywheel.rivals.lineup import RIVALS, refusal
from flywheel.rivals.products import Coded, multiply, parts_of
from flywheel.vm.gpu.driver import Gpu


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["int4", "int4-zeros"])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_layer_multiplies_by_what_the_codes_mean_or_is_not_installed(text: str, rows: int, gpu: Gpu) -> None:
    if find_spec("humming") is None:
        why = refusal(RIVALS["humming"], CATALOG["llama3-8b"], parse_formats(text, "bf16"), DType.BF16)
        assert why == "humming is not installed; pip install humming-kernels"
        return
    from flywheel.rivals.humming_product import layer_of

    own = parse_formats(text, "bf16").usual
    assert own is not None
    matrix = Coded(*quantise(torch.randn((4096, 2048), device="cuda"), own, DType.BF16))
    x = torch.randn((rows, 2048), device="cuda", dtype=torch.bfloat16)
    layer = layer_of(matrix, torch.bfloat16)
    wide = dequantise(matrix.codes, matrix.scales, matrix.zeros, torch.float64)
    wanted, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    assert bool(((multiply(x, layer).double() - wanted).abs() <= wanted.abs() / 128 + sizes / 1024).all())
    assert sum(part.nbytes for part in parts_of(layer)) < matrix.codes.nbytes * 1.1
