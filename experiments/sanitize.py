"""Runs launches of small decode steps under compute-sanitizer, and records its findings.

    python experiments/sanitize.py [--commit COMMIT] [--record FILE] [tool ...]
    python experiments/sanitize.py launch|launch-every-thread

The tools are memcheck (accesses out of bounds) and racecheck (races in shared memory) by default. `launch` does only
the launches, which the sanitizer wraps. One model is unfused, fused with its KV range split, fused in one block, and
fused with attention to the past beside the append. Another has weights of int4, int8 and fp8, and its tasks hand on
data without counters. racecheck wraps kernels in which every thread arrives and waits itself (FW_EVERY_THREAD), since
it follows no order that passes through a third thread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flywheel.ir import TARGETS, BufferKind, GpuTarget, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.driver import Gpu, load_variant, open_gpu
from flywheel.vm.gpu.loader import LoadedProgram, ResidentWeights
from flywheel.vm.gpu.nvrtc import compile_variant
from flywheel.vm.gpu.weights import put_weights
from flywheel.vm.pack import pack

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "gpu" / "sanitizer.txt"
TOOLS = ("memcheck", "racecheck")
SPEC = DecoderSpec("tiny", "qwen3", 128, 192, 2, 4, 2, 64, 300, 1e4, 1e-6, 128, qkv_bias=True, qk_norm=True)
CODED_SPEC = DecoderSpec("tiny", "qwen3", 256, 384, 2, 4, 2, 64, 300, 1e4, 1e-6, 128, qk_norm=True)
CONTEXT = 96
SMS = 4
LIMIT_S = 600.0
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""What numpy takes instead."""

ONE_BLOCK = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"),
    ("q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention"),
    ("o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"),
    ("final_norm", "lm_head"),
)
SPLIT = (
    ONE_BLOCK[0],
    ("k_norm", "k_rope", "k_append", "v_append"),
    ("q_norm", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"),
    *ONE_BLOCK[3:],
)
CONFIGS = {
    "unfused": ScheduleConfig(threads_per_block=192),
    "fused, split": ScheduleConfig(
        tiling={"attention": {"kv_block": 32}, "stream": {"chunk_bytes": 4096}},
        fusion_grouping=SPLIT, threads_per_block=320,
    ),
    "fused, one block": ScheduleConfig(fusion_grouping=ONE_BLOCK, threads_per_block=512),
    "fused, the past beside the new row": ScheduleConfig(
        tiling={"attention": {"kv_block": 32}, "warps": {"matrix": 4, "chunk": 2}},
        fusion_grouping=ONE_BLOCK, threads_per_block=448,
    ),
}  # fmt: skip
BY_DATA = ScheduleConfig(
    tiling={"attention": {"kv_block": 32}, "stream": {"chunk_bytes": 4096}, "hand_off": {"data": 1}},
    fusion_grouping=SPLIT, page_allocation="none", threads_per_block=320,
)
LAUNCHES = {
    **{name: (SPEC, "bf16", config) for name, config in CONFIGS.items()},
    **{f"{text}, by data": (CODED_SPEC, text, BY_DATA) for text in ("int4", "int4-zeros", "int8", "fp8-block")},
}
"""Models, their weights and their configs by what people call them."""

EVERY_THREAD = "launch-every-thread"


def main() -> int:
    """Run the tools, record, print."""
    parser = argparse.ArgumentParser(description="the kernel under compute-sanitizer")
    parser.add_argument("--commit", help="commit of the source, where it is no checkout")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("tools", nargs="*", default=TOOLS, help="tools of compute-sanitizer, or the launches")
    arguments = parser.parse_args()
    if list(arguments.tools) in (["launch"], [EVERY_THREAD]):
        launch_all(every_thread=arguments.tools == [EVERY_THREAD])
        return 0
    sanitizer = find_sanitizer()
    environment = capture_environment()
    lines = [
        f"source as of commit {arguments.commit or environment.commit or 'unknown'}",
        f"{environment.gpu}, driver {environment.driver}; launches: {', '.join(LAUNCHES)}",
        version_of(sanitizer),
    ]
    code = 0
    for tool in arguments.tools:
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        launches = EVERY_THREAD if tool == "racecheck" else "launch"
        done = subprocess.run(
            [sanitizer, *options, sys.executable, __file__, launches],
            cwd=ROOT, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(done.stdout)
        launched = sum(line.startswith("launched ") for line in done.stdout.splitlines())
        found = [line.removeprefix("========= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
        lines += ["", f"compute-sanitizer {' '.join(options)} python experiments/sanitize.py {launches}"]
        lines += [f"{launched} of {len(LAUNCHES)} launches ended, exit code {done.returncode}", *found]
        code = code or done.returncode or int(launched != len(LAUNCHES) or not found)
    text = "\n".join([*lines, ""])
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(text, encoding="utf-8")
    print(text)
    return code


def find_sanitizer() -> str:
    """compute-sanitizer, on the path or in the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(toolkit))
    if found is None:
        sys.exit("compute-sanitizer is neither on the path nor in CUDA_HOME")
    return found


def version_of(sanitizer: str) -> str:
    """Its own words."""
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    return next((line for line in done.stdout.splitlines() if "ersion" in line), "compute-sanitizer of unknown version")


def launch_all(every_thread: bool) -> None:
    """One launch of each at the last position, behind a random past."""
    gpu = open_gpu()
    target = replace(
        TARGETS["h100"], name="few", num_sms=SMS, sm_arch=gpu.sm_arch, smem_bytes_per_block_optin=gpu.smem_optin_bytes,
    )  # fmt: skip
    for name, (spec, text, config) in LAUNCHES.items():
        launch(gpu, target, spec, text, config, every_thread)
        print(f"launched {name}", flush=True)


def launch(
    gpu: Gpu, target: GpuTarget, spec: DecoderSpec, text: str, config: ScheduleConfig, every_thread: bool
) -> None:
    """Lower, load and launch once; the logits must be numbers."""
    dtype, formats = DTYPES["bf16"], parse_formats(text, "bf16")
    program = lower(decode_step(spec, CONTEXT, dtype, formats=formats), config, target)
    packed = pack(program)
    kernel = load_variant(gpu, compile_variant(
        arch_name(gpu.sm_arch), packed.variant.threads, packed.dtype, matrix_warps=packed.variant.matrix_warps,
        rows=packed.variant.rows, every_thread=every_thread, formats=packed.variant.formats,
    ))
    tensors = bind(program, random_quantised(spec, 0, formats, dtype))
    random = np.random.default_rng(0)
    caches = {}
    for buffer in program.buffers:
        if buffer.kind is BufferKind.KV_CACHE:
            caches[buffer.name] = memory = gpu.alloc(buffer.nbytes)
            past = random.standard_normal(tuple(buffer.shape)).astype(np.float32)
            gpu.upload(memory, (past.view(np.uint32) >> 16).astype(np.uint16))
    with ResidentWeights(gpu, packed.dtype) as weights:
        put_weights(packed, weights, lambda buffer: bits(tensors[buffer.name]))
        addresses = {name: memory.address for name, memory in caches.items()}
        with LoadedProgram(gpu, packed, kernel, weights, addresses) as loaded:
            loaded.poison()
            loaded.write_input("token_id", np.array([7], np.int32))
            loaded.write_input("position", np.array([CONTEXT - 1], np.int32))
            loaded.launch()
            loaded.sync(LIMIT_S)
            assert np.isfinite(loaded.read_output("logits")).all()
    for memory in caches.values():
        gpu.free(memory)


def bits(tensor: Tensor) -> Any:
    """A tensor's bits as numpy holds them."""
    whole = tensor.contiguous()
    return whole.view(_BITS.get(whole.dtype, whole.dtype)).numpy()


if __name__ == "__main__":
    sys.exit(main())
