"""Measures a few schedules of a model on this GPU: where the CUDA VM stands without a search.

    python experiments/gpu_speed.py MODEL [MODEL ...] [--gpu h200] [--context 512]

Each line is one schedule: the known-good one of the space, with the block and the ring named. Logits are compared with
the eager oracle's before anything is timed; the latency is the median of 30 launches, L2 emptied before each.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from flywheel.decode.bench import CudaBench
from flywheel.decode.source import open_source
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.floor import floor_fraction, floor_us, weight_bytes_read
from flywheel.measure.outcome import Measured
from flywheel.models.decoder import DTYPES
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload

BLOCKS = ((320, 4), (448, 4), (448, 8), (512, 4))
"""(threads, matrix warps)"""

STREAMS = ((16384, 98304), (32768, 65536))
"""(bytes of a chunk, bytes in flight)"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="schedules of the CUDA VM, timed")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    environment = capture_environment()
    print(f"{environment.gpu}, driver {environment.driver}, commit {environment.commit}")
    for model in arguments.models:
        measure_model(model, arguments.gpu, arguments.context)


def measure_model(model: str, gpu: str, context: int) -> None:
    """One line a schedule."""
    workload = make_workload(model, gpu, "bf16", context)
    bench = CudaBench(open_source(model), DTYPES["bf16"], context)
    for threads, matrix in BLOCKS:
        for chunk, inflight in STREAMS:
            name = f"{model} threads {threads} matrix {matrix} chunk {chunk} inflight {inflight}"
            chosen = config(make_space(workload), threads, matrix, chunk, inflight)
            program = lower(workload.graph, chosen, workload.target)
            outcome = bench.measure(program)
            if not isinstance(outcome, Measured):
                print(f"{name}: {outcome}", flush=True)
                continue
            latency, floor = outcome.latency, floor_us(weight_bytes_read(program), workload.target)
            print(
                f"{name}: {latency.median_us:.1f} us (p10 {latency.p10_us:.1f}, p90 {latency.p90_us:.1f}), "
                f"{100 * floor_fraction(floor, latency.median_us):.1f} % of the floor of {floor:.1f} us; "
                f"logits within {outcome.verdict.max_rel_error:.4f}",
                flush=True,
            )


def config(space: Space, threads: int, matrix: int, chunk: int, inflight: int) -> ScheduleConfig:
    """The known-good config with two KV splits, in a block and with a ring of these sizes."""
    known = space.to_config(space.known_good()[1])
    tiling = {**known.tiling, "warps": {"matrix": matrix}}
    tiling["stream"] = {"chunk_bytes": chunk, "inflight_bytes": inflight}
    return replace(known, tiling=tiling, threads_per_block=threads)


if __name__ == "__main__":
    main()
