from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flywheel.decode.source import Source
from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.measure.comparison import standing
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Implausible, Incorrect, Measured, Rejected
from flywheel.measure.verdict import Verdict, judge
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.rivals import contestants
from flywheel.rivals.contestants import Contests, Record, Runner, time_round
from flywheel.rivals.lineup import RIVALS, TimingPlan, refusal
from flywheel.rivals.torch_decoder import FusedWeights, fuse
from flywheel.vm.gpu.driver import Gpu

Launch = Callable[[], None]

GOOD = judge(error=0.0, where="logits", positions=(7,), dtype="BF16")
BAD = judge(error=1.0, where="logits", positions=(7,), dtype="BF16")
SMALL = DecoderSpec("small", "llama", 192, 512, 3, 3, 1, 64, 1024, 1e5, 1e-5, 512, tied_head=True)
WIDE = replace(SMALL, name="wide", hidden=256, n_heads=4, n_kv_heads=2)
OTHER = DecoderSpec("other", "qwen3", 256, 512, 2, 4, 2, 64, 500, 1e4, 1e-6, 512, qk_norm=True, qkv_bias=True)

PLAIN_RIVALS = [rival for rival in RIVALS.values() if rival.form == "whole"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Timing that takes 10, 20, ... us for what is launched first, second, ...; how many were timed together."""
    together: list[int] = []

    def in_turn(
        gpu: Any, launches: Sequence[Launch], finish: Launch, samples: int, warmup: int, peers: Sequence[Any]
    ) -> list[list[float]]:
        together.append(len(launches))
        for launch in launches:
            launch()
        finish()
        return [[10.0 * (place + 1)] * samples for place in range(len(launches))]

    def batch(
        gpu: Any, launch: Launch, finish: Launch, latency: MeasuredLatency, peers: Sequence[Any]
    ) -> MeasuredLatency:
        return replace(latency, batch_us=latency.median_us - 1.0)

    monkeypatch.setattr(contestants, "time_contestants", in_turn)
    monkeypatch.setattr(contestants, "time_back_to_back", batch)
    return together


def runner(name: str, verdicts: Sequence[Verdict], ran: list[str]) -> Runner:
    given = list(verdicts)
    record = Record(name, "somehow")
    record.note(given.pop(0))
    return Runner(record, lambda: ran.append(name), lambda: given.pop(0))


def test_rounds_add_up_and_the_first_verdict_stands(
    timed: list[int], lowered: Callable[..., MegakernelProgram]
) -> None:
    ran: list[str] = []
    exact = replace(GOOD, error=0.001)
    one, two = runner("one", [exact, GOOD, GOOD], ran), runner("two", [GOOD, GOOD, GOOD], ran)
    for runners in ((one, two), (two, one)):
        time_round(None, runners, lambda: ran.append("finish"), 4)  # type: ignore[arg-type]
    assert ran == ["one", "two", "finish", "two", "one", "finish"]
    entry = one.record.entry(lowered())
    assert isinstance(entry.outcome, Measured)
    assert entry.outcome.verdict is exact
    assert entry.times_us == ((10.0,) * 4, (20.0,) * 4)
    assert entry.batches_us == (9.0, 19.0)
    assert (entry.outcome.latency.samples, entry.outcome.latency.median_us) == (8, 15.0)
    assert entry.outcome.latency.batch_us == 14.0


def test_whose_logits_are_wrong_is_not_launched(timed: list[int], lowered: Callable[..., MegakernelProgram]) -> None:
    ran: list[str] = []
    wrong, right = runner("wrong", [BAD], ran), runner("right", [GOOD, GOOD], ran)
    time_round(None, [wrong, right], lambda: None, 4)  # type: ignore[arg-type]
    assert ran == ["right"]
    entry = wrong.record.entry(lowered())
    assert isinstance(entry.outcome, Incorrect)
    assert (entry.times_us, entry.batches_us) == ((), ())


def test_who_goes_wrong_while_timed_loses_all_times(
    timed: list[int], lowered: Callable[..., MegakernelProgram]
) -> None:
    ran: list[str] = []
    late = runner("late", [GOOD, GOOD, BAD], ran)
    for _ in range(3):
        time_round(None, [late], lambda: None, 4)  # type: ignore[arg-type]
    assert timed == [1, 1]  # not a third time
    entry = late.record.entry(lowered())
    assert isinstance(entry.outcome, Incorrect)
    assert entry.outcome.reason.startswith("while timed: logits: error")
    assert entry.times_us == ()


def test_what_is_faster_than_its_weights_is_implausible(timed: list[int]) -> None:
    slow = replace(TARGETS["h100"], hbm_bandwidth_gbs=1.0)
    program = lower(decode_step(SMALL, 64, DType.BF16), ScheduleConfig(), slow)
    fast = runner("fast", [GOOD, GOOD], [])
    time_round(None, [fast], lambda: None, 4)  # type: ignore[arg-type]
    assert isinstance(fast.record.entry(program).outcome, Implausible)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "contexts"), [(SMALL, (64, 300)), (OTHER, (100,))], ids=["small", "other"])
def test_all_contestants_are_right_and_timed_at_every_context(
    spec: DecoderSpec, contexts: tuple[int, ...], gpu: Gpu
) -> None:
    target = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    said: list[str] = []
    contests = Contests(gpu, Source(spec.name, spec, None, None), DType.BF16, 1, said.append)
    for context in contexts:
        program = lower(decode_step(spec, context, DType.BF16), ScheduleConfig(), target)
        comparison = contests.hold(program, context, PLAIN_RIVALS, 4000.0, TimingPlan(2, 5))
        assert [entry.name for entry in comparison.entries] == ["flywheel", *(rival.name for rival in PLAIN_RIVALS)]
        for entry in comparison.entries:
            assert isinstance(entry.outcome, Measured), entry
            assert entry.outcome.verdict.positions[-1] == context - 1
            assert [len(samples) for samples in entry.times_us] == [5, 5]
            assert min(us for samples in entry.times_us for us in samples) > 0
            assert len(entry.batches_us) == 2
            found = standing(comparison, entry)
            assert found is not None
            assert len(found.speedups) == len(PLAIN_RIVALS)
    assert any("round 2 of 2" in line for line in said)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 8])
def test_all_contestants_of_a_batch_are_right_in_every_row_and_timed(batch: int, gpu: Gpu) -> None:
    target = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    contests = Contests(gpu, Source(SMALL.name, SMALL, None, None), DType.BF16, 1, lambda line: None)
    program = lower(decode_step(SMALL, 64, DType.BF16, batch), ScheduleConfig(), target)
    comparison = contests.hold(program, 64, PLAIN_RIVALS, 4000.0, TimingPlan(1, 5), batch)
    assert comparison.batch == batch
    for entry in comparison.entries:
        assert isinstance(entry.outcome, Measured), entry


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "batch"), [("int4", 1), ("int4", 8), ("int8", 1), ("int8", 8), ("fp8", 1)])
def test_rivals_multiply_the_programs_codes_or_say_why_not(text: str, batch: int, gpu: Gpu) -> None:
    target = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    formats = parse_formats(text, "bf16")
    contests = Contests(gpu, Source(WIDE.name, WIDE, None, None), DType.BF16, 1, lambda line: None, formats)
    program = lower(decode_step(WIDE, 64, DType.BF16, batch, formats), ScheduleConfig(), target)
    comparison = contests.hold(program, 64, list(RIVALS.values()), 4000.0, TimingPlan(1, 5), batch)
    for rival, entry in zip(RIVALS.values(), comparison.entries[1:], strict=True):
        why = refusal(rival, WIDE, formats, DType.BF16)
        if why is None:
            assert isinstance(entry.outcome, Measured), entry
        else:
            assert entry.outcome == Rejected(("rival",), why)


@pytest.mark.gpu
def test_a_program_that_does_not_fit_does_not_stop_what_comes_after(gpu: Gpu) -> None:
    target = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    contests = Contests(gpu, Source(SMALL.name, SMALL, None, None), DType.BF16, 1, lambda line: None)
    fits = lower(decode_step(SMALL, 64, DType.BF16), ScheduleConfig(), target)
    large = lower(decode_step(SMALL, 64, DType.BF16), ScheduleConfig(), replace(target, num_sms=1000))
    with pytest.raises(ConfigError, match="1000 blocks"):
        contests.hold(large, 64, [], 4000.0, TimingPlan(1, 5))
    assert isinstance(contests.hold(fits, 64, [], 4000.0, TimingPlan(1, 5)).entries[0].outcome, Measured)


def with_other_down(fused: FusedWeights) -> FusedWeights:
    """The weights with the rows of one matrix of the second layer in another order."""
    first, second, *others = fused.layers
    (place,) = [place for place, held in enumerate(second) if held.call.names == ("down_proj",)]
    down = second[place]
    assert isinstance(down.matrix, Tensor)
    changed = (*second[:place], down._replace(matrix=down.matrix.roll(1, 0)), *second[place + 1 :])
    return replace(fused, layers=(first, changed, *others))


def test_other_weights_are_of_one_matrix() -> None:
    fused = fuse(SMALL, random_weights(SMALL, 1))
    before, after = ([each.matrix for layer in made.layers for each in layer if isinstance(each.matrix, Tensor)]
                     for made in (fused, with_other_down(fused)))  # fmt: skip
    assert [torch.equal(*each) for each in zip(before, after, strict=True)].count(False) == 1


@pytest.mark.gpu
def test_a_rival_with_other_weights_is_not_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    target = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    contests = Contests(gpu, Source(SMALL.name, SMALL, None, None), DType.BF16, 1, lambda line: None)
    fused = with_other_down(fuse(SMALL, contests._weights))
    monkeypatch.setitem(contests._fused, "whole", fused)
    program = lower(decode_step(SMALL, 64, DType.BF16), ScheduleConfig(), target)
    ours, rival = contests.hold(program, 64, [RIVALS["cublas"]], 4000.0, TimingPlan(1, 5)).entries
    assert isinstance(ours.outcome, Measured)
    assert isinstance(rival.outcome, Incorrect)
