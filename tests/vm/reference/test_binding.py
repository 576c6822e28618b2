from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusing import PATTERNS
from torch import Tensor

from flywheel.errors import InvalidProgramError
from flywheel.ir import BufferKind, DType, MegakernelProgram, ScheduleConfig, validate
from flywheel.lowering.fusion import COMBINE, Pattern
from flywheel.vm.reference import ReferenceVM

IN, OUT, ACT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION
WEIGHT, CACHE = BufferKind.WEIGHT, BufferKind.KV_CACHE
F32, BF16 = DType.F32, DType.BF16

Build = Callable[..., MegakernelProgram]


def step(op: str, args: list[str], out: object, width: int, dtype: DType = F32, **params: Any) -> dict[str, Any]:
    """A recipe step; args are "in0", "s1" and so on."""
    slots = [{"in": int(arg[2:])} if arg.startswith("in") else {"s": int(arg[1:])} for arg in args]
    return {"op": op, "args": slots, "out": out, "params": params, "out_shape": [1, width], "out_dtype": dtype.name}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_fused_pattern_equals_its_unfused_composition(
    pattern: Pattern, lowered: Build, filled: Callable[..., dict[str, Tensor]]
) -> None:
    names = tuple(dict.fromkeys((*pattern.before, *pattern.anchors, *pattern.after)))
    block = 16 if COMBINE in names else 48
    tiling = {"gemv": {"N_tile": 32}, "attention": {"kv_block": block}}
    plain, fused = (lowered(ScheduleConfig(tiling=tiling, fusion_grouping=groups)) for groups in ([], [names]))
    assert len(fused.tasks) < len(plain.tasks)
    wanted, got = (ReferenceVM(program).run(filled(program, 29), pos=29) for program in (plain, fused))
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


def test_any_recipe_is_the_composition_of_its_steps(chain: Build) -> None:
    buffers = {
        "x": (IN, F32, (1, 16)), "w": (WEIGHT, F32, (16,)), "a": (ACT, F32, (1, 16)), "b": (ACT, F32, (1, 16)),
        "c": (ACT, F32, (1, 16)), "y": (OUT, F32, (1, 16)),
    }  # fmt: skip
    norm = {"eps": 1e-5, "hidden": 16}
    plain = chain(
        buffers,
        [
            ("LAYERNORM", ["x", "w"], "a", norm),
            ("GELU", ["a"], "b", {}),
            ("MUL", ["b", "a"], "c", {}),
            ("SOFTMAX", ["c"], "y", {}),
        ],
    )
    steps = [
        step("LAYERNORM", ["in0", "in1"], 0, 16, **norm),
        step("GELU", ["s0"], 5, 16),
        step("MUL", ["s5", "s0"], 1, 16),
        step("SOFTMAX", ["s1"], "final", 16),
    ]
    kept = {name: buffers[name] for name in ("x", "w", "y")}
    fused = chain(kept, [("FUSED", ["x", "w"], "y", {"recipe": {"steps": steps}})])
    tensors = {"x": random(1, 16), "w": random(16, seed=1)}
    assert torch.equal(ReferenceVM(plain).run(tensors)["y"], ReferenceVM(fused).run(tensors)["y"])


def test_steps_round_to_their_own_dtype(chain: Build) -> None:
    buffers = {"x": (IN, F32, (1, 8)), "y": (OUT, F32, (1, 8))}
    tensors = {"x": random(1, 8)}
    for steps in (
        [step("COPY", ["in0"], 0, 8, BF16), step("COPY", ["s0"], "final", 8)],
        [step("COPY", ["in0"], "final", 8, BF16)],
    ):
        program = chain(buffers, [("FUSED", ["x"], "y", {"recipe": {"steps": steps}})])
        assert torch.equal(ReferenceVM(program).run(tensors)["y"], tensors["x"].bfloat16().float())


def test_a_step_inherits_the_columns_of_its_task(chain: Build) -> None:
    buffers = {
        "x": (IN, F32, (1, 8)), "w": (WEIGHT, F32, (12, 8)), "r": (IN, F32, (1, 12)), "y": (OUT, F32, (1, 12)),
    }  # fmt: skip
    recipes = {
        width: {
            "steps": [
                step("GEMV_TILE", ["in0", "in1"], 0, width, K=8),
                step("COPY", ["in2"], 1, width),
                step("ADD", ["s0", "s1"], "final", width),
            ]
        }
        for width in (8, 4)
    }
    tasks = [
        ("FUSED", ["x", "w", "r"], "y", {"n_off": 0, "N_tile": 8, "recipe": recipes[8]}),
        ("FUSED", ["x", "w", "r"], "y", {"n_off": 8, "N_tile": 4, "recipe": recipes[4]}),
    ]
    tensors = {"x": random(1, 8), "w": random(12, 8, seed=1), "r": random(1, 12, seed=2)}
    got = ReferenceVM(chain(buffers, tasks)).run(tensors)["y"]
    torch.testing.assert_close(got, tensors["x"] @ tensors["w"].T + tensors["r"])


def test_a_recipe_may_write_several_outputs(chain: Build) -> None:
    buffers = {"x": (IN, F32, (1, 8)), "y": (OUT, F32, (1, 8)), "z": (OUT, F32, (1, 8))}
    steps = [step("MUL", ["in0"], {"out": 1}, 8, scale=2.0), step("MUL", ["in0"], "final", 8, scale=3.0)]
    program = chain(buffers, [("FUSED", ["x"], ["y", "z"], {"recipe": {"steps": steps}})])
    got = ReferenceVM(program).run({"x": random(1, 8)})
    assert torch.equal(got["y"], random(1, 8) * 3) and torch.equal(got["z"], random(1, 8) * 2)


def test_later_steps_see_what_an_append_wrote(chain: Build) -> None:
    buffers = {"k": (IN, F32, (1, 4)), "cache": (CACHE, F32, (6, 1, 4)), "y": (OUT, F32, (1, 24))}
    steps = [
        step("KV_APPEND", ["in0", "in1"], {"out": 1}, 24),
        step("MUL", ["in1"], "final", 24, scale=10.0),
    ]
    program = chain(buffers, [("FUSED", ["k", "cache"], ["y", "cache"], {"pos": 2, "recipe": {"steps": steps}})])
    tensors = {"k": random(1, 4), "cache": random(6, 1, 4, seed=1)}
    got = ReferenceVM(program).run(tensors)
    wanted = tensors["cache"].clone()
    wanted[2, 0] = tensors["k"][0]
    assert torch.equal(got["cache"], wanted) and torch.equal(got["y"], 10 * wanted.view(1, 24))
    moved = ReferenceVM(program).run(tensors, pos=0)
    assert torch.equal(moved["cache"][0, 0], tensors["k"][0]) and torch.equal(moved["cache"][2], tensors["cache"][2])


def test_matrix_tiles_write_their_columns_of_every_row(chain: Build) -> None:
    buffers = {"x": (IN, F32, (3, 8)), "w": (WEIGHT, F32, (12, 8)), "y": (OUT, F32, (3, 12))}
    tiles = [
        ("GEMM_TILE", ["x", "w"], "y", {"M_tile": 3, "K": 8, "n_off": start, "N_tile": width})
        for start, width in ((4, 8), (0, 4))
    ]
    tensors = {"x": random(3, 8), "w": random(12, 8, seed=1)}
    torch.testing.assert_close(ReferenceVM(chain(buffers, tiles)).run(tensors)["y"], tensors["x"] @ tensors["w"].T)


def test_dequantised_weights_multiply_in_a_recipe(chain: Build) -> None:
    buffers = {
        "x": (IN, F32, (1, 8)), "q": (WEIGHT, DType.I4, (4, 8)), "scales": (WEIGHT, F32, (4, 2)),
        "y": (OUT, F32, (1, 4)),
    }  # fmt: skip
    weights = {**step("DEQUANT", ["in1", "in2"], 0, 32, qdtype=7, group=4), "out_shape": [4, 8]}
    steps = [weights, step("GEMV_TILE", ["in0", "s0"], "final", 4, K=8, n_off=0, N_tile=4)]
    program = chain(buffers, [("FUSED", ["x", "q", "scales"], "y", {"recipe": {"steps": steps}})])
    integers = torch.randint(-8, 8, (4, 8), generator=torch.Generator().manual_seed(0))
    packed = ((integers[:, 0::2] & 15) | (integers[:, 1::2] & 15) << 4).to(torch.uint8)
    tensors = {"x": random(1, 8), "q": packed, "scales": random(4, 2, seed=1)}
    wide = integers.float() * tensors["scales"].repeat_interleave(4, dim=1)
    torch.testing.assert_close(ReferenceVM(program).run(tensors)["y"], tensors["x"] @ wide.T)


@pytest.mark.parametrize(
    ("op", "inputs", "params", "wanted"),
    [
        ("ADD", ["x", "z"], {}, r"ADD: b \(z \[1, 10\]\) holds 10 elements, not n=8"),
        ("COPY", ["q"], {}, r"COPY: x \(q \[1, 8\]\) is I4, not "),
        ("SOFTMAX", ["x"], {"dim": 2}, r"SOFTMAX: dim=2 is not one of the 2 dimensions of x \[1, 8\]"),
        ("MUL", ["x"], {}, "MUL: one input needs param scale"),
    ],
)
def test_the_vm_refuses_an_unproved_task_as_the_validator_does(
    chain: Build, op: str, inputs: list[str], params: dict[str, int], wanted: str
) -> None:
    buffers = {"x": (IN, F32, (1, 8)), "z": (IN, F32, (1, 10)), "q": (IN, DType.I4, (1, 8)), "y": (OUT, F32, (1, 8))}
    program = chain(buffers, [(op, inputs, "y", params)])
    tensors = {"x": random(1, 8), "z": random(1, 10), "q": torch.zeros(1, 4, dtype=torch.uint8)}
    with pytest.raises(InvalidProgramError, match=r"^task 0 \(t0\): " + wanted) as refusal:
        ReferenceVM.unchecked(program).run(tensors)
    assert str(refusal.value) == validate(program, strict=True).errors[0].message
