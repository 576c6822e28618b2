from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from flywheel.decode.session import ReferenceSession, Step
from flywheel.decode.verify import default_positions, is_tie, verify
from flywheel.errors import UsageError
from flywheel.ir import Buffer, DType, MegakernelProgram, validate
from flywheel.models.eager import EagerDecoder

Opened = Callable[..., tuple[ReferenceSession, EagerDecoder]]
Lowered = Callable[..., MegakernelProgram]
POSITIONS = (0, 1, 7, 32, 63)


def buffers_changed(program: MegakernelProgram, **sources: str) -> MegakernelProgram:
    def moved(buffer: Buffer) -> Buffer:
        return replace(buffer, source=sources.get(buffer.name.replace(".", "_"), buffer.source))

    return replace(program, buffers=tuple(map(moved, program.buffers)))


def params_changed(program: MegakernelProgram, name: str, change: Callable[[Any], Any]) -> MegakernelProgram:
    """In tasks and in the steps of their recipes."""

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: change(inner) if key == name else moved(inner) for key, inner in value.items()}
        return [moved(inner) for inner in value] if isinstance(value, list | tuple) else value

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


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("order", ["list", "adversarial", "queues"])
def test_a_lowered_program_passes(dtype: DType, order: str, opened: Opened) -> None:
    session, oracle = opened(dtype=dtype, order=order, seed=5)
    verdict = verify(session, oracle, POSITIONS)
    assert verdict.passed, verdict.reason
    assert verdict.positions == POSITIONS
    assert verdict.dtype == dtype.name
    assert verdict.top1_agreement == 1.0


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault: str, dtype: DType, lowered: Lowered, opened: Opened) -> None:
    program = FAULTS[fault](lowered(dtype))
    assert validate(program, strict=True).ok, "the proof cannot see it"
    verdict = verify(*opened(program, dtype), POSITIONS)
    assert not verdict.passed
    assert "error" in (verdict.reason or "")


def test_a_fault_of_attention_does_not_show_at_position_0(lowered: Lowered, opened: Opened) -> None:
    session, oracle = opened(params_changed(lowered(), "theta", lambda _: 5e5))
    verdict = verify(session, oracle, [0])
    assert verdict.max_rel_error < 1e-5
    assert not verdict.passed
    assert not verify(*opened(), [0, 0]).passed


def test_reading_a_position_that_nothing_has_written_is_no_pass(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ReferenceSession.write_cache
    monkeypatch.setattr(
        ReferenceSession, "write_cache", lambda self, layers: whole(self, [(k[1:], v[1:]) for k, v in layers])
    )
    verdict = verify(*opened(), [5])
    assert not verdict.passed
    assert verdict.reason == "max absolute error is nan, not a finite number"


def test_positions_are_tried_once_each_and_in_order(opened: Opened) -> None:
    assert verify(*opened(), [7, 0, 7, 3]).positions == (0, 3, 7)


def test_positions_outside_the_context_are_refused(opened: Opened) -> None:
    for positions in ([64], [-1, 3], [3, 512]):
        with pytest.raises(UsageError, match=r"0\.\.63"):
            verify(*opened(), positions)
    with pytest.raises(UsageError, match="none given"):
        verify(*opened(), [])


def test_the_seed_draws_the_tokens(opened: Opened) -> None:
    first, again, other = (verify(*opened(dtype=DType.F32), POSITIONS, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_oracle_may_have_been_used_before(opened: Opened) -> None:
    session, oracle = opened()
    fresh = verify(session, oracle, POSITIONS)
    oracle.reset()
    oracle.prefill([1, 2, 3])
    assert verify(session, oracle, POSITIONS) == fresh


def test_default_positions_spread_over_the_context() -> None:
    assert default_positions(512) == (0, 1, 7, 256, 511)
    assert default_positions(2) == (0, 1)
    assert default_positions(1) == (0,)


def test_errors_are_relative_to_the_largest_logit_of_their_position(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, oracle = opened()
    step, largest = session.step, []

    def shifted(_: ReferenceSession, token: int, position: int) -> Step:
        exact = step(token, position)
        largest.append(float(exact.logits.abs().max()))
        return replace(exact, logits=exact.logits + 0.5)

    monkeypatch.setattr(ReferenceSession, "step", shifted)
    verdict = verify(session, oracle, [9, 20])
    assert verdict.max_abs_error == pytest.approx(0.5, abs=1e-4)
    assert verdict.max_rel_error == pytest.approx(0.5 / min(largest), rel=1e-3)
    assert verdict.top1_agreement == 1.0


def test_a_token_that_is_not_the_oracles_first_choice_disagrees(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, oracle = opened()
    step = session.step
    monkeypatch.setattr(
        ReferenceSession, "step", lambda _, *at: replace(step(*at), token=(step(*at).token + at[1] % 2) % 80)
    )
    verdict = verify(session, oracle, [2, 4, 6, 7])
    assert verdict.top1_agreement == 0.75
    assert not verdict.passed


def test_only_half_types_tie_and_only_within_rounding() -> None:
    logits = torch.tensor([4.0, 3.95, 3.0, -4.0])
    assert is_tie(logits, 1, DType.BF16)
    assert not is_tie(logits, 2, DType.BF16)
    assert not is_tie(logits, 1, DType.F16)
    assert not is_tie(torch.tensor([4.0, 4.0]), 1, DType.F32)
    assert not is_tie(logits, 9, DType.BF16)
