from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from weakref import ReferenceType, ref

import pytest
import torch
from effort import LONG, sample
from ranks_at_work import Case, die_in_company, fail_alone, refuse_in_company, step_each

from flywheel.errors import ConfigError, FlywheelError, NoGpuError, UsageError, WorkerDiedError
from flywheel.ir import DType
from flywheel.models.rope import Rope, RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import WeightsOnRequest, checkpoint_tensors, random_weights
from flywheel.rivals.rank_processes import run_ranks
from flywheel.rivals.tensor_parallel import shard_of
from flywheel.rivals.torch_decoder import fuse

LIMIT_S = 300.0
LLAMA = DecoderSpec("llama", "llama", 64, 96, 2, 4, 2, 16, 120, 1e4, 1e-5, 128)
SPECS = (
    LLAMA,
    dataclasses.replace(LLAMA, name="scaled", tied_head=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    dataclasses.replace(LLAMA, name="mistral", family="mistral", n_kv_heads=4, vocab=128, window=7),
    dataclasses.replace(LLAMA, name="qwen2", family="qwen2", qkv_bias=True, o_bias=True, mlp_bias=True),
    dataclasses.replace(LLAMA, name="qwen3", family="qwen3", head_dim=32, qk_norm=True, tied_head=True),
    dataclasses.replace(LLAMA, name="phi3", family="phi3", rotary_dim=8, n_kv_heads=4),
    dataclasses.replace(
        LLAMA, name="gemma2", family="gemma2", n_kv_heads=4, tied_head=True, norms="around", norm_offset=1.0,
        activation="gelu_tanh", embed_scale=8.0, embed_scale_rounds=True, attention_scale=0.2, attention_cap=2.0,
        logits_cap=2.0, window=7, windowed=(True, False), local_rope=Rope(1e2),
    ),
    dataclasses.replace(
        LLAMA, name="granite", family="granite", n_kv_heads=4, embed_scale=6.0, residual_scale=0.22,
        attention_scale=0.1, logits_scale=0.125, o_bias=True, mlp_bias=True,
    ),
    dataclasses.replace(
        LLAMA, name="starcoder2", family="starcoder2", n_kv_heads=4, norm="layer", norm_bias=True, gated=False,
        activation="gelu_tanh", qkv_bias=True, o_bias=True, mlp_bias=True,
    ),
    dataclasses.replace(
        LLAMA, name="cohere2", family="cohere2", n_kv_heads=4, norm="layer", norms="shared", logits_scale=0.5, window=9,
        windowed=(True, False), nope_full=True,
    ),
)
CASES = [
    pytest.param(2, [Case(spec, DType.BF16, batch=3) for spec in sample(SPECS, 2)], id="2"),
    pytest.param(2, [Case(SPECS[3], compiled=True)], id="2-compiled", marks=LONG),
    pytest.param(4, [Case(spec) for spec in SPECS], id="4", marks=LONG),
]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in multiprocessing.active_children() if each.name.startswith("flywheel-rank")] == []


@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_ranks_together_make_the_oracles_logits_and_all_the_same(ranks: int, cases: list[Case]) -> None:
    by_rank = run_ranks("tiny", step_each, ranks, "gloo", LIMIT_S, ranks, cases)
    for case, made in zip(cases, zip(*by_rank, strict=True), strict=True):
        for each in made:
            assert each.verdict.passed, (case, each.verdict.reason)
            assert not each.alone.passed, case
        assert len({each.digest for each in made}) == 1, case


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_all_ranks_are_the_whole_model(spec: DecoderSpec, ranks: int) -> None:
    weights = random_weights(spec, 3, torch.float32)
    shards = [shard_of(spec, rank, ranks) for rank in range(ranks)]
    kept = [dict(shard.of(weights)) for shard in shards]
    for shard, own in zip(shards, kept, strict=True):
        shapes = checkpoint_tensors(shard.spec)
        most = max(stop - first for first, stop in shard.rows)
        assert {key: tuple(each.shape) for key, each in own.items()} == {
            **shapes, "lm_head.weight": (most, spec.hidden)
        }  # fmt: skip
    rows = [own["lm_head.weight"][: stop - first] for own, (first, stop) in zip(kept, shards[0].rows, strict=True)]
    head = weights["model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"]
    assert torch.equal(torch.cat(rows), head)
    for name, axis in (("self_attn.q_proj", 0), ("mlp.up_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        key = f"model.layers.1.{name}.weight"
        assert torch.equal(torch.cat([own[key] for own in kept], axis), weights[key])


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_a_whole_matrix_is_there_only_while_its_part_is_made(spec: DecoderSpec) -> None:
    weights, shard = random_weights(spec, 3, torch.float32), shard_of(spec, 1, 2)
    made: list[tuple[str, ReferenceType[torch.Tensor]]] = []

    def make(key: str) -> torch.Tensor:
        assert [before for before, whole in made if before in shard.parts and whole() is not None] == []
        made.append((key, ref(tensor := weights[key].clone())))
        return tensor

    fused = fuse(shard.spec, shard.of(WeightsOnRequest(weights, make)))
    asked = Counter(key for key, _ in made)
    twice = ["model.embed_tokens.weight"] if spec.tied_head else []
    if spec.norms == "shared":
        twice += [f"model.layers.{layer}.input_layernorm.weight" for layer in range(spec.n_layers)]
    assert asked == Counter([*weights, *twice])
    for each in (each for block in (*fused.layers, fused.epilogue) for each in block if each.matrix is not None):
        assert isinstance(each.matrix, torch.Tensor)
        assert each.matrix.untyped_storage().nbytes() == each.matrix.nbytes, "a part holds the whole"


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_heads=4 is not a multiple of 8 ranks"):
        shard_of(LLAMA, 0, 8)


@pytest.mark.parametrize(
    ("work", "guilty", "error", "line"),
    [
        (die_in_company, 1, WorkerDiedError, r"tiny: rank 1 of 2: its process died: signal 9 \(SIGKILL\)"),
        pytest.param(refuse_in_company, 0, UsageError, "rank 0 refuses", marks=LONG),
        pytest.param(fail_alone, 1, WorkerDiedError, "tiny: rank 1 of 2: a product failed", marks=LONG),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_one_line(
    work: Callable[..., None], guilty: int, error: type[FlywheelError], line: str
) -> None:
    with pytest.raises(error, match=f"^{line}$"):
        run_ranks("tiny", work, 2, "gloo", LIMIT_S, guilty)


def test_ranks_that_do_not_answer_in_time_are_killed() -> None:
    with pytest.raises(WorkerDiedError, match=r"^tiny: 0 of 2 ranks answered within 0\.01 s; all were killed$"):
        run_ranks("tiny", fail_alone, 2, "gloo", 0.01, None)


def test_more_ranks_than_gpus_are_refused_before_any_starts() -> None:
    with pytest.raises(NoGpuError, match=r"^tiny: 1000 ranks need as many GPUs: torch finds \d+$"):
        run_ranks("tiny", fail_alone, 1000, "nccl", LIMIT_S, None)
