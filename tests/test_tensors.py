from __future__ import annotations

import ast
from pathlib import Path

from flywheel.ir import DType
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.elements import STORED

PACKAGE = Path(__file__).parents[1] / "flywheel"


def maps_dtypes_to_torch(node: ast.AST) -> bool:
    """Whether `node` is a dict of several element types and their torch types."""
    if not isinstance(node, ast.Dict) or len(node.keys) < 2:
        return False
    pairs = zip(node.keys, node.values, strict=True)
    return all(
        ast.unparse(key or value).startswith("DType.") and "torch." in ast.unparse(value) for key, value in pairs
    )


def test_torch_holds_every_element_type_in_its_bits() -> None:
    assert set(TORCH_DTYPES) == set(DType)
    assert {dtype: TORCH_DTYPES[dtype].itemsize * 8 for dtype in DType} == {
        dtype: 2 * dtype.bits if dtype is DType.I4 else dtype.bits for dtype in DType
    }


def test_numpy_holds_elements_in_their_bits_as_far_as_it_has_types() -> None:
    assert {dtype: stored.itemsize * 8 for dtype, stored in STORED.items()} == {dtype: dtype.bits for dtype in STORED}


def test_no_other_module_has_such_a_table() -> None:
    assert [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if maps_dtypes_to_torch(node)
    ] == ["tensors.py"]
