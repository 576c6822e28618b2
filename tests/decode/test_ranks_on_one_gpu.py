"""Programs of two and four ranks on the GPUs here, one of which will do: right, late, stopped, many launches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chorus import alone, sing, voices
from two_on_one import Share, open_shares

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.source import open_source
from flywheel.errors import LaunchTimeoutError, NoGpuError, TensorError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge import bench
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.measure.outcome import Measured
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.report.traced import exchange_times
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.pack import pack_any

pytestmark = pytest.mark.gpu

SPEC = DecoderSpec("tiny", "llama", 128, 256, 2, 8, 4, 32, 520, 1e4, 1e-5, 256)
CONTEXT = 96
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tied_head": True}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
    "smollm3": {"turned": (True, False)},
}  # fmt: skip
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("attn_combine", "o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul"), ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIGS = {
    "plain": ScheduleConfig(page_allocation="none"),
    "by counters": ScheduleConfig({"attention": {"kv_block": 32}, "gemv": {"N_tile": 16}}, FUSED),
    "by data": ScheduleConfig(
        {"attention": {"kv_block": 32}, "hand_off": {"data": 1}}, FUSED, page_allocation="none"
    ),
}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 520,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
POSITIONS = (0, 1, 31, 32, 63, 95)
SHORT_S = 0.5
MANY, THOUSANDS = 300, 10_000
"""Launches of a test, and of its long version for each family."""


@pytest.fixture(scope="module")
def shares() -> list[Share]:
    """The GPUs here as four, of which the first two are on two where there are several."""
    try:
        prepare_torch()
        return open_shares(4)
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def punctual(shares: list[Share]) -> Iterator[None]:
    """No share is late or absent once a test is over."""
    yield
    for share in shares:
        share.late_s, share.absent = 0.0, False


def family(name: str) -> DecoderSpec:
    return replace(SPEC, family=name, **FAMILIES[name])


def program_of(
    shares: Sequence[Share], spec: DecoderSpec, dtype: DType, batch: int, config: str, sms: int = 12
) -> MegakernelProgram:
    alike = next(target for target in TARGETS.values() if target.sm_arch == shares[0].sm_arch)
    graph = shared_step(spec, CONTEXT, dtype, batch, ranks=len(shares))
    return lower(graph, CONFIGS[config], replace(alike, name="few", num_sms=sms))


def model_of(shares: Sequence[Share], spec: DecoderSpec, dtype: DType, batch: int, growing: bool = False) -> CudaModel:
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype], "cuda")
    granules = shares[0].granules() if growing else None
    return CudaModel(shares[0], spec, dtype, CONTEXT, weights, batch, granules, shares[1:])


@pytest.fixture(scope="module")
def session(shares: list[Share]) -> Iterator[CudaSession]:
    """Two ranks of a model with everything that a decoder can have."""
    two = shares[:2]
    program = program_of(two, family("qwen3"), DType.BF16, 1, "by data")
    with model_of(two, family("qwen3"), DType.BF16, 1) as model, model.load(program) as made:
        yield made


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "batch"), [(DType.BF16, 1), (DType.F32, 1), (DType.BF16, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_pass_the_verdict(name: str, dtype: DType, batch: int, config: str, shares: list[Share]) -> None:
    spec, two = family(name), shares[:2]
    program = program_of(two, spec, dtype, batch, config)
    with model_of(two, spec, dtype, batch) as model, model.load(program) as session:
        verdict = verify(session, model.weights, POSITIONS, seed=2)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_fill_the_gpu_together_pass_the_verdict(ranks: int, shares: list[Share]) -> None:
    spec, some = family("llama"), shares[:ranks]
    program = program_of(some, spec, DType.BF16, 1, "by data", shares[0].num_sms // ranks)
    with model_of(some, spec, DType.BF16, 1) as model, model.load(program) as session:
        verdict = verify(session, model.weights, POSITIONS, seed=2)
        assert verdict.passed, verdict.reason
        latency = session.time(3, CONTEXT - 1, samples=5, warmup=1)
    assert latency.batch_us is not None and 1.0 < latency.median_us < 1e5


def logits_of(session: CudaSession, launches: int) -> list[torch.Tensor]:
    """Of steps from position 0 on, again and again, each of the token that the one before chose."""
    session.caches.clear()
    token, found = 3, list[torch.Tensor]()
    for number in range(launches):
        step = session.step(token, number % CONTEXT)
        found.append(step.logits.clone())
        token = step.token
    return found


def test_hundreds_of_launches_whose_ranks_come_late_make_the_same_bits(
    session: CudaSession, shares: list[Share]
) -> None:
    wanted = logits_of(session, MANY)
    assert len({tuple(each[:8].tolist()) for each in wanted}) > CONTEXT // 2
    for share in shares:
        share.late_s = 0.004
    for number, (got, want) in enumerate(zip(logits_of(session, MANY), wanted, strict=True)):
        assert torch.equal(got, want), number


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_thousands_of_launches_whose_ranks_come_late_make_the_same_bits(name: str, shares: list[Share]) -> None:
    two, spec = shares[:2], family(name)
    program = program_of(two, spec, DType.BF16, 1, "by data")
    with model_of(two, spec, DType.BF16, 1) as model, model.load(program) as session:
        wanted = logits_of(session, CONTEXT)
        for share in two:
            share.late_s = 0.001
        for turn in range(-(-THOUSANDS // CONTEXT)):
            for number, (got, want) in enumerate(zip(logits_of(session, CONTEXT), wanted, strict=True)):
                assert torch.equal(got, want), (turn, number)


def test_launches_that_are_queued_ahead_and_late_make_the_tokens_of_steps(
    session: CudaSession, shares: list[Share]
) -> None:
    prompt = (3, 79, 0, 3, 41)
    session.caches.clear()
    token, wanted = prompt[0], list[int]()
    for position in range(CONTEXT):
        token = session.step(prompt[position] if position < len(prompt) else token, position).token
        if position >= len(prompt) - 1:
            wanted.append(token)
    for share in shares:
        share.late_s = 0.002
    for _ in range(3):
        session.caches.clear()
        assert list(session.stream(prompt, CONTEXT)) == wanted


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_begin_stops_all_and_the_session_is_usable(
    missing: int, session: CudaSession, shares: list[Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_limit_s", SHORT_S)
    before = session.step(3, 0).logits.clone()
    for _ in range(2):
        shares[missing].absent = True
        with pytest.raises(LaunchTimeoutError, match=f"rank {missing} had not begun"):
            session.step(3, 0)
        shares[missing].absent = False
        assert [share.abort_flag.value for share in shares] == [0] * len(shares)
        assert torch.equal(session.step(3, 0).logits, before)


def test_a_stream_whose_launches_are_stopped_ends_and_the_session_is_usable(
    session: CudaSession, shares: list[Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_limit_s", SHORT_S)
    wanted = list(session.stream((3, 79), 20))
    stream = session.stream((3, 79), 60)
    assert next(stream) == wanted[0]
    shares[1].absent = True
    with pytest.raises(LaunchTimeoutError, match="rank 1 had not begun"):
        list(stream)
    shares[1].absent = False
    assert list(session.stream((3, 79), 20)) == wanted


def test_a_token_beyond_the_vocabulary_is_named_with_its_rank(session: CudaSession) -> None:
    before = session.step(3, 0).logits.clone()
    session.loaded.write_input("token_id", np.array([SPEC.vocab], np.int32))
    session.loaded.launch(0)
    with pytest.raises(TensorError, match=rf"^rank 0: .*id {SPEC.vocab} is no row of its table$"):
        session.loaded.sync(5.0)
    assert torch.equal(session.step(3, 0).logits, before)


def test_sequences_over_caches_of_two_gpus_that_grow_are_what_each_is_alone(shares: list[Share]) -> None:
    two, spec, batch = shares[:2], family("llama"), 3
    program = program_of(two, spec, DType.BF16, batch, "by data")
    every = voices(3 * batch, spec.vocab, CONTEXT, 7)
    with model_of(two, spec, DType.BF16, batch, growing=True) as model, model.load(program) as session:
        for share in two:
            share.late_s = 0.001
        sequences = session.sequences()
        together = sing(sequences, every)
        sequences.close()
        assert session.caches.held_bytes > 0
        for number in range(0, len(every), 4):
            assert together[number] == alone(session.sequences, every[number], number % batch)
    assert len({tuple(heard) for heard in together}) > batch


def test_a_trace_has_the_tasks_of_all_ranks_and_what_their_exchanges_cost(shares: list[Share]) -> None:
    two, spec = shares[:2], family("llama")
    program = program_of(two, spec, DType.BF16, 1, "by data")
    with model_of(two, spec, DType.BF16, 1) as model, model.load(program, trace=True) as session:
        assert verify(session, model.weights, POSITIONS, seed=2).passed
        latency_us, trace = session.trace(3, CONTEXT - 1, warmup=1)
    assert trace.sms == 2 * 12 and {traced.sm // 12 for traced in trace.tasks} == {0, 1}
    assert 0.0 < trace.span_us < latency_us
    found = exchange_times(trace)
    assert {each.operation for each in found} >= {"attn_sum", "mlp_sum"}
    assert all(0.0 < each.median_us < trace.span_us for each in found)


def test_a_bench_measures_and_compares_programs_of_two_ranks(
    shares: list[Share], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = shares[:2]
    monkeypatch.setattr(bench, "open_gpus", lambda count: two[:count])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    source = open_source(str(tmp_path))
    first, second = (program_of(two, source.spec, DType.BF16, 1, config) for config in ("by data", "by counters"))
    made = bench.CudaBench(source, DType.BF16, CONTEXT, ranks=2)
    assert isinstance(made.measure(first), Measured)
    for rounds in (1, 2):
        contest = made.compare(pack_any(second), (first,), rounds)
        assert [type(each) for each in (contest.outcome, *contest.rivals)] == [Measured] * 2
