"""Times decode steps of quantised weights and of bf16 weights, alternately, on this GPU.

    python experiments/coded_speed.py WORK ... [--rounds 5] [--gpu h200] [--context 512] [--record FILE]

A WORK is MODEL:WEIGHTS[:BATCH[:KNOB=VALUE,...]], such as llama3-8b:int4 or llama3.2-1b:int8:1:share=1,chunk=16384.
WEIGHTS is a value of `flywheel search --weights`, or bf16. The schedule is RECORDED's for that work, else the shipped
one, else the one that a search tries first, with the named knobs set. Works of one model, format and batch share their
weights and are sampled alternately. A round loads and measures all works. All tensors are first compared with the
oracle's. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from time import monotonic

from flywheel.decode.bench import CudaBench
from flywheel.decode.source import open_source
from flywheel.ir import DType, validate
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.outcome import Measured
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, make_workload
from flywheel.vm.gpu.nvrtc import arch_name, compile_variant, nvrtc_version
from flywheel.vm.pack import PackedProgram, pack

RECORDED: Mapping[tuple[str, str, int], Mapping[str, int]] = {
    ("llama3-8b", "int4", 1): {
        "depth": 2, "inflight": 98304, "copies": 2, "kv_block": 128, "rows.qkv": 64, "fuse.out": 1,
    },
    ("llama3-8b", "int8", 1): {
        "depth": 1, "chunk": 4096, "copies": 2, "kv_block": 128, "rows.qkv": 64, "fuse.out": 1,
    },
    ("llama3.2-1b", "int4", 1): {"chunk": 32768, "copies": 1, "share": 2, "kv_block": 128, "rows.o": 32},
    ("llama3.2-1b", "int8", 1): {"depth": 2, "chunk": 32768, "copies": 1, "share": 2, "kv_block": 128, "rows.o": 32},
}  # fmt: skip
"""What the best schedules changed from the first that a search tries. Source: results/archive/h200/quantised.txt."""


@dataclass(frozen=True, slots=True)
class Work:
    """One line of the table."""

    model: str
    weights: str
    batch: int
    knobs: tuple[tuple[str, str], ...]

    @property
    def shared(self) -> tuple[str, str, int]:
        """What works that share their weights have in common."""
        return self.model, self.weights, self.batch

    def workload(self, gpu: str, context: int) -> Workload:
        """Raises as `make_workload` does."""
        weights = None if self.weights == "bf16" else self.weights
        return make_workload(self.model, gpu, "bf16", context, self.batch, weights)


def parse_work(text: str) -> Work:
    """Raises SystemExit for what is none."""
    model, weights, batch, knobs = ([*text.split(":"), "", "", ""])[:4]
    if not weights or not (batch or "1").isdigit():
        raise SystemExit(f"{text}: not MODEL:WEIGHTS[:BATCH[:KNOB=VALUE,...]]")
    pairs = [knob.partition("=") for knob in knobs.split(",") if knob]
    return Work(model, weights, int(batch or 1), tuple((name, value) for name, _, value in pairs))


def packed_step(work: Work, gpu: str, context: int, arch: int) -> PackedProgram:
    """The work's program, proved and packed, its kernel compiled into the cache. Raises SystemExit for an unknown
    value of a knob."""
    workload = work.workload(gpu, context)
    space = make_space(workload)
    fit = find_shipped(workload) if work.shared not in RECORDED else None
    start = space.nearest(fit.config) if fit else space.known_good()[0]
    choice = {**start, **RECORDED.get(work.shared, {})}
    values = {dimension.name: dimension.values for dimension in space.dimensions}
    for name, text in work.knobs:
        value = next((each for each in values.get(name, ()) if str(each) == text), None)
        if value is None:
            raise SystemExit(f"{name}={text}: not one of {values.get(name, sorted(values))}")
        choice[name] = value
    program = lower(workload.graph, space.to_config(choice), workload.target)
    result = validate(program, strict=True)
    if not result.ok:
        raise SystemExit(f"{work}: {result.errors[0]}")
    packed = pack(program)
    variant = packed.variant
    compile_variant(
        arch_name(arch), variant.threads, DType.BF16, matrix_warps=variant.matrix_warps, rows=variant.rows,
        formats=variant.formats,
    )  # fmt: skip
    return packed


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="quantised steps beside plain ones, timed")
    parser.add_argument("works", nargs="+", metavar="WORK")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    works = sorted(map(parse_work, arguments.works), key=lambda work: work.shared)
    started = monotonic()
    arch = works[0].workload(arguments.gpu, arguments.context).target.sm_arch
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(packed_step, work, arguments.gpu, arguments.context, arch) for work in works]
        programs = {work: job.result() for work, job in zip(works, jobs, strict=True)}
    print(f"{monotonic() - started:.0f} s to lower, prove, pack and compile", file=sys.stderr, flush=True)
    groups = [list(group) for _, group in groupby(works, key=lambda work: work.shared)]
    times: dict[Work, list[float]] = {work: [] for work in works}
    errors: dict[Work, str] = {}
    benches = [make_bench(group[0], arguments.gpu, arguments.context) for group in groups]
    print(f"{monotonic() - started:.0f} s with weights and oracles", file=sys.stderr, flush=True)
    for turn in range(arguments.rounds):
        for bench, group in list(zip(benches, groups, strict=True))[:: -1 if turn % 2 else 1]:
            measure(bench, group, programs, times, errors)
        print(f"{monotonic() - started:.0f} s with round {turn + 1}", file=sys.stderr, flush=True)
    environment = capture_environment()
    lines = [
        f"{environment.gpu}, driver {environment.driver}, NVRTC {nvrtc_version()}, context {arguments.context}; "
        f"us of a step, median and range of {arguments.rounds} rounds' medians",
        f"{'work':64} {'config':12} {'median':>8} {'least':>8} {'most':>8} {'of floor':>8}  error",
        *(line(work, programs[work], times[work], errors[work]) for work in works),
    ]
    print("\n".join(lines))
    if arguments.record is not None:
        arguments.record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(times.values()) else 1


def make_bench(work: Work, gpu: str, context: int) -> CudaBench:
    """Random weights in the work's formats, and what judges programs of them."""
    formats = work.workload(gpu, context).formats
    return CudaBench(open_source(work.model), DType.BF16, context, batch=work.batch, formats=formats)


def measure(
    bench: CudaBench,
    group: list[Work],
    programs: Mapping[Work, PackedProgram],
    times: Mapping[Work, list[float]],
    errors: dict[Work, str],
) -> None:
    """Adds a median for each of works that share their weights, where all of them compute what they should."""
    first, *others = (programs[work] for work in group)
    contest = bench.compare(first, others, 2)
    outcomes = [contest.outcome, *contest.rivals] if contest.times_us else [contest.outcome] * len(group)
    for place, (work, outcome) in enumerate(zip(group, outcomes, strict=True)):
        if isinstance(outcome, Measured):
            errors.setdefault(work, f"{outcome.verdict.error:.4f}")
            times[work].append(median(us for samples in contest.times_us[place] for us in samples))
        else:
            errors[work] = str(outcome)


def line(work: Work, packed: PackedProgram, times: list[float], error: str) -> str:
    """A row of the table."""
    program = packed.program
    assert program.config is not None
    assert program.target is not None
    knobs = ",".join(f"{name}={value}" for name, value in work.knobs)
    name = f"{work.model} {work.weights} batch {work.batch} {knobs}"
    if not times:
        return f"{name:64} {program.config.config_id:12} {error}"
    floor = 100 * floor_us(weight_bytes_read(program), program.target) / median(times)
    return (
        f"{name:64} {program.config.config_id:12} {median(times):8.1f} {min(times):8.1f} {max(times):8.1f} "
        f"{floor:7.1f}%  {error}"
    )


if __name__ == "__main__":
    sys.exit(main())
