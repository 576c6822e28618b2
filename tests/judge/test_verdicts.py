from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from shared_pages import in_pages

from flywheel.decode.caches import KvCaches
from flywheel.decode.interface import Launched
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.session import Step
from flywheel.errors import UsageError
from flywheel.ir import TARGETS, Buffer, DType, MegakernelProgram, ScheduleConfig, validate
from flywheel.ir.recipe import Recipe, recipe_of
from flywheel.judge.verdicts import default_positions, judge_repeated, verify
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import Verdict
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import EagerDecoder
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import BoundProgram

Opened = Callable[..., tuple[ReferenceSession, EagerDecoder]]
Lowered = Callable[..., MegakernelProgram]
POSITIONS = (0, 7, 32, 62, 63)
SPEC = DecoderSpec(
    "small", "qwen3", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128,
    qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip


def buffers_changed(program: MegakernelProgram, **sources: str) -> MegakernelProgram:
    def moved(buffer: Buffer) -> Buffer:
        return replace(buffer, source=sources.get(buffer.name.replace(".", "_"), buffer.source))

    return replace(program, buffers=tuple(map(moved, program.buffers)))


def params_changed(program: MegakernelProgram, name: str, change: Callable[[Any], Any]) -> MegakernelProgram:
    """In tasks and in the steps of their recipes."""

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: change(inner) if key == name else moved(inner) for key, inner in value.items()}
        if isinstance(value, Recipe):
            return recipe_of([replace(step, params=moved(step.params)) for step in value.steps])
        return value

    tasks = tuple(replace(task, params=moved(task.params)) for task in program.tasks)
    assert [task.params for task in tasks] != [task.params for task in program.tasks]
    return replace(program, tasks=tasks)


def swapped(program: MegakernelProgram, one: str, other: str) -> MegakernelProgram:
    source = {buffer.name: buffer.source or "" for buffer in program.buffers}
    return buffers_changed(program, **{one.replace(".", "_"): source[other], other.replace(".", "_"): source[one]})


FAULTS: dict[str, Callable[[MegakernelProgram], MegakernelProgram]] = {
    "k and v of a layer swapped": lambda p: swapped(p, "L1.k_proj.w", "L1.v_proj.w"),
    "gate and up swapped": lambda p: swapped(p, "L0.gate_proj.w", "L0.up_proj.w"),
    "another layer's down_proj": lambda p: swapped(p, "L0.down_proj.w", "L1.down_proj.w"),
    "the norms of a layer swapped": lambda p: swapped(p, "L0.input_norm.w", "L0.post_attention_norm.w"),
    "half of the cache": lambda p: params_changed(p, "kv_len", lambda rows: rows // 2),
    "RoPE of another base": lambda p: params_changed(p, "theta", lambda _: 5e5),
    "RoPE without scaling": lambda p: params_changed(p, "rope_factor", lambda _: 1.0),
    "scores too sharp": lambda p: params_changed(p, "scale", lambda scale: 3 * scale),
    "norms of another epsilon": lambda p: params_changed(p, "eps", lambda _: 0.1),
}


def judged(session: ReferenceSession, positions: Sequence[int] = POSITIONS, seed: int = 0) -> Verdict:
    """By the weights that `opened` takes."""
    return verify(session, random_weights(SPEC, 1, TORCH_DTYPES[session.dtype]), positions, seed)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("order", ["list", "adversarial", "queues"])
def test_a_lowered_program_passes(dtype: DType, order: str, opened: Opened) -> None:
    session, _ = opened(dtype=dtype, order=order, seed=5)
    verdict = judged(session)
    assert verdict.passed, verdict.reason
    assert verdict.positions == POSITIONS
    assert verdict.dtype == dtype.name
    assert 3 * verdict.error <= verdict.bound


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault: str, dtype: DType, lowered: Lowered, opened: Opened) -> None:
    program = FAULTS[fault](lowered(dtype))
    assert validate(program, strict=True).ok, "the proof cannot see it"
    verdict = judged(opened(program, dtype)[0])
    assert not verdict.passed
    assert verdict.where in (verdict.reason or "")


def test_a_fault_of_attention_does_not_show_at_position_0(lowered: Lowered, opened: Opened) -> None:
    session, _ = opened(params_changed(lowered(), "theta", lambda _: 5e5))
    verdict = judged(session, [0])
    assert verdict.error < 1e-5
    assert not verdict.passed
    assert not judged(opened()[0], [0, 0]).passed


def test_a_wrong_operation_is_named_by_its_layer_and_tensor(lowered: Lowered, opened: Opened) -> None:
    program = lowered(DType.BF16)
    tasks = [
        params_changed(replace(program, tasks=(task,)), "eps", lambda eps: 100 * eps).tasks[0]
        if task.label == "L1.mlp_norm"
        else task
        for task in program.tasks
    ]
    verdict = judged(opened(replace(program, tasks=tuple(tasks)), DType.BF16)[0])
    assert not verdict.passed
    assert verdict.where.endswith("L1.mlp_in")


def test_reading_a_position_that_nothing_has_written_is_no_pass(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = KvCaches.write_past

    def write_less(caches: KvCaches, past: torch.Tensor, ends: list[int], gains: list[float]) -> None:
        whole(caches, past, [end - 1 for end in ends], gains)

    monkeypatch.setattr(KvCaches, "write_past", write_less)
    verdict = judged(opened()[0], [5, 6])
    assert not verdict.passed
    assert (verdict.reason or "").endswith("holds NaN or infinity, or not what it must be exactly")


def test_a_cached_row_that_a_launch_changes_is_no_pass(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = opened()
    step = BoundProgram.step

    def step_and_spoil(bound: BoundProgram, *given: Any) -> dict[str, torch.Tensor]:
        outputs = step(bound, *given)
        outputs["L1.v_cache.h1"][3] += 1e-3
        return outputs

    monkeypatch.setattr(BoundProgram, "step", step_and_spoil)
    verdict = judged(session, [5, 6])
    assert not verdict.passed
    assert verdict.where == "position 5, row 0, L1.v_cache, another row than the new one, head 1"


def test_what_shares_memory_is_judged_apart_and_must_give_the_same(
    lowered: Lowered, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = opened(in_pages(lowered(), "shared"))
    assert session.shares_memory
    assert judged(session).passed
    show = ReferenceSession.show

    def show_another(
        self: ReferenceSession, tokens: list[int], position: int, *, apart: bool
    ) -> Launched:
        launched = show(self, tokens, position, apart=apart)
        if not apart:
            launched.stack(["logits"])[0, 0, 3] += 1e-6
        return launched

    monkeypatch.setattr(ReferenceSession, "show", show_another)
    verdict = judged(session)
    assert not verdict.passed
    assert verdict.where == "position 63, row 0, what a launch makes where buffers share memory"


def test_positions_are_tried_once_each_and_in_order(opened: Opened) -> None:
    assert judged(opened()[0], [7, 0, 7, 3]).positions == (0, 3, 7)


def test_positions_outside_the_context_are_refused(opened: Opened) -> None:
    for positions in ([64], [-1, 3], [3, 512]):
        with pytest.raises(UsageError, match=r"0\.\.63"):
            judged(opened()[0], positions)
    with pytest.raises(UsageError, match="none given"):
        judged(opened()[0], [])


def test_the_seed_draws_the_tokens(opened: Opened) -> None:
    first, again, other = (judged(opened(dtype=DType.F32)[0], POSITIONS, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_default_positions_spread_over_the_context() -> None:
    assert default_positions(512) == (0, 256, 510, 511)
    assert default_positions(2) == (0, 1)
    assert default_positions(1) == (0,)


def test_a_token_that_is_not_the_first_of_its_own_largest_logits_is_no_pass(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = opened()
    show = ReferenceSession.show

    def show_another(
        self: ReferenceSession, tokens: list[int], position: int, *, apart: bool
    ) -> Launched:
        launched = show(self, tokens, position, apart=apart)
        if position == 6:
            chosen = launched.stack(["next_token"])[0]
            chosen.copy_((chosen + 1) % 80)
        return launched

    monkeypatch.setattr(ReferenceSession, "show", show_another)
    verdict = judged(session, [2, 4, 6, 7])
    assert not verdict.passed
    assert verdict.where == "position 6, row 0, next_token"


def test_the_logits_of_another_launch_must_be_the_same(opened: Opened) -> None:
    session, _ = opened(dtype=DType.BF16)
    logits = torch.randn(1, 80, generator=torch.Generator().manual_seed(1))
    assert judge_repeated([Step(logits[0], 0)], logits, 5, session.dtype).error == 0.0
    off = judge_repeated([Step(logits[0] * 1.002, 0)], logits, 5, session.dtype)
    assert not off.passed
    assert off.where == "position 5, row 0, logits of another launch"


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("window", [37, None, 36, 38])
def test_a_program_whose_window_is_one_row_off_fails(window: int | None, dtype: DType) -> None:
    spec = replace(SPEC, window=37, windowed=(True, False))
    other = replace(spec, window=window, windowed=() if window is None else spec.windowed)
    program = lower(decode_step(other, 64, dtype), ScheduleConfig(), replace(TARGETS["h100"], num_sms=6))
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype])
    verdict = verify(ReferenceSession(program, spec, weights), weights, default_positions(64))
    assert verdict.passed == (window == 37)
    assert verdict.passed or (verdict.error > 5 * verdict.bound and "L0.attn" in verdict.where)
