"""Times programs whose products add the shards of all GPUs beside the same programs whose sums are tasks, alternately.

    python experiments/products_add.py SCHEDULE.json ... [--rounds 8]

A schedule is an exported one of several GPUs, as those in results/gpu/h100. Each round loads all variants anew and in
another order, with ten samples each; every variant is judged first. The first variant stands there twice, so that the
difference of the two says what the noise is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np

from flywheel.cli.files import load_config
from flywheel.decode.source import open_source
from flywheel.ir import MegakernelProgram, validate
from flywheel.judge import bench as benches
from flywheel.judge.bench import CudaBench
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.outcome import Measured
from flywheel.search.workload import gpus_of, make_workload
from flywheel.vm.pack import AnyPacked, pack_any


def apart(program: MegakernelProgram) -> AnyPacked:
    """The program with a task for each sum."""

    with patch("flywheel.plan.program.adding_products", lambda *asked: np.zeros(len(asked[-1]), np.bool_)):
        return pack_any(program)


def compare(path: Path, rounds: int) -> None:
    """Measure and print one schedule."""
    schedule = load_config(str(path))
    assert schedule.model is not None and schedule.gpu is not None and schedule.dtype is not None
    context = schedule.context or 512
    work = make_workload(schedule.model, schedule.gpu, schedule.dtype, context, weights=schedule.weights)
    program = lower(work.graph, schedule.config, work.target)
    assert validate(program, strict=True).ok
    variants = {
        "products add": pack_any(program),
        "sums are tasks": apart(program),
        "products add, again": pack_any(program),
    }
    ranks, _ = gpus_of(schedule.gpu)
    first, *others = variants.values()
    bench = CudaBench(open_source(schedule.model), work.graph.dtype, context, formats=work.formats, ranks=ranks)
    with patch.object(benches, "is_settled", lambda times: False):
        contest = bench.compare(first, others, rounds)
    print(f"{path.name}, {rounds} rounds of ten samples")
    for name, outcome, times in zip(variants, [contest.outcome, *contest.rivals], contest.times_us, strict=True):
        if not isinstance(outcome, Measured):
            raise SystemExit(f"{name}: {outcome}")
        medians = [median(samples) for samples in times]
        print(
            f"  {name:20} {median(medians):8.1f} us, rounds {min(medians):.1f} to {max(medians):.1f}; "
            f"error {outcome.verdict.error:.4f}",
            flush=True,
        )


def main() -> None:
    """Compare all given schedules."""
    parser = argparse.ArgumentParser(description="products that add beside sums that are tasks")
    parser.add_argument("schedules", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    here = capture_environment()
    print(f"{here.gpu}, driver {here.driver}, NVRTC {here.nvrtc}")
    for path in arguments.schedules:
        compare(path, arguments.rounds)


if __name__ == "__main__":
    main()
