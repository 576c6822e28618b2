from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Page,
    PageAllocation,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.ir.recipe import Recipe, recipe_from_dict

_K, _B = InstructionKind, BufferKind
_BF16 = DType.BF16


def _recipe() -> Recipe:
    shape = {"out_shape": [1, 16], "out_dtype": "BF16"}
    return recipe_from_dict({
        "steps": [
            {"op": "GEMV_TILE", "args": [{"in": 0}, {"in": 1}], "out": 0, "params": {"K": 32}, **shape},
            {"op": "COPY", "args": [{"in": 2}], "out": 1, "params": {}, **shape},
            {"op": "ADD", "args": [{"s": 0}, {"s": 1}], "out": "final", "params": {}, **shape},
        ]
    })  # fmt: skip


def _buffers() -> list[Buffer]:
    weight, act, cache = _B.WEIGHT, _B.ACTIVATION, _B.KV_CACHE
    scratch = MemSpace.GLOBAL_SCRATCH
    return [
        Buffer(10, "ids", _B.IO_INPUT, DType.I32, (1,)),
        Buffer(11, "table", weight, _BF16, (64, 32), source="embed.weight"),
        Buffer(12, "x", act, _BF16, (1, 32), scratch),
        Buffer(13, "norm.w", weight, _BF16, (32,), source="norm.weight"),
        Buffer(14, "h", act, _BF16, (1, 32), scratch),
        Buffer(15, "q.w", weight, _BF16, (32, 32), source="q.weight"),
        Buffer(16, "q", act, _BF16, (1, 32), scratch),
        Buffer(17, "k.w", weight, _BF16, (16, 32), source="k.weight"),
        Buffer(18, "k", act, _BF16, (1, 16), scratch),
        Buffer(19, "k_cache", cache, _BF16, (8, 1, 16)),
        Buffer(20, "v_cache", cache, _BF16, (8, 1, 16)),
        Buffer(21, "attn", act, _BF16, (1, 32), scratch),
        Buffer(22, "o.w", weight, _BF16, (32, 32), source="o.weight"),
        Buffer(23, "y", act, _BF16, (1, 32), scratch),
        Buffer(24, "logits", _B.IO_OUTPUT, DType.F32, (1, 64)),
        Buffer(25, "head.w", weight, _BF16, (64, 32), source="head.weight"),
        Buffer(26, "next", _B.IO_OUTPUT, DType.I32, (1,)),
    ]


def _tasks() -> list[Task]:
    attention = {"head_dim": 16, "n_heads": 2, "n_kv_heads": 1, "scale": 0.25, "kv_start": 0, "kv_len": 8}
    recipe = _recipe()

    def gemv(start: int, width: int) -> dict[str, int]:
        return {"K": 32, "N_tile": width, "n_off": start}

    def fused(start: int) -> dict[str, Any]:
        return {"N_tile": 16, "n_off": start, "recipe": recipe}

    return [
        Task(100, _K.EMBED, (10, 11), (12,), 50, (), {"hidden": 32}, 0, 64, 0, "embed"),
        Task(101, _K.RMSNORM, (12, 13), (14,), 51, (Wait(50, 1),), {"eps": 1e-5, "hidden": 32}, 0, label="norm"),
        Task(102, _K.GEMV_TILE, (14, 15), (16,), 52, (Wait(51, 1),), gemv(0, 16), 0, label="q"),
        Task(103, _K.GEMV_TILE, (14, 15), (16,), 52, (Wait(51, 1),), gemv(16, 16), 1, label="q"),
        Task(104, _K.GEMV_TILE, (14, 17), (18,), 53, (Wait(51, 1),), gemv(0, 16), 2, label="k"),
        Task(105, _K.KV_APPEND, (18, 19), (19,), 54, (Wait(53, 1),), {"pos": 7}, 1, label="k_append"),
        Task(106, _K.KV_APPEND, (18, 20), (20,), 55, (Wait(53, 1),), {"pos": 7}, 2, label="v_append"),
        Task(
            107, _K.ATTENTION_TILE, (16, 19, 20), (21,), 56, (Wait(52, 2), Wait(54, 1), Wait(55, 1)), attention, 0,
            label="attention",
        ),
        Task(108, _K.FUSED, (21, 22, 12), (23,), 57, (Wait(56, 1),), fused(0), 0, label="o"),
        Task(109, _K.FUSED, (21, 22, 12), (23,), 57, (Wait(56, 1),), fused(16), 1, label="o"),
        Task(110, _K.GEMV_TILE, (23, 25), (24,), 58, (Wait(57, 2),), gemv(0, 32), 0, label="head"),
        Task(111, _K.GEMV_TILE, (23, 25), (24,), 58, (Wait(57, 2),), gemv(32, 32), 1, label="head"),
        Task(112, _K.SAMPLE_ARGMAX, (24,), (26,), 59, (Wait(58, 2),), {}, 0, label="sample"),
    ]  # fmt: skip


@pytest.fixture(scope="session")
def tiny() -> MegakernelProgram:
    """A decode step of one layer without a finding, even a strict one; ids are not list positions."""
    return MegakernelProgram(
        meta={"model": "tiny", "gpu": "h100"},
        target=TARGETS["h100"],
        buffers=_buffers(),
        counters=[Counter(number) for number in range(50, 60)],
        tasks=_tasks(),
        pages=PageAllocation({14: 0, 21: 0, 23: 1}, [Page(number, MemSpace.GLOBAL_SCRATCH, 64) for number in range(2)]),
        config=ScheduleConfig(),
    )


@pytest.fixture(scope="session")
def with_task() -> Callable[..., MegakernelProgram]:
    """with_task(program, id, field=value, ...): the program with fields of one task replaced; `params` are merged."""

    def change(program: MegakernelProgram, number: int, **fields: Any) -> MegakernelProgram:
        def changed(task: Task) -> Task:
            merged = {**task.params, **fields["params"]} if fields.get("params") else task.params
            return replace(task, **{**fields, "params": merged})

        return replace(program, tasks=[changed(task) if task.id == number else task for task in program.tasks])

    return change


@pytest.fixture(scope="session")
def with_buffer() -> Callable[..., MegakernelProgram]:
    """with_buffer(program, id, field=value, ...): the program with fields of one buffer replaced."""

    def change(program: MegakernelProgram, number: int, **fields: Any) -> MegakernelProgram:
        buffers = [replace(buffer, **fields) if buffer.id == number else buffer for buffer in program.buffers]
        return replace(program, buffers=buffers)

    return change


@pytest.fixture
def spec_sample() -> dict[str, Any]:
    """The sample file of the format's specification, with what it elides filled in."""
    return {
        "ir_version": "0.5.0",
        "abi_version": "0.2",
        "meta": {"model": "toy", "gpu": "rtx5090-laptop"},
        "target": {
            "name": "rtx5090-laptop", "sm_arch": 120, "num_sms": 82, "smem_bytes_per_sm": 102400,
            "smem_bytes_per_block_optin": 101376, "regs_per_sm": 65536, "max_threads_per_sm": 1536,
            "max_regs_per_thread": 255, "l2_bytes": 67108864, "hbm_bytes": 24000000000, "hbm_bandwidth_gbs": 896.0,
            "fp16_tflops": 228.0, "clock_ghz": 2.16, "supports_cooperative": True, "wddm_tdr": True, "note": "",
        },
        "buffers": [
            {"id": 0, "name": "x", "kind": "IO_INPUT", "dtype": "F16", "shape": [1, 16], "space": "HBM",
             "source": None},
            {"id": 1, "name": "proj.w", "kind": "WEIGHT", "dtype": "F16", "shape": [16, 16], "space": "HBM",
             "source": "proj.weight"},
            {"id": 2, "name": "norm.w", "kind": "WEIGHT", "dtype": "F16", "shape": [16], "space": "HBM",
             "source": "norm.weight"},
            {"id": 3, "name": "h", "kind": "ACTIVATION", "dtype": "F16", "shape": [1, 16], "space": "SMEM",
             "source": None},
            {"id": 4, "name": "y", "kind": "ACTIVATION", "dtype": "F16", "shape": [1, 16], "space": "SMEM",
             "source": None},
        ],
        "counters": [{"id": 0, "init": 0, "note": "rmsnorm done"}, {"id": 1, "init": 0, "note": ""}],
        "tasks": [
            {"id": 0, "op": "RMSNORM", "inputs": [0, 2], "outputs": [3], "out_counter": 0, "waits": [],
             "params": {"eps": 1e-06, "hidden": 16}, "sm": None, "est_bytes": 0, "est_flops": 0, "label": "rmsnorm"},
            {"id": 1, "op": "GEMV_TILE", "inputs": [3, 1], "outputs": [4], "out_counter": 1,
             "waits": [{"counter": 0, "threshold": 1}], "params": {"K": 16, "N_tile": 16, "n_off": 0}, "sm": None,
             "label": "gemv"},
        ],
        "pages": {
            "buffer_to_page": {"3": 0, "4": 0},
            "pages": [{"id": 0, "space": "SMEM", "nbytes": 64, "live_start": 0, "live_end": 1}],
        },
        "config": {
            "tiling": {}, "fusion_grouping": [], "sm_assignment": "load_balance", "pipelining_depth": 2,
            "page_allocation": "graph_color", "threads_per_block": 256, "smem_bytes_per_block": 0,
        },
    }  # fmt: skip
