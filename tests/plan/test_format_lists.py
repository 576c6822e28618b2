"""Which formats of the stream the lists of other tests hold: each that there is a kernel for."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from pathlib import Path
from runpy import run_path
from typing import Any

from flywheel.errors import InvalidProgramError, UnknownNameError
from flywheel.ir import DType
from flywheel.models.decoder import DTYPES
from flywheel.models.formats import LAYER_MATRICES, WeightFormat, parse_formats
from flywheel.plan.formats import FORMATS, Coding, coding_of

TESTS = Path(__file__).parents[1]
SHAPE = (512, 512)


def coding(format: WeightFormat, dtype: str) -> Coding:
    """Raises InvalidProgramError where there is no kernel."""
    scales = format.scale_dtype(DTYPES[dtype]), format.scale_shape(SHAPE)
    params = {"group": format.group_of(SHAPE), "rows_per_scale": format.rows_per_scale(SHAPE)}
    return coding_of(format.codes, scales, DType.I8 if format.zeros else None, params, SHAPE[1])


def codings(named: list[tuple[str, str]]) -> set[Coding]:
    found = set()
    for text, dtype in named:
        formats = parse_formats(text, dtype)
        for role in LAYER_MATRICES:
            own = formats.of(role)
            if own is not None:
                with suppress(InvalidProgramError):
                    found.add(coding(own, dtype))
    return found


def all_codings() -> set[Coding]:
    """Of every name that there is."""
    kinds = ("", "-tensor", "-row", "-block", "-g64", "-g128")
    words = product(("fp8", "int8", "int4"), kinds, ("", "-zeros"), ("", "-f32"))
    found: set[Coding] = set()
    for text, dtype in product(map("".join, words), ("bf16", "f16")):
        with suppress(UnknownNameError):
            found |= codings([(text, dtype)])
    return found


def of_products() -> set[Coding]:
    found = set()
    for code, shared, group, scale, zeros in listed("gpu/test_coded.py").values():
        columns, rows = group or SHAPE[1], shared or SHAPE[0]
        shape = -(-SHAPE[0] // rows), SHAPE[1] // columns
        params = {"group": columns, "rows_per_scale": rows}
        found.add(coding_of(code, (scale, shape), DType.I8 if zeros else None, params, SHAPE[1]))
    return found


def listed(file: str) -> Any:
    return run_path(str(TESTS / file))["FORMATS"]


def test_each_format_that_has_a_kernel_is_in_the_tests_of_products_and_in_those_of_programs_on_a_gpu() -> None:
    every = all_codings()
    assert every == set(FORMATS.values())
    assert of_products() == every
    assert codings(listed("decode/test_formats_on_gpu.py")) == every


def test_each_format_that_has_a_kernel_in_bf16_is_lied_about() -> None:
    lied = codings([(text, "bf16") for text in listed("judge/test_tampering_of_formats.py")])
    assert {each for each in all_codings() if each.scale is not DType.F16} == lied
