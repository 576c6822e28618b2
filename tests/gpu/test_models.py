"""Lowered decode steps on the GPU: fused patterns, positions, contexts and configs of the whole space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from fusing import PATTERNS
from torch import Tensor

from flywheel.errors import ConfigError
from flywheel.ir import BufferKind, DType, GpuTarget, MegakernelProgram, ScheduleConfig
from flywheel.lowering.fusion import COMBINE, Pattern
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import FREE_RUNNING
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import DTYPES
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind, random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import ReferenceVM

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
Agree = Callable[..., None]

SMALL = DecoderSpec(
    "small", "qwen3", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128,
    qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip
ODD = DecoderSpec("odd", "qwen3", 96, 160, 2, 4, 2, 16, 300, 1e4, 1e-6, 4096, qk_norm=True)
ONE_HEAD = DecoderSpec("one head", "llama", 48, 80, 2, 3, 1, 10, 77, 1e4, 1e-5, 4096, tied_head=True)
LLAMA = replace(CATALOG["llama3.2-1b"], name="llama3.2-1b cut", n_layers=2, vocab=3000)
QWEN = replace(CATALOG["qwen3-0.6b"], name="qwen3-0.6b cut", n_layers=1, vocab=2001)
WINDOWS = replace(ODD, name="windows", family="ministral", qk_norm=False, window=77, windowed=(True, False))
MISTRAL = replace(CATALOG["mistral-7b-v0.1"], name="mistral cut", n_layers=2, n_heads=8, n_kv_heads=2, hidden=1024,
                  intermediate=2048, vocab=3000, window=300)  # fmt: skip
COMMAND = replace(CATALOG["command-r7b"], name="command-r7b cut", n_layers=2, vocab=3000, windowed=(True, False))
STARCODER = replace(CATALOG["starcoder2-3b"], name="starcoder2-3b cut", n_layers=2, vocab=3000)
PHI = replace(CATALOG["phi-3.5-mini"], name="phi-3.5-mini cut", n_layers=2)
GLM = replace(CATALOG["glm-4-9b-0414"], name="glm-4-9b cut", n_layers=1, vocab=3000)
GRANITE = replace(CATALOG["granite-3.3-2b"], name="granite-3.3-2b cut", n_layers=2, vocab=3000)
OLMO = replace(CATALOG["olmo3-7b"], name="olmo3-7b cut", n_layers=2, vocab=3000, window=300, windowed=(True, False))
GEMMA2 = replace(CATALOG["gemma2-2b"], name="gemma2-2b cut", n_layers=2, vocab=3000, window=300, windowed=(True, False))
GEMMA3 = replace(CATALOG["gemma3-4b"], name="gemma3-4b cut", n_layers=2, vocab=3000, window=300, windowed=(True, False))
GEMMA4 = replace(CATALOG["gemma4-12b"], name="gemma4-12b cut", n_layers=2, vocab=3000, window=300,
                 windowed=(True, False))  # fmt: skip
WORKLOADS = [
    (SMALL, 128), (ODD, 300), (ONE_HEAD, 72), (LLAMA, 512), (LLAMA, 4096), (QWEN, 1000), (ODD, 4096), (SMALL, 1),
    (COMMAND, 512), (STARCODER, 512), (WINDOWS, 300), (MISTRAL, 700), (MISTRAL, 8192),
    (PHI, 512), (GLM, 512), (GRANITE, 512), (OLMO, 700), (GEMMA2, 700), (GEMMA3, 700), (GEMMA4, 700),
]  # fmt: skip
N_CONFIGS = 3 * len(WORKLOADS)
MOST_DRAWS = 100
SEED = 20240607


def positions(context: int) -> list[int]:
    """The first two, the middle and the last."""
    return sorted({position for position in (0, 1, context // 2, context - 1) if position < context})


@cache
def weights_of(spec: DecoderSpec, dtype: DType, device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in random_weights(spec, 1, TORCH_DTYPES[dtype]).items()}


def tensors_at(
    program: MegakernelProgram, spec: DecoderSpec, dtype: DType, pos: int, context: int, device: str
) -> dict[str, Tensor]:
    """A decode step's tensors: caches hold random rows up to `pos` and NaN from there on."""
    generator = torch.Generator().manual_seed(pos)
    tensors = dict(bind(program, weights_of(spec, dtype, device)))
    for buffer in program.buffers:
        if buffer.kind is BufferKind.KV_CACHE:
            past = torch.full(tuple(buffer.shape), torch.nan)
            past[:pos] = torch.randn((pos, *buffer.shape[1:]), generator=generator)
            tensors[buffer.name] = past.to(TORCH_DTYPES[dtype]).to(device)
    token = int(torch.randint(spec.vocab, (1,), generator=generator))
    values = {"token_id": token, "position": pos}
    return tensors | {name: torch.tensor([value], dtype=torch.int32).to(device) for name, value in values.items()}


def check_steps(
    run: Run, check_agree: Agree, program: MegakernelProgram, spec: DecoderSpec, dtype: DType, context: int,
    device: str,
) -> None:
    """Logits within the verdict's tolerance of the reference VM's, the token their argmax, the caches to rounding."""
    reference = ReferenceVM(program, device)
    bound = FREE_RUNNING[dtype.name]
    for pos in positions(context):
        tensors = tensors_at(program, spec, dtype, pos, context, device)
        want, got = reference.run(tensors, pos=pos), run(program, tensors, pos)
        assert got.keys() == want.keys()
        check_agree(got["logits"], want["logits"], extra=bound)
        assert int(got["next_token"]) == int(got["logits"].argmax())
        for name in want.keys() - {"logits", "next_token"}:
            rows = [tensor[name].reshape(context, -1) for tensor in (got, want)]
            assert torch.equal(*(torch.cat((side[:pos], side[pos + 1 :])).nan_to_num() for side in rows)), name
            check_agree(rows[0][pos], rows[1][pos], extra=bound)


def variants() -> Iterator[tuple[str, Pattern, DType]]:
    for name, pattern in PATTERNS.items():
        for dtype in DTYPES.values():
            yield name, pattern, dtype


@pytest.mark.parametrize(("name", "pattern", "dtype"), list(variants()), ids=str)
@pytest.mark.parametrize("spec", [SMALL, LLAMA], ids=lambda spec: spec.name)
def test_every_pattern_and_its_parts(
    run: Run, check_agree: Agree, target: GpuTarget, device: str, name: str, pattern: Pattern, dtype: DType,
    spec: DecoderSpec,
) -> None:
    """The longest run of each pattern, and with nothing before and after."""
    workload = Workload(spec.name, spec, target, next(key for key, value in DTYPES.items() if value is dtype), 96)
    blocks = workload.graph.blocks
    present = {op.name for block in blocks for op in block.ops} | {COMBINE}
    whole = (*pattern.before, *pattern.anchors, *pattern.after)
    for names in {tuple(dict.fromkeys(whole)), pattern.anchors}:
        kept = tuple(each for each in names if each in present)
        for rows, kv_block in ((32, 32), (48, 32 if COMBINE in kept else 96)):
            tiling = {"gemv": {"N_tile": rows}, "attention": {"kv_block": kv_block}}
            config = ScheduleConfig(tiling=tiling, fusion_grouping=[kept], threads_per_block=192)
            check_steps(run, check_agree, lower(workload.graph, config, target), spec, dtype, 96, device)


@pytest.mark.parametrize("index", range(N_CONFIGS))
def test_configs_of_the_whole_space(
    run: Run, check_agree: Agree, target: GpuTarget, device: str, record_property: Callable[[str, object], None],
    index: int,
) -> None:
    random = Random(SEED + index)
    spec, context = WORKLOADS[index % len(WORKLOADS)]
    key = list(DTYPES)[index // len(WORKLOADS) % len(DTYPES)]
    workload = Workload(spec.name, spec, target, key, context)
    space = make_space(workload)
    for draw in range(MOST_DRAWS):
        config = space.to_config({dimension.name: random.choice(dimension.values) for dimension in space.dimensions})
        try:
            program = lower(workload.graph, config, target)
        except ConfigError:
            continue
        record_property("invalid_draws", draw)
        check_steps(run, check_agree, program, spec, DTYPES[key], context, device)
        return
    pytest.fail(f"no valid config in {MOST_DRAWS} draws")


@pytest.mark.parametrize("key", DTYPES)
def test_a_generated_sequence(run: Run, check_agree: Agree, target: GpuTarget, device: str, key: str) -> None:
    """Token after token, the caches of one launch being the next one's."""
    workload = Workload(LLAMA.name, LLAMA, target, key, 64)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[0]), target)
    dtype = DTYPES[key]
    bound = FREE_RUNNING[dtype.name]
    tensors = tensors_at(program, LLAMA, dtype, 0, 64, device)
    reference = ReferenceVM(program, device)
    for pos in range(10):
        tensors["position"] = torch.tensor([pos], dtype=torch.int32).to(device)
        want, got = reference.run(tensors, pos=pos), run(program, tensors, pos)
        check_agree(got["logits"], want["logits"], extra=bound)
        for name in want.keys() - {"logits", "next_token"}:
            tensors[name] = got[name].clone()
        tensors["token_id"] = got["next_token"].reshape(1)


@pytest.mark.parametrize("threads", [192, 320, 448, 512])
def test_launches_repeat_bit_for_bit(run: Run, target: GpuTarget, device: str, threads: int) -> None:
    workload = Workload(LLAMA.name, LLAMA, target, "bf16", 300)
    space = make_space(workload)
    config = replace(space.to_config(space.known_good()[1]), threads_per_block=threads)
    program = lower(workload.graph, config, target)
    tensors = tensors_at(program, LLAMA, DType.BF16, 299, 300, device)
    first = run(program, tensors, 299)["logits"]
    for _ in range(5):
        assert torch.equal(run(program, tensors, 299)["logits"], first)
