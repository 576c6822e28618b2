"""The CUDA VM against the eager oracle, token for token and logit for logit. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flywheel.decode.cuda import CudaModel
from flywheel.decode.generate import generate
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import TensorError
from flywheel.ir import TARGETS, DType, GpuTarget, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import make_judge, verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import EagerDecoder
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import make_request
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu

pytestmark = pytest.mark.gpu

CONTEXT = 96
SPECS = {
    spec.name: spec
    for spec in (
        DecoderSpec("all", "qwen3", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128, qkv_bias=True, qk_norm=True,
                    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
        DecoderSpec("gqa", "llama", 128, 224, 2, 8, 2, 16, 320, 5e5, 1e-5, 128),
        DecoderSpec("mha", "llama", 96, 160, 2, 6, 6, 16, 200, 1e4, 1e-5, 128),
        DecoderSpec("bias", "qwen2", 64, 96, 2, 4, 2, 16, 160, 1e4, 1e-5, 128, qkv_bias=True, tied_head=True),
        DecoderSpec("qk-norm", "qwen3", 256, 512, 2, 4, 2, 64, 500, 1e4, 1e-6, 128, qk_norm=True, tied_head=True),
        DecoderSpec("odd", "mistral", 72, 104, 2, 3, 1, 24, 301, 1e4, 1e-5, 128),
        DecoderSpec("wide-head", "llama", 128, 256, 1, 2, 1, 128, 257, 1e4, 1e-5, 128),
    )
}  # fmt: skip
CONFIGS = {
    "default": ScheduleConfig(),
    "fine": ScheduleConfig(tiling={"gemv": {"N_tile": 16}, "attention": {"kv_block": 16}}, sm_assignment="round_robin"),
    "coarse": ScheduleConfig(tiling={"gemv": {"N_tile": 64}, "attention": {"kv_block": 64}}, pipelining_depth=4),
}


@pytest.fixture(scope="module")
def target(gpu: Gpu) -> GpuTarget:
    """The architecture of the GPU here, but of six SMs."""
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    return replace(alike, name="few", num_sms=6)


class Models:
    """One model on the GPU for each (spec, dtype), and its oracle, there too."""

    def __init__(self, gpu: Gpu, target: GpuTarget) -> None:
        self._gpu, self._target = gpu, target
        self._made: dict[tuple[str, DType], tuple[CudaModel, EagerDecoder]] = {}

    def of(self, name: str, dtype: DType) -> tuple[CudaModel, EagerDecoder]:
        if (name, dtype) not in self._made:
            spec = SPECS[name]
            weights = random_weights(spec, 1, TORCH_DTYPES[dtype], "cuda")
            oracle = EagerDecoder(spec, weights, TORCH_DTYPES[dtype], CONTEXT, "cuda")
            self._made[name, dtype] = CudaModel(self._gpu, spec, dtype, CONTEXT, weights), oracle
        return self._made[name, dtype]

    def program(self, name: str, dtype: DType, config: str = "default") -> MegakernelProgram:
        return lower(decode_step(SPECS[name], CONTEXT, dtype), CONFIGS[config], self._target)


@pytest.fixture(scope="module")
def models(gpu: Gpu, target: GpuTarget) -> Iterator[Models]:
    """`models.of(spec name, dtype)`, `models.program(spec name, dtype, config name)`."""
    made = Models(gpu, target)
    yield made
    for model, _ in made._made.values():
        model.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SPECS)
def test_generation_is_the_oracles_token_for_token(name: str, config: str, models: Models) -> None:
    model, oracle = models.of(name, DType.F32)
    request = make_request([3, 79, 0, 3, 41], 40, frozenset(), SPECS[name], CONTEXT)
    with model.load(models.program(name, DType.F32, config)) as session:
        model.clear()
        generation = generate(session, request, oracle)
    assert generation.ties == ()
    assert len(generation.token_ids) == 40


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SPECS)
def test_logits_pass_at_every_kind_of_position(name: str, config: str, dtype: DType, models: Models) -> None:
    model, _ = models.of(name, dtype)
    with model.load(models.program(name, dtype, config)) as session:
        verdict = verify(session, model.weights, (0, 1, 2, 7, 15, 16, 17, 48, 63, 64, 95), seed=2)
    assert verdict.passed, verdict.reason


BATCH_CONFIGS = {
    **CONFIGS,
    "fused": ScheduleConfig(
        tiling={"attention": {"kv_block": 32}},
        fusion_grouping=[
            ["attn_norm", "q_proj", "k_proj", "v_proj"], ["q_norm", "q_rope", "attention"],
            ["k_norm", "k_rope", "k_append", "v_append"], ["attn_combine", "o_proj", "attn_add"],
            ["mlp_norm", "gate_proj", "up_proj", "silu_mul"], ["down_proj", "mlp_add"], ["final_norm", "lm_head"],
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("config", BATCH_CONFIGS)
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_every_row_of_a_batch_passes(
    batch: int, config: str, dtype: DType, gpu: Gpu, target: GpuTarget, models: Models
) -> None:
    alone, _ = models.of("all", dtype)
    program = lower(decode_step(SPECS["all"], CONTEXT, dtype, batch), BATCH_CONFIGS[config], target)
    with (
        CudaModel(gpu, SPECS["all"], dtype, CONTEXT, alone.weights, batch) as model,
        model.load(program) as session,
    ):
        verdict = verify(session, model.weights, (0, 1, 7, 16, 48, 95), seed=2)
        assert verdict.passed, verdict.reason
        with pytest.raises(TensorError, match=f"the model on the GPU has {batch} times"):
            model.load(models.program("all", dtype))
        latency = session.time([0] * batch, 95, samples=2, warmup=1)
    assert latency.median_us > 0


def test_a_step_is_the_reference_vms(models: Models) -> None:
    program = models.program("all", DType.F32)
    model, _ = models.of("all", DType.F32)
    reference = ReferenceSession(program, SPECS["all"], random_weights(SPECS["all"], 1, torch.float32))
    with model.load(program) as session:
        model.clear()
        for position, token in enumerate((3, 79, 0, 3, 41)):
            got, wanted = session.step(token, position), reference.step(token, position)
            torch.testing.assert_close(got.logits.cpu(), wanted.logits, atol=1e-4, rtol=0.0)
            assert got.token == wanted.token


@pytest.mark.usefixtures("gpu")
def test_random_weights_are_the_same_on_every_device() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here, there = random_weights(SPECS["all"], 3, dtype), random_weights(SPECS["all"], 3, dtype, "cuda")
        assert {tensor.device.type for tensor in there.values()} == {"cuda"}
        assert all(torch.equal(here[key], there[key].cpu()) for key in here)


def test_another_schedule_of_a_model_moves_no_weights(
    models: Models, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a matrix is packed again")

    model, _ = models.of("gqa", DType.BF16)
    model.load(models.program("gqa", DType.BF16)).close()
    monkeypatch.setattr("flywheel.vm.gpu.weights.ResidentWeights._run", refuse)
    before = gpu.uploaded_bytes
    with model.load(models.program("gqa", DType.BF16, "fine")) as session:
        tables = gpu.uploaded_bytes - before
        assert verify(session, model.weights, (1, 40)).passed
    assert 0 < tables < sum(tensor.nbytes for tensor in model.weights.values())


def test_positions_advance_without_another_upload_of_the_program(models: Models, gpu: Gpu) -> None:
    model, _ = models.of("gqa", DType.BF16)
    with model.load(models.program("gqa", DType.BF16)) as session:
        model.clear()
        session.step(5, 0)
        before = gpu.uploaded_bytes
        for position in range(1, 20):
            session.step(5, position)
        assert gpu.uploaded_bytes - before == 19 * 2 * 4  # token_id and position


def test_two_programs_of_a_model_take_turns(models: Models) -> None:
    model, oracle = models.of("mha", DType.F32)
    tokens = torch.randint(0, 200, (15,), generator=torch.Generator().manual_seed(4)).tolist()
    oracle.reset()
    oracle.prefill(tokens[:12])
    programs = [models.program("mha", DType.F32, config) for config in ("default", "fine")]
    with model.load(programs[0]) as one, model.load(programs[1]) as other:
        one.write_cache(oracle.read_cache())
        for position, session in ((12, one), (13, other), (14, one)):
            step, logits = session.step(tokens[position], position), oracle.step(tokens[position], position)
            torch.testing.assert_close(step.logits.cpu(), logits.cpu(), atol=1e-4, rtol=0.0)


def test_the_same_launch_gives_the_same_bits(models: Models) -> None:
    model, _ = models.of("gqa", DType.BF16)
    with model.load(models.program("gqa", DType.BF16)) as session:
        judge = make_judge(session, model.weights, (60,), seed=1)
        tokens = judge.prepare(session, 60)
        first = session.step_rows(tokens, 60)[0].logits.clone()
        assert all(torch.equal(session.step_rows(tokens, 60)[0].logits, first) for _ in range(50))


def test_a_latency_of_a_launch_is_positive_and_in_order(models: Models) -> None:
    model, _ = models.of("gqa", DType.BF16)
    with model.load(models.program("gqa", DType.BF16)) as session:
        make_judge(session, model.weights, (60,), seed=1).prepare(session, 60)
        latency = session.time(3, 60, samples=30, warmup=3)
    assert 0 < latency.p10_us <= latency.median_us <= latency.p90_us < 1e5
    assert (latency.samples, latency.l2_state) == (30, "clean")
