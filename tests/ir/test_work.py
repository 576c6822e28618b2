from __future__ import annotations

from dataclasses import replace

import pytest
from mutants import RECIPES, SINGLES

from flywheel.ir import TARGETS, BufferKind, DType, InstructionKind, ScheduleConfig
from flywheel.ir.work import Work, works_of
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

_K = InstructionKind
F32 = 4


def of(op: str, place: int = 0) -> Work:
    found = [each for each in SINGLES if each.tasks[0].op.name == op]
    return works_of(found[place])[0]


def test_a_tile_reads_its_rows_of_the_matrix_and_writes_its_columns() -> None:
    assert of("GEMV_TILE") == Work(streamed=4 * 8 * F32, read=8 * F32, written=4 * F32, flops=2 * 4 * 8)
    with_bias = Work(streamed=(4 * 8 + 4) * F32, read=2 * 8 * F32, written=2 * 4 * F32, flops=2 * 2 * 4 * 8)
    assert of("GEMV_TILE", 1) == with_bias


def test_attention_reads_its_window_of_the_caches() -> None:
    # 5 of the 8 rows of two caches of 2 heads of 4 elements; 4 query heads.
    assert of("ATTENTION_TILE") == Work(streamed=2 * 5 * 2 * 4 * F32, read=16 * F32, written=16 * F32, flops=4 * 16 * 5)


def test_an_append_writes_its_rows_and_reads_no_cache() -> None:
    assert of("KV_APPEND") == Work(read=16 * F32, written=16 * F32)


def test_a_recipe_moves_no_bytes_between_its_steps() -> None:
    # RMSNORM of x [2, 8], whose weight is [8], times all of W [4, 8].
    assert works_of(RECIPES[1])[0] == Work(
        streamed=(8 + 4 * 8) * F32, read=16 * F32, written=8 * F32, flops=4 * 16 + 2 * 2 * 4 * 8
    )


def test_packed_integers_count_by_their_bits() -> None:
    assert of("DEQUANT") == Work(streamed=2 * 8 // 2 + 4 * F32, read=0, written=16 * F32, flops=2 * 16)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen2.5-7b", "qwen3-0.6b", "mistral-7b"])
def test_an_unfused_step_reads_every_matrix_once_and_multiplies_by_all_of_it(model: str, batch: int) -> None:
    spec = CATALOG[model]
    program = lower(decode_step(spec, 512, DType.BF16, batch), ScheduleConfig(), TARGETS["h100"])
    counted = works_of(program)
    products = [
        (task, work)
        for task, work in zip(program.tasks, counted, strict=True)
        if task.op in (_K.GEMV_TILE, _K.GEMM_TILE)
    ]
    table = next(buffer for buffer in program.buffers if buffer.name == "embed.w")
    read = {each for task, _ in products for each in task.inputs}
    weights = [each for each in program.buffers if each.id in read and each.kind is BufferKind.WEIGHT]
    assert sum(work.streamed for _, work in products) == sum(each.nbytes for each in weights)
    matrices = [each for each in weights if len(each.shape) == 2]
    assert sum(work.flops for _, work in products) == 2 * batch * sum(each.numel for each in matrices)
    embedding = next(w for task, w in zip(program.tasks, counted, strict=True) if task.op is _K.EMBED)
    assert embedding.streamed == batch * table.nbytes // table.shape[0]


@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen3-0.6b"])
def test_what_the_lowering_estimates_is_the_work_of_products_and_attention(model: str) -> None:
    spec, target = CATALOG[model], TARGETS["h100"]
    space = make_space(Workload(model, spec, target, "bf16", 512))
    for config in (ScheduleConfig(), space.to_config(space.known_good()[0])):
        program = lower(decode_step(spec, 512, DType.BF16), config, target)
        for task, work in zip(program.tasks, works_of(program), strict=True):
            if task.op in (_K.GEMV_TILE, _K.ATTENTION_TILE):
                assert task.est_flops == work.flops
            if task.est_bytes:
                # Beside the matrices and caches that it estimates, a task streams norms' weights and biases.
                assert task.est_bytes <= work.streamed <= 1.1 * task.est_bytes + 4 * spec.hidden


def test_params_that_nothing_reads_do_not_count() -> None:
    program = SINGLES[0]
    odd = replace(program, tasks=tuple(replace(task, params={**task.params, "foo": [1]}) for task in program.tasks))
    assert works_of(odd) == works_of(program)
