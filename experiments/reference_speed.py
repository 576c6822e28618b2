"""Times one token of llama3.2-1b (bf16, random weights) in the reference VM, lowered in several ways.

    python experiments/reference_speed.py [model [context [device]]]
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from flywheel.ir import TARGETS, BufferKind, ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.models.catalog import resolve_model
from flywheel.models.decoder import decode_step
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import BoundProgram, ReferenceVM

REPEATS = 5

FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"),
    ("k_rope", "k_append", "v_append"),
    ("q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"),
    ("final_norm", "lm_head"),
)

CONFIGS = {
    "no fusion, one tile an SM": ScheduleConfig(),
    "all fused, one tile an SM": ScheduleConfig(fusion_grouping=FUSED),
    "all fused, tiles of 32 rows": ScheduleConfig(tiling={"gemv": {"N_tile": 32}}, fusion_grouping=FUSED),
}


def main() -> None:
    """Print a table."""
    model = sys.argv[1] if len(sys.argv) > 1 else "llama3.2-1b"
    context = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    graph = decode_step(resolve_model(model), context)
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    print(f"{model} bf16, random weights, context {context}; torch {torch.__version__} on {_hardware(device)}.")
    print(f"Median of {REPEATS} tokens at the last position, after one to warm up, and the fastest of them.")
    print()
    print("| program | tasks | weights GB | prove s | bind s | s/token | fastest |")
    print("|---|---|---|---|---|---|---|")
    for name, config in CONFIGS.items():
        program = lower(graph, config, TARGETS["h200"])
        for buffer in program.buffers:
            if buffer.kind in (BufferKind.WEIGHT, BufferKind.KV_CACHE) and buffer.name not in tensors:
                empty = torch.empty(tuple(buffer.shape), dtype=TORCH_DTYPES[buffer.dtype], device=device)
                tensors[buffer.name] = empty.normal_(0, 0.02, generator=generator)
        start = time.perf_counter()
        machine = ReferenceVM(program, device)
        proved = time.perf_counter()
        bound = machine.bind(tensors)
        ready = time.perf_counter()
        last, token = torch.tensor([context - 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        inputs = {
            buffer.name: last if "position" in buffer.name else token
            for buffer in machine.buffers(BufferKind.IO_INPUT)
        }
        times = [_token(bound, inputs) for _ in range(REPEATS + 1)]
        stats = validate(program).stats
        print(
            f"| {name} | {len(program.tasks)} | {stats['weight_bytes'] / 1e9:.2f} | {proved - start:.2f} "
            f"| {ready - proved:.2f} | {statistics.median(times[1:]):.2f} | {min(times[1:]):.2f} |"
        )


def _hardware(device: str) -> str:
    if device == "cpu":
        return f"one of {os.cpu_count()} x86 cores"
    return torch.cuda.get_device_name(device)


def _token(bound: BoundProgram, inputs: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    result = bound.step(inputs)
    finite = bool(torch.isfinite(result["logits"]).all())
    elapsed = time.perf_counter() - start
    assert finite
    return elapsed


if __name__ == "__main__":
    main()
