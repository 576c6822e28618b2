"""Which ROPE of queries, and which norm before it, is left to their attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from flywheel.ir import BufferKind, DType, InstructionKind, MegakernelProgram
from flywheel.vm.abi import StepFlag
from flywheel.vm.pack import pack

Chain = Callable[..., MegakernelProgram]
IN, OUT, KV, WEIGHT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE, BufferKind.WEIGHT
F32, BF16, I32 = DType.F32, DType.BF16, DType.I32
ROWS, GROUP, HEAD = 48, 2, 64
WIDTH = GROUP * HEAD


def step(op: str, args: Sequence[str], out: Any, width: int, dtype: DType = BF16, **params: Any) -> dict[str, Any]:
    operands = [{"in" if arg[0] == "i" else "s": int(arg[1:])} for arg in args]
    shape = [width] if op != "ATTENTION_TILE" else [1, width]
    return {"op": op, "args": operands, "out": out, "params": params, "out_shape": shape, "out_dtype": dtype.name}


VIEW = step("COPY", ["i0"], 0, WIDTH, n_off=WIDTH, N_tile=WIDTH)
NORM: Mapping[str, Any] = {"eps": 1e-6, "hidden": HEAD}
ROPE: Mapping[str, Any] = {"head_dim": HEAD, "theta": 1e4}
HEADS: Mapping[str, Any] = {"head_dim": HEAD, "n_heads": GROUP, "n_kv_heads": 1, "scale": 0.125}
STEPS: Sequence[dict[str, Any]] = (
    VIEW,
    step("RMSNORM", ["s0", "i1"], 1, WIDTH, **NORM),
    step("ROPE", ["s1", "i2"], 2, WIDTH, **ROPE),
    step("ATTENTION_TILE", ["s2", "i3", "i4"], "final", WIDTH, **HEADS),
)


def attending(
    chain: Chain, steps: Sequence[dict[str, Any]] = STEPS, weight: DType = BF16, cache: DType = BF16, turns: int = 1,
    kind: BufferKind = WEIGHT,
) -> MegakernelProgram:
    """One task that attends to a cache of rows there are."""
    caches = (KV, cache, (ROWS, 1, HEAD))
    buffers = {
        "q": (IN, BF16, (1, 2 * WIDTH)), "w": (kind, weight, (WIDTH,)), "pos": (IN, I32, (turns,)), "kc": caches,
        "vc": caches, "y": (OUT, BF16, (1, WIDTH)), "z": (OUT, BF16, (1, WIDTH)),
    }  # fmt: skip
    params = {"kv_start": 0, "kv_len": ROWS, "recipe": {"steps": list(steps)}}
    return chain(buffers, [("FUSED", ["q", "w", "pos", "kc", "vc"], ["y", "z"], params)])


def left(program: MegakernelProgram) -> list[str]:
    """Operations that are left to an attention; where its norm is, its ROPE says."""
    steps = pack(program).steps
    names = [InstructionKind(int(row["op"])).name for row in steps]
    found = [place for place, row in enumerate(steps) if row["flags"] & int(StepFlag.LEFT)]
    turning = [place for place, row in enumerate(steps) if row["flags"] & int(StepFlag.TURNS)]
    assert [names[place] for place in turning] == ["ATTENTION_TILE"] * len(turning)
    ropes = [place for place in found if names[place] == "ROPE"]
    assert [place + 1 for place in ropes] == turning
    norms = [int(steps[place]["as"]["rope"]["norm"]) for place in ropes]
    assert [norm for norm in norms if norm >= 0] == [place for place in found if names[place] == "RMSNORM"]
    return [names[place] for place in found]


def with_steps(changed: Mapping[int, dict[str, Any]], *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(changed.get(place, each) for place, each in enumerate(STEPS)), *more]


def test_an_attention_does_the_rope_of_its_queries_and_the_norm_before_it(chain: Chain) -> None:
    assert left(attending(chain)) == ["RMSNORM", "ROPE"]


def test_the_rope_alone_where_there_is_no_norm(chain: Chain) -> None:
    steps = [VIEW, step("ROPE", ["s0", "i2"], 2, WIDTH, **ROPE), STEPS[3]]
    assert left(attending(chain, steps)) == ["ROPE"]


@pytest.mark.parametrize(
    "steps",
    [
        with_steps({}, step("GELU", ["s1"], {"out": 1}, WIDTH)),  # another reads it
        with_steps({1: step("RMSNORM", ["s0", "i1"], 1, WIDTH, **NORM | {"hidden": WIDTH})}),  # of all heads at once
        with_steps({0: step("MUL", ["i1"], 0, WIDTH, scale=0.5)}),  # of what the task makes
    ],
)
def test_a_norm_that_stays_a_step(chain: Chain, steps: Sequence[dict[str, Any]]) -> None:
    assert left(attending(chain, steps)) == ["ROPE"]


def test_a_norm_of_other_weights_stays_a_step(chain: Chain) -> None:
    assert left(attending(chain, kind=IN)) == ["ROPE"]


@pytest.mark.parametrize(
    "changed",
    [
        {2: step("ROPE", ["s1", "i2"], 2, WIDTH, F32, **ROPE)},
        {2: step("ROPE", ["s1", "i2"], 2, WIDTH, **ROPE | {"head_dim": 32})},
        {3: step("ATTENTION_TILE", ["s1", "i3", "i4"], "final", WIDTH, **HEADS)},
        {3: step("ATTENTION_TILE", ["s2", "i3", "i4"], "final", WIDTH,
                 **HEADS | {"head_dim": 32, "n_heads": 4, "n_kv_heads": 2})},
    ],
)  # fmt: skip
def test_a_rope_that_stays_a_step(chain: Chain, changed: Mapping[int, dict[str, Any]]) -> None:
    assert left(attending(chain, with_steps(changed))) == []


def test_operands_that_the_kernel_does_not_take(chain: Chain) -> None:
    assert left(attending(chain, cache=F32)) == []
    assert left(attending(chain, turns=GROUP)) == []
