"""Which steps are found to be a launch's new row, which one kernel does in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flywheel.ir import TARGETS, BufferKind, DType, InstructionKind, KvRows, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.abi import StepFlag
from flywheel.vm.pack import PackedProgram, pack

Chain = Callable[..., MegakernelProgram]
IN, OUT, KV = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE
F32, BF16, I32 = DType.F32, DType.BF16, DType.I32
FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
CONTEXT, LAYERS, KV_HEADS, GROUP = 48, 2, 2, 3
ATTEND = ("k_rope", "k_append", "v_append", "q_rope", "attention")
NORMED = ("k_norm", "q_norm", *ATTEND)


def decoder(
    head_dim: int, fused: Sequence[str], kv_block: int, dtype: DType = BF16, qk_norm: bool = False, batch: int = 1
) -> MegakernelProgram:
    spec = DecoderSpec(
        "small", "qwen3" if qk_norm else "llama", 64, 96, LAYERS, 4, KV_HEADS, head_dim, 50, 1e4, 1e-5, 64,
        qk_norm=qk_norm,
    )  # fmt: skip
    config = ScheduleConfig(tiling={"attention": {"kv_block": kv_block}}, fusion_grouping=(tuple(fused),))
    return lower(decode_step(spec, CONTEXT, dtype, batch), config, FEW)


def found(packed: PackedProgram) -> list[list[str]]:
    """Operations of the new row of each instruction that has one, as the kernel finds them."""
    rows = []
    for instruction in packed.instructions:
        steps = packed.steps[instruction["first_step"] :][: instruction["n_steps"]]
        for place in np.flatnonzero(steps["flags"] & int(StepFlag.NEW_ROW)):
            rope = steps[place]["as"]["rope"]
            others = (rope["value"], rope["query_rope"], len(steps) - 1)
            rows.append([InstructionKind(int(steps[at]["op"])).name for at in (place, place + 1, *others)])
    return rows


def appended(packed: PackedProgram) -> list[list[str]]:
    """Operations that an attention does on the way, of each that appends a row, as the kernel finds them."""
    rows = []
    for instruction in packed.instructions:
        steps = packed.steps[instruction["first_step"] :][: instruction["n_steps"]]
        for place in np.flatnonzero(steps["flags"] & int(StepFlag.APPENDS)):
            attention = steps[place]["as"]["attention"]
            others = (attention["key_rope"], attention["key_rope"] + 1, attention["value"], place - 1)
            assert all(steps["flags"][list(others)] & int(StepFlag.LEFT))
            assert steps["flags"][place] & int(StepFlag.TURNS)
            rows.append([InstructionKind(int(steps[at]["op"])).name for at in (*others, place)])
    return rows


def own_norms(packed: PackedProgram, instruction: Any) -> list[int]:
    """Places of the norms that belong to the instruction's new row, as its two ROPEs say."""
    steps = packed.steps[instruction["first_step"] :][: instruction["n_steps"]]
    places: list[int] = []
    for place in np.flatnonzero(steps["flags"] & int(StepFlag.NEW_ROW)):
        ropes = steps["as"]["rope"]
        places += [int(ropes["norm"][rope]) for rope in (place, ropes["query_rope"][place])]
    norms = [place for place in places if place >= 0]
    assert all(steps[place]["op"] == int(InstructionKind.RMSNORM) for place in norms)
    assert all(steps[place]["flags"] & int(StepFlag.LEFT) for place in norms)
    return norms


ROW = ["ROPE", "KV_APPEND", "KV_APPEND", "ROPE", "ATTENTION_TILE"]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_kv_head_of_a_layer_has_a_new_row(
    dtype: DType, head_dim: int, qk_norm: bool, check_vm: Callable[..., None]
) -> None:
    program = decoder(head_dim, NORMED if qk_norm else ATTEND, 16, dtype, qk_norm)
    packed = pack(program)
    assert found(packed) == [ROW] * LAYERS * KV_HEADS
    norms = [len(own_norms(packed, instruction)) for instruction in packed.instructions]
    assert sum(norms) == 2 * qk_norm * LAYERS * KV_HEADS
    check_vm(program, 17)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_attention_to_older_rows_too_appends_its_own(
    head_dim: int, qk_norm: bool, check_vm: Callable[..., None]
) -> None:
    program = decoder(head_dim, NORMED if qk_norm else ATTEND, CONTEXT, BF16, qk_norm)
    packed = pack(program)
    assert appended(packed) == [ROW] * LAYERS * KV_HEADS
    assert found(packed) == []
    check_vm(program, 17)


def test_what_tensor_cores_do_not_take_appends_for_itself() -> None:
    assert appended(pack(decoder(64, ATTEND, CONTEXT, F32))) == []
    assert appended(pack(decoder(32, ATTEND, CONTEXT))) == []
    assert appended(pack(decoder(64, ATTEND, 16))) == []


def test_each_sequence_has_its_own() -> None:
    assert found(pack(decoder(64, ATTEND, 16, batch=2))) == [ROW] * LAYERS * KV_HEADS * 2


@pytest.mark.parametrize(
    ("head_dim", "fused", "kv_block"),
    [
        (16, ATTEND, 16),
        (32, ATTEND, 16),
        (64, ATTEND, CONTEXT),
        (64, ATTEND[:3], 16),
        (64, ATTEND[3:], 16),
    ],
)
def test_others_have_none(head_dim: int, fused: Sequence[str], kv_block: int) -> None:
    assert found(pack(decoder(head_dim, fused, kv_block))) == []


WIDTH = 64


def step(op: str, args: Sequence[str], out: Any, width: int, dtype: DType = BF16, **params: Any) -> dict[str, Any]:
    operands = [{"in" if arg[0] == "i" else "s": int(arg[1:])} for arg in args]
    shape = [width] if op != "ATTENTION_TILE" else [1, width]
    return {"op": op, "args": operands, "out": out, "params": params, "out_shape": shape, "out_dtype": dtype.name}


ROPE: Mapping[str, Any] = {"head_dim": WIDTH, "theta": 1e4}
HEADS: Mapping[str, Any] = {"head_dim": WIDTH, "n_heads": GROUP, "n_kv_heads": 1, "scale": 0.125}
STEPS: Sequence[dict[str, Any]] = (
    step("ROPE", ["i1", "i3"], 0, WIDTH, **ROPE),
    step("KV_APPEND", ["s0", "i4"], {"out": 1}, CONTEXT * WIDTH),
    step("KV_APPEND", ["i2", "i5"], {"out": 2}, CONTEXT * WIDTH),
    step("COPY", ["i0"], 1, GROUP * WIDTH, n_off=WIDTH, N_tile=GROUP * WIDTH),
    step("ROPE", ["s1", "i3"], 2, GROUP * WIDTH, **ROPE),
    step("ATTENTION_TILE", ["s2", "i4", "i5"], "final", GROUP * WIDTH, **HEADS),
)
NEW = {"kv_start": CONTEXT - 1, "kv_len": 1, "kv_rows": KvRows.NEW.value}


def appending(
    chain: Chain, changed: Mapping[int, dict[str, Any]] | None = None, window: Mapping[str, int] | None = None,
    queries: DType = BF16, cache: DType = BF16, positions: int = 1,
) -> MegakernelProgram:
    """One task for a new row, some of whose steps are others."""
    caches = (KV, cache, (CONTEXT, 1, WIDTH))
    buffers = {
        "q": (IN, queries, (1, 5 * WIDTH)), "k": (IN, BF16, (1, WIDTH)), "v": (IN, BF16, (1, WIDTH)),
        "pos": (IN, I32, (positions,)), "kc": caches, "vc": caches, "y": (OUT, BF16, (1, GROUP * WIDTH)),
    }  # fmt: skip
    steps = [(changed or {}).get(place, each) for place, each in enumerate(STEPS)]
    params = {"pos": CONTEXT - 1, **(NEW if window is None else window), "recipe": {"steps": steps}}
    return chain(buffers, [("FUSED", ["q", "k", "v", "pos", "kc", "vc"], ["y", "kc", "vc"], params)])


def test_a_view_may_lie_between_the_steps(chain: Chain) -> None:
    packed = pack(appending(chain))
    assert packed.steps["flags"][3] & int(StepFlag.VIEW)
    assert found(packed) == [ROW]
    assert packed.steps["as"]["rope"][0][["value", "query_rope"]].tolist() == (2, 4)


@pytest.mark.parametrize(
    "changed",
    [
        {3: step("GELU", ["i0"], 1, GROUP * WIDTH)},  # made between
        {2: step("KV_APPEND", ["s0", "i5"], {"out": 2}, CONTEXT * WIDTH)},  # the key for a value
        {1: step("KV_APPEND", ["i1", "i4"], {"out": 1}, CONTEXT * WIDTH)},  # a key that is not turned
        {5: step("ATTENTION_TILE", ["s2", "i5", "i4"], "final", GROUP * WIDTH, **HEADS)},  # caches in turn
        {5: step("ATTENTION_TILE", ["s1", "i4", "i5"], "final", GROUP * WIDTH, **HEADS)},  # queries not turned
        {0: step("ROPE", ["i1", "i3"], 0, WIDTH, **ROPE | {"head_dim": 32})},
        {0: step("ROPE", ["i1", "i3"], 0, WIDTH, **ROPE | {"theta": 1e5})},  # turned otherwise than the queries
        {0: step("ROPE", ["i1", "i3"], 0, WIDTH, F32, **ROPE)},
        {3: step("COPY", ["i0"], 1, GROUP * WIDTH, n_off=WIDTH + 1, N_tile=GROUP * WIDTH)},  # words across elements
        {4: step("ROPE", ["s1", "i3"], 2, GROUP * WIDTH, **ROPE | {"head_dim": 32})},
    ],
)
def test_steps_that_are_no_new_row(chain: Chain, changed: Mapping[int, dict[str, Any]]) -> None:
    assert found(pack(appending(chain, changed))) == []


def test_operands_that_the_kernel_does_not_take(chain: Chain) -> None:
    assert found(pack(appending(chain, queries=F32))) == []
    assert found(pack(appending(chain, cache=F32))) == []
    assert found(pack(appending(chain, positions=GROUP))) == []


def test_only_a_window_that_is_the_new_row_wherever_it_moves(chain: Chain) -> None:
    for start, kernels in ((0, [ROW]), (CONTEXT - 1, [])):  # the second one is empty at all other positions
        packed = pack(appending(chain, window={"kv_start": start, "kv_len": CONTEXT - start}))
        assert found(packed) == []
        assert appended(packed) == kernels
