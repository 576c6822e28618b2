"""The kernel's own sources on a CPU: decode steps of a small model, in many orders of warps and copies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples, pairs, sample
from emulator.gpu import EmulatedGpu, build_variant
from emulator.translate import CALLS, translate

from flywheel.errors import GpuFaultError
from flywheel.ir import TARGETS, BufferKind, DType, KvRows, MegakernelProgram, ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind, random_weights
from flywheel.plan.kernels import arch_name
from flywheel.plan.step import ABSENT
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import Fault, InstructionFlag, SegmentFlag, StepFlag
from flywheel.vm.gpu.driver import load_variant
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.gpu.sources import SOURCES
from flywheel.vm.gpu.weights import ResidentWeights, needed_weights
from flywheel.vm.pack import pack
from flywheel.vm.reference import ReferenceVM

SPEC = DecoderSpec("small", "llama", 128, 96, 2, 2, 1, 64, 200, 1e4, 1e-6, 128)
CONTEXT, LAUNCHES, DTYPE, THREADS = 48, 4, DType.BF16, 192
TOLERANCE = 0.02

FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIGS = {
    "step by step": ScheduleConfig(threads_per_block=THREADS),
    "fused, by counters": ScheduleConfig(
        {"attention": {"kv_block": 16}, "gemv": {"N_tile": 48}}, FUSED, threads_per_block=THREADS
    ),
    "fused, by data": ScheduleConfig(
        {"attention": {"kv_block": 16}, "hand_off": {"data": 1},
         "stream": {"chunk_bytes": 4096, "inflight_bytes": 8192, "copies": 2}},
        FUSED, pipelining_depth=3, page_allocation="none", threads_per_block=THREADS, smem_bytes_per_block=81920,
    ),
    "fused, the past streamed": ScheduleConfig(
        {"attention": {"kv_block": 32}, "hand_off": {"data": 1}, "warps": {"matrix": 2, "chunk": 2},
         "stream": {"chunk_bytes": 4096, "inflight_bytes": 8192, "copies": 2, "past": 1}},
        FUSED, pipelining_depth=2, page_allocation="none", threads_per_block=THREADS, smem_bytes_per_block=81920,
    ),
    "step by step, by data": ScheduleConfig(
        {"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=THREADS
    ),
}  # fmt: skip

PROGRAMS: dict[tuple[DecoderSpec, int, str, int], MegakernelProgram] = {}
EXPECTED: dict[tuple[DecoderSpec, str, tuple[int, ...], int], list[tuple[torch.Tensor, list[int]]]] = {}


@pytest.fixture(params=[90, 80])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    monkeypatch.setattr("flywheel.vm.gpu.weights.compile_variant", build_variant)
    return EmulatedGpu(sm_arch=request.param)


def lowered(gpu: EmulatedGpu, config: ScheduleConfig, batch: int = 1) -> MegakernelProgram:
    target = replace(
        TARGETS["h100"], name="here", sm_arch=gpu.sm_arch, num_sms=gpu.num_sms,
        smem_bytes_per_block_optin=gpu.smem_optin_bytes,
    )  # fmt: skip
    key = SPEC, gpu.sm_arch, config.config_id, batch
    if key not in PROGRAMS:
        PROGRAMS[key] = lower(decode_step(SPEC, CONTEXT, DTYPE, batch), config, target)
    return PROGRAMS[key]


@cache
def weights_of(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    return random_weights(spec, 1, TORCH_DTYPES[DTYPE])


def load(
    gpu: EmulatedGpu, program: MegakernelProgram, weights: ResidentWeights, sources: Path = SOURCES, **tables: Any
) -> LoadedProgram:
    packed = replace(pack(program), **tables)
    tensors = bind(program, weights_of(SPEC))
    for name, buffer, layout in needed_weights(packed):
        weights.put(name, tensors[buffer.name].float().numpy(), buffer.shape, buffer.dtype, layout)
    caches = {each.name: gpu.alloc(each.nbytes) for each in program.buffers if each.kind is BufferKind.KV_CACHE}
    for name, rows in earlier_rows(program).items():
        gpu.upload(caches[name], rows.view(torch.int16).numpy())  # type: ignore[arg-type]
    variant = packed.variant
    kernel = build_variant(
        arch_name(gpu.sm_arch), variant.threads, DTYPE,
        matrix_warps=variant.matrix_warps, rows=variant.rows, features=variant.features, sources=sources,
    )
    loaded = LoadedProgram(
        gpu, packed, load_variant(gpu, kernel), weights, {name: cache.address for name, cache in caches.items()}  # type: ignore[arg-type]
    )
    loaded.poison()
    return loaded


def earlier_rows(program: MegakernelProgram) -> dict[str, torch.Tensor]:
    """What every KV cache holds before the first launch."""
    draw = torch.Generator().manual_seed(2)
    return {
        buffer.name: torch.randn(tuple(buffer.shape), generator=draw).to(TORCH_DTYPES[DTYPE])
        for buffer in program.buffers
        if buffer.kind is BufferKind.KV_CACHE
    }


def tokens(program: MegakernelProgram, first: list[int], start: int) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """(logits, a token a row) of one launch after another from position `start` on, as the reference VM has them."""
    tensors = dict(bind(program, weights_of(SPEC)))
    tensors |= earlier_rows(program)
    reference, token = ReferenceVM(program, "cpu"), first
    for pos in range(start, start + LAUNCHES):
        tensors["token_id"] = torch.tensor(token, dtype=torch.int32)
        tensors["position"] = torch.tensor([pos] * len(token), dtype=torch.int32)
        found = reference.run(tensors, pos=pos)
        tensors |= {name: tensor for name, tensor in found.items() if name in tensors}
        token = found["next_token"].flatten().tolist()
        yield found["logits"].float().flatten(), token


def expected(program: MegakernelProgram, first: list[int], start: int) -> list[tuple[torch.Tensor, list[int]]]:
    """`tokens`, found once for all architectures and orders of warps."""
    assert program.config is not None
    key = SPEC, program.config.config_id, tuple(first), start
    if key not in EXPECTED:
        EXPECTED[key] = list(tokens(program, first, start))
    return EXPECTED[key]


@pytest.mark.parametrize(("seed", "name"), sample(pairs(range(5), CONFIGS), 2))
def test_launch_after_launch_gives_the_reference_s_tokens(gpu: EmulatedGpu, seed: int, name: str) -> None:
    gpu.seed = seed
    check_launches(gpu, lowered(gpu, CONFIGS[name]), [5])


def test_a_launch_that_waits_for_ever_ends_when_the_host_says_so(gpu: EmulatedGpu) -> None:
    """And says what one of its tasks waited for: that control warps ask the host seldom must not keep them from asking.

    Which task tells is a matter of time: whatever waits for the one that cannot start may ask before it does.
    """
    program = lowered(gpu, CONFIGS["fused, by counters"])
    instructions = pack(program).instructions.copy()
    last = int(np.flatnonzero(instructions["n_waits"] > 0)[-1])
    instructions["wait_threshold"][last, 0] += 1000
    with ResidentWeights(gpu, DTYPE) as weights, load(gpu, program, weights, instructions=instructions) as loaded:  # type: ignore[arg-type]
        loaded.write_input("token_id", np.array([5], np.int32))
        loaded.write_input("position", np.array([0], np.int32))
        gpu.abort_flag.value = 1
        loaded.launch(0)
        report = loaded.read_report()
    assert report["fault"] == Fault.ABORTED and report["value"] < report["threshold"]
    (told,) = instructions[instructions["task"] == report["task"]]
    waits = zip(told["wait_counter"][: told["n_waits"]], told["wait_threshold"][: told["n_waits"]], strict=True)
    assert (report["counter"], report["threshold"]) in list(waits)


@pytest.mark.parametrize(("name", "start"), pairs(CONFIGS, [14, 30, 44]))
def test_windows_move_from_block_to_block(gpu: EmulatedGpu, name: str, start: int) -> None:
    """Blocks begin at rows 0, 16 and 32."""
    check_launches(gpu, lowered(gpu, CONFIGS[name]), [5], start)


@pytest.mark.parametrize("name", sample(CONFIGS, 2))
def test_a_batch_gives_the_reference_s_tokens_row_by_row(gpu: EmulatedGpu, name: str) -> None:
    check_launches(gpu, lowered(gpu, CONFIGS[name], 3), [5, 17, 0])


@pytest.mark.parametrize(
    ("head_dim", "name"), [*[(128, name) for name in CONFIGS], (96, "fused, by data"), (256, "fused, by data")]
)
def test_longer_heads_give_the_reference_s_tokens(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, head_dim: int, name: str
) -> None:
    """The attention kernel has code of its own for each of these."""
    monkeypatch.setitem(globals(), "SPEC", replace(SPEC, head_dim=head_dim, n_heads=4, n_kv_heads=2))
    check_launches(gpu, lowered(gpu, CONFIGS[name]), [5], 30)


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no warp has at once."""
    monkeypatch.setitem(globals(), "SPEC", replace(SPEC, hidden=576))


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize(
    ("gpu", "rows", "name"),
    [
        (arch, rows, name)
        for (rows, name), arch in sample(
            pairs(
                pairs(
                    [(1, THREADS), (2, THREADS), (3, THREADS), (8, THREADS), (8, 704)],
                    ["fused, by counters", "fused, by data"],
                ),
                [90, 80],
            )
        )
    ],
    indirect=["gpu"],
)
def test_norms_of_long_rows_leave_their_scales_to_products(
    gpu: EmulatedGpu, rows: tuple[int, int], name: str
) -> None:
    """`rows`: (batch, threads). Of many threads each has half of the rows at once."""
    batch, threads = rows
    tiling = {**CONFIGS[name].tiling, "warps": {"matrix": 2}}
    program = lowered(gpu, replace(CONFIGS[name], tiling=tiling, threads_per_block=threads), batch)
    assert (pack(program).steps["flags"] & StepFlag.LEAVES_SCALE).any()
    check_launches(gpu, program, [5, 17, 0, 1, 2, 3, 4, 6][:batch])


@pytest.fixture
def short_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """A staging area that eight rows of the MLP's activations outgrow: three slices, one at a time."""
    monkeypatch.setattr("flywheel.plan.staging.MAX_INPUT_ROWS_BYTES", 8 * 48 * 2)


def in_tiles(config: ScheduleConfig, rows: int) -> ScheduleConfig:
    return replace(config, tiling={**config.tiling, "gemv": {"N_tile": rows}})


def first_slices(program: MegakernelProgram, tile: int) -> np.ndarray:
    """The segments with the first of at least three slices; of tiles of one row block with all of them."""
    segments = pack(program).segments
    following = np.roll(segments["flags"], -1)
    middle = SegmentFlag.CONTINUES | SegmentFlag.GOES_ON
    apart = (segments["flags"] & middle == SegmentFlag.GOES_ON) & (following & middle == middle)
    together = (segments["slice_chunks"] > 0) & (segments["row_chunks"] >= 3 * segments["slice_chunks"])
    return np.asarray(together if tile == 16 else apart)


@pytest.mark.usefixtures("short_area")
@pytest.mark.parametrize(("name", "tile"), pairs(["fused, by counters", "fused, by data"], [48, 16]))
@pytest.mark.parametrize("seed", range(examples(3)))
def test_rows_in_slices_give_the_reference_s_tokens(gpu: EmulatedGpu, name: str, tile: int, seed: int) -> None:
    """A segment each, or of tiles of one row block all in one."""
    gpu.seed = seed
    program = lowered(gpu, in_tiles(CONFIGS[name], tile), 8)
    assert first_slices(program, tile).any()
    check_launches(gpu, program, [5, 17, 0, 1, 2, 3, 4, 6])


@pytest.mark.usefixtures("short_area")
@pytest.mark.parametrize("gpu", [90], indirect=True)
@pytest.mark.parametrize(("seed", "tile"), pairs(range(3, 28, 4), [48, 16]))
def test_a_launch_that_is_aborted_between_slices_ends(gpu: EmulatedGpu, seed: int, tile: int, tmp_path: Path) -> None:
    """The weights of a first slice never come, and control warps ask the host as soon as they have waited a little."""
    gpu.seed = seed
    sources = Path(shutil.copytree(SOURCES, tmp_path / "cuda"))
    sync = (sources / "sync.cuh").read_text()
    assert "HOST_PERIOD_NS = 5'000'000" in sync
    (sources / "sync.cuh").write_text(sync.replace("HOST_PERIOD_NS = 5'000'000", "HOST_PERIOD_NS = 0"))
    program = lowered(gpu, in_tiles(CONFIGS["fused, by counters"], tile), 8)
    segments = pack(program).segments.copy()
    segments["queue_index"][np.flatnonzero(first_slices(program, tile))[seed // 4 % 2]] = 1 << 20
    with ResidentWeights(gpu, DTYPE) as weights, load(gpu, program, weights, sources, segments=segments) as loaded:  # type: ignore[arg-type]
        loaded.write_input("token_id", np.arange(8, dtype=np.int32))
        loaded.write_input("position", np.zeros(8, np.int32))
        gpu.abort_flag.value = 1
        loaded.launch(0)
        assert loaded.read_report()["fault"] == Fault.ABORTED


@pytest.mark.parametrize("start", [14, 30, 44])
def test_streamed_rows_of_a_window_move_with_the_position(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    monkeypatch.setitem(globals(), "SPEC", replace(SPEC, window=20, windowed=(True, False)))
    check_launches(gpu, lowered(gpu, CONFIGS["fused, the past streamed"], 2), [5, 17], start)


@pytest.mark.parametrize("gpu", [90], indirect=True)
def test_a_row_is_appended_though_the_task_attends_to_none(gpu: EmulatedGpu) -> None:
    """Its window stays at the row for which the program was lowered, and is empty before."""
    made = lowered(gpu, replace(CONFIGS["fused, by data"], pipelining_depth=4))
    params = [{name: each for name, each in task.params.items() if name != "kv_rows"} for task in made.tasks]
    tasks = [
        replace(task, params=own) if task.params.get("kv_rows") == KvRows.NEW else task
        for task, own in zip(made.tasks, params, strict=True)
    ]
    program = replace(made, tasks=tuple(tasks))
    assert validate(program, strict=True).ok
    check_launches(gpu, program, [5], 14)


@pytest.mark.parametrize("gpu", [90], indirect=True)
def test_a_launch_that_is_aborted_before_its_streamed_rows_come_ends(gpu: EmulatedGpu, tmp_path: Path) -> None:
    """Whoever waits for them, or for what is behind them, sees it."""
    sources = Path(shutil.copytree(SOURCES, tmp_path / "cuda"))
    sync = (sources / "sync.cuh").read_text()
    (sources / "sync.cuh").write_text(sync.replace("HOST_PERIOD_NS = 5'000'000", "HOST_PERIOD_NS = 0"))
    program = lowered(gpu, CONFIGS["fused, the past streamed"])
    segments = pack(program).segments.copy()
    segments["queue_index"][np.flatnonzero(segments["flags"] & SegmentFlag.PAST)[0]] = 1 << 20
    with ResidentWeights(gpu, DTYPE) as weights, load(gpu, program, weights, sources, segments=segments) as loaded:  # type: ignore[arg-type]
        loaded.write_input("token_id", np.array([5], np.int32))
        loaded.write_input("position", np.array([40], np.int32))
        gpu.abort_flag.value = 1
        loaded.launch(40)
        assert loaded.read_report()["fault"] == Fault.ABORTED


def check_launches(gpu: EmulatedGpu, program: MegakernelProgram, token: list[int], start: int = 0) -> None:
    """Assert that launch after launch, from these tokens and position on, has the reference VM's logits and the token
    of the best of them."""
    with ResidentWeights(gpu, DTYPE) as weights, load(gpu, program, weights) as loaded:  # type: ignore[arg-type]
        for pos, (logits, following) in enumerate(expected(program, token, start), start):
            loaded.write_input("token_id", np.array(token, np.int32))
            loaded.write_input("position", np.full(len(token), pos, np.int32))
            loaded.launch(pos)
            loaded.sync(1.0)
            got = torch.from_numpy(loaded.read_output("logits")).flatten()
            assert float((got - logits).abs().max()) <= TOLERANCE * float(logits.abs().max()), pos
            best = got.reshape(len(token), -1).argmax(dim=1)
            assert loaded.read_output("next_token").flatten().tolist() == best.tolist()
            token = following


@pytest.mark.parametrize("gpu", [90], indirect=True)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_best_logit_of_a_row_is_kept_where_logits_are_made(gpu: EmulatedGpu, batch: int) -> None:
    flags = pack(lowered(gpu, CONFIGS["fused, by data"], batch)).instructions["flags"]
    assert [int((flags & flag != 0).sum()) for flag in (InstructionFlag.KEEPS_BEST, InstructionFlag.TAKES_BEST)] == [
        -(-SPEC.vocab // 64), batch,
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", [90], indirect=True)
def test_a_launch_that_waits_for_ever_is_stopped(gpu: EmulatedGpu) -> None:
    gpu.limit_s = 1.0
    program = lowered(gpu, CONFIGS["step by step"])
    instructions = pack(program).instructions.copy()
    instructions["out_counter"][instructions["out_counter"] != ABSENT] = ABSENT
    with (
        ResidentWeights(gpu, DTYPE) as weights,  # type: ignore[arg-type]
        load(gpu, program, weights, instructions=instructions) as loaded,
        pytest.raises(GpuFaultError, match="not over after 1 s"),
    ):
        loaded.launch(0)


def test_each_ptx_statement_of_the_sources_is_known_and_none_is_left() -> None:
    for arch in ("800", "900"):
        text = translate(SOURCES, "megakernel.cu", {
            "FW_THREADS": "192", "FW_MATRIX_WARPS": "2", "FW_DTYPE": "1", "__CUDA_ARCH__": arch,
        })  # fmt: skip
        assert text.count("asm volatile") == 0
    assert len(set(CALLS.values())) > 20
