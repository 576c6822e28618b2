"""A new opcode is its number, a row of the table of operations, a function of the reference VM and a header."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from flywheel.ir import InstructionKind

PLACES: Final = {
    "ir/opcodes.py": ("    GELU_MUL = 20\n", "    GELU_MUL = 20\n    SQUARE = 21\n"),
    "ir/operations.py": (
        ")\n\nOPERATIONS: Final",
        '    _elementwise(_K.SQUARE, "x", "`x * x`", 1, Kernel("square")),\n)\n\nOPERATIONS: Final',
    ),
    "vm/reference/ops.py": (
        "def gelu(",
        'def square(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:\n    """x * x."""\n'
        "    store(out, inputs[0].float() ** 2)\n\n\ndef gelu(",
    ),
}
"""File -> what stands in it, and what takes its place."""

HEADER: Final = """\
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_square(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0);
    each_element(vm.thread(), step.out_dtype, x, x, vm.out(step), [](float value, float) { return value * value; });
}
"""

BUFFERS: Final = '{"x": (IN, F32, (1, 48)), "w": (WEIGHT, F32, (32, 48)), "y": (OUT, F32, (1, 48))'

PASSES: Final = f"""
import torch
from flywheel.cost_model import predict
from flywheel.ir import BufferKind, DType, InstructionKind, program_from_json, program_to_json, validate
from flywheel.ir.opcode_table import opcode_table
from flywheel.ir.schema import schema_text
from flywheel.ir.work import works_of
from flywheel.vm.reference import ReferenceVM

IN, WEIGHT, ACT, OUT = BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.IO_OUTPUT
F32 = DType.F32


def test_every_pass_takes_it(chain, check_vm):
    def step(op, args, out, width, **params):
        return {{"op": op, "args": args, "out": out, "params": params, "out_shape": [1, width], "out_dtype": "F32"}}

    recipe = {{"steps": [step("SQUARE", [{{"in": 0}}], 0, 48),
                         step("GEMV_TILE", [{{"s": 0}}, {{"in": 1}}], "final", 32, K=48, n_off=0, N_tile=32)]}}
    program = chain(
        {BUFFERS}, "z": (OUT, F32, (1, 32))}},
        [("SQUARE", ["x"], ["y"], {{}}), ("FUSED", ["x", "w"], ["z"], {{"recipe": recipe}})],
    )
    assert validate(program, strict=True).ok
    assert program_from_json(program_to_json(program)) == program
    check_vm(program)
    x, w = torch.randn(1, 48), torch.randn(32, 48)
    made = ReferenceVM(program).run({{"x": x, "w": w}})
    assert torch.allclose(made["y"], x * x) and torch.allclose(made["z"], x * x @ w.T, atol=1e-4)
    assert works_of(program)[0].flops == 48 and predict(program).latency_us > 0
    assert "SQUARE" in opcode_table() and "SQUARE" in schema_text()
"""

KERNEL: Final = """
import pytest
from flywheel.ir import BufferKind, DType

pytestmark = pytest.mark.gpu
IN, OUT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT


def test_the_kernel_runs_it(check_gpu):
    check_gpu({"x": (IN, DType.BF16, (1, 4099)), "y": (OUT, DType.F32, (1, 4099))}, [("SQUARE", ["x"], "y", {})])
"""


@pytest.fixture
def tree(tmp_path: Path, root: Path) -> Path:
    """A copy of the tree in which there is an opcode more."""
    for folder in ("flywheel", "tests"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name, (before, after) in PLACES.items():
        path = tmp_path / "flywheel" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, name
        path.write_text(text.replace(before, after), encoding="utf-8")
    (tmp_path / "flywheel" / "vm" / "cuda" / "ops" / "square.cuh").write_text(HEADER, encoding="utf-8")
    run(tmp_path, "-m", "flywheel.vm.abi_codegen")
    return tmp_path


def run(tree: Path, *arguments: str) -> str:
    """What a command of the tree says."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_test(tree: Path, name: str, text: str, *options: str) -> str:
    """The last line of what pytest says of a test in the tree."""
    (tree / "tests" / name).write_text(f"from __future__ import annotations\n{text}", encoding="utf-8")
    return run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"tests/{name}").splitlines()[-1]


def test_every_pass_takes_a_new_opcode_from_its_row(tree: Path) -> None:
    assert run_test(tree, "vm/pack/test_square.py", PASSES).startswith("1 passed in ")


@pytest.mark.long
def test_the_kernel_takes_a_new_opcode_from_its_header(tree: Path) -> None:
    assert run_test(tree, "gpu/test_square.py", KERNEL, "--emulate-gpu", "90").startswith("1 passed in ")


LISTED: Final = {
    ("ir/exchange.py", "ALLREDUCE_SHARD COPY"),  # an exchange is a push and a sum
    ("lowering/emit/__init__.py", "ATTENTION_TILE KV_APPEND"),  # what lowering emits in tasks of their own
    ("lowering/emit/__init__.py", "ALLREDUCE_SHARD COPY"),
    ("ir/operations.py", "GELU_MUL SILU_MUL"),  # a group of the table's own
    ("lowering/fusion.py", "ADD GELU_MUL"),  # what may go with a product, and what with attention
    ("lowering/fusion.py", "LAYERNORM RMSNORM"),
    ("lowering/fusion.py", "ATTENTION_TILE KV_APPEND"),
    ("plan/new_row.py", "ATTENTION_TILE KV_APPEND ROPE"),  # patterns that one kernel computes together
    ("plan/turning.py", "ATTENTION_TILE ROPE"),
    # What prefill and the rivals compute in torch, each in its own way: opcodes that a model's blocks have.
    ("models/forward.py", "ADD EMBED GELU_MUL LAYERNORM RMSNORM SAMPLE_ARGMAX SILU_MUL"),
    ("decode/prompts.py", "ATTENTION_TILE GEMV_TILE KV_APPEND ROPE"),
    ("rivals/torch_decoder.py", "ATTENTION_TILE GEMV_TILE KV_APPEND ROPE"),
}
"""Files beside the table that list opcodes, none of which a new opcode has to join. The last three are for a new opcode
that a family's blocks begin to have."""


def opcode(node: ast.expr | None) -> str | None:
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if named and node.attr in InstructionKind.__members__ else None  # type: ignore[union-attr]


def listed(tree: ast.AST) -> Iterator[str]:
    """The opcodes of each collection, each condition and each ladder of cases that has several."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            found = [*node.elts]
        elif isinstance(node, ast.Dict):
            found = [*node.keys, *node.values]
        elif isinstance(node, ast.BoolOp):
            found = [each for part in node.values if isinstance(part, ast.Compare) for each in part.comparators]
        elif isinstance(node, ast.Match):
            patterns = [each for case in node.cases for each in ast.walk(case.pattern)]
            found = [each.value for each in patterns if isinstance(each, ast.MatchValue)]
        names = {name for name in map(opcode, found) if name is not None}
        if len(names) > 1:
            yield " ".join(sorted(names))


def test_no_python_beside_the_table_lists_opcodes(root: Path) -> None:
    folder = root / "flywheel"
    found = {
        (path.relative_to(folder).as_posix(), names)
        for path in folder.rglob("*.py")
        for names in listed(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == LISTED


def test_kernels_name_opcodes_only_where_the_table_is_written(root: Path) -> None:
    folder = root / "flywheel" / "vm" / "cuda"
    found = {
        path.name: sorted(set(re.findall(r"AMK_OP_(\w+)", path.read_text(encoding="utf-8"))) - {"NOP"})
        for path in folder.rglob("*.cuh")
        if path.name not in ("dispatch.cuh", "opcodes.cuh")
    }
    assert {name: ops for name, ops in found.items() if ops} == {
        # whose operands the control warp prefetches
        "vm_loop.cuh": ["ATTENTION_TILE", "FUSED", "LAYERNORM", "RMSNORM"],
    }
