"""Times schedules with kernels of several source trees, in turn, in one process on this GPU.

    python experiments/kernels_in_turn.py SCHEDULE.json ... --kernels NAME=FOLDER ... [--set KNOB=VALUE ...]
        [--rounds 8] [--record FILE]

A FOLDER has the sources of a kernel, as flywheel/vm/cuda of another checkout; `here` stands for this tree's. This tree
lowers and packs the programs, so a FOLDER with another abi.h is refused. The kernel that is loaded first packs the
weights for all of them; if another one needs another order, its verdict fails. --set changes all schedules: a value in
`tiling`, such as warps.matrix=8, or threads_per_block.

Schedules of the same weights, context and batch share a model. A round loads each of them with every kernel, in an
order that turns, and launches all alternately. In the first round, all tensors are compared with the oracle's, and in
every round the logits of the last launch with those. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from flywheel.decode.cuda import CudaModel, time_sessions
from flywheel.decode.judge import Examined, Judge
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import open_source
from flywheel.decode.verify import default_positions, judge_repeated
from flywheel.ir import config_from_dict, config_to_dict, validate
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.verdict import Verdict
from flywheel.models.decoder import DTYPES
from flywheel.models.eager import OracleWeights
from flywheel.search.workload import Workload, gpus_of, make_workload
from flywheel.store.schedule import load_schedule
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.nvrtc import arch_name, compile_variant, nvrtc_version
from flywheel.vm.gpu.peers import open_gpus
from flywheel.vm.gpu.sources import SOURCES, source_digest
from flywheel.vm.pack import AnyPacked, PackedRanks, pack_any

SAMPLES, WARMUP = 20, 3


@dataclass(frozen=True, slots=True)
class Step:
    """A schedule's program."""

    name: str
    shared: tuple[str, str, str, str, int, int]
    """Model, GPU, type, weights, context and batch: what steps that share a model have in common."""
    packed: AnyPacked


def workload_of(model: str, gpu: str, dtype: str, weights: str, context: int, batch: int) -> Workload:
    """What steps that share a model compute."""
    return make_workload(model, gpu, dtype, context, batch, weights)


def main() -> int:
    """Measure, print, record."""
    arguments = parse()
    kernels = dict(map(read_kernels, arguments.kernels))
    started = monotonic()
    steps = sorted((read_step(path, arguments.set) for path in arguments.schedules), key=lambda step: step.shared)
    if len(kernels) < len(arguments.kernels) or len({step.name for step in steps}) < len(steps):
        raise SystemExit("two kernels or two schedules of the same name")
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(compile_step, step, sources) for step in steps for sources in kernels.values()]
        for job in jobs:
            job.result()
    print(f"{monotonic() - started:.0f} s to lower, prove, pack and compile", file=sys.stderr, flush=True)
    times: dict[tuple[str, str], list[float]] = {}
    wrong: list[str] = []
    for _, group in groupby(steps, key=lambda step: step.shared):
        measure(list(group), kernels, arguments.rounds, times, wrong)
        print(f"{monotonic() - started:.0f} s with these weights", file=sys.stderr, flush=True)
    environment = capture_environment()
    said = [*map(str, arguments.schedules), "--kernels", *arguments.kernels, *(["--set"] if arguments.set else [])]
    lines = [
        f"$ python experiments/kernels_in_turn.py {' '.join([*said, *arguments.set])} --rounds {arguments.rounds}",
        f"{environment.gpu}, driver {environment.driver}, NVRTC {nvrtc_version()}; us of a step, median and range of "
        f"{arguments.rounds} rounds' medians, and the median over that of {next(iter(kernels))}",
        f"packed by commit {arguments.commit or environment.commit or 'unknown'}; digests of the kernels' sources: "
        + ", ".join(f"{name} {source_digest(sources)[:16]}" for name, sources in kernels.items()),
        *table([step.name for step in steps], list(kernels), times),
        *wrong,
    ]
    print("\n".join(lines))
    if arguments.record is not None:
        arguments.record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="kernels of several trees beside each other")
    parser.add_argument("schedules", type=Path, nargs="+", metavar="SCHEDULE.json")
    parser.add_argument("--kernels", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--set", nargs="+", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


def read_kernels(text: str) -> tuple[str, Path]:
    """(name, folder of sources). Raises SystemExit where there are none for this tree's tables."""
    name, _, folder = text.partition("=")
    sources = SOURCES if text == "here" else Path(folder).resolve()
    for needed in ("megakernel.cu", "abi.h"):
        if not (sources / needed).is_file():
            raise SystemExit(f"--kernels {text}: no {needed} in {sources}")
    if (sources / "abi.h").read_bytes() != (SOURCES / "abi.h").read_bytes():
        raise SystemExit(f"--kernels {text}: its abi.h differs from this tree's, which packs the programs")
    return name, sources


def read_step(path: Path, changes: Sequence[str]) -> Step:
    """A schedule's program with some knobs changed, proved and packed. Raises SystemExit for a change without a number,
    and for a program without a proof."""
    schedule = load_schedule(path)
    config: dict[str, Any] = config_to_dict(schedule.config)
    for change in changes:
        knob, _, value = change.partition("=")
        group, _, name = knob.rpartition(".")
        if not value.isdigit() or not (group or knob == "threads_per_block"):
            raise SystemExit(f"--set {change}: not GROUP.KNOB=NUMBER or threads_per_block=NUMBER")
        place = config["tiling"].setdefault(group, {}) if group else config
        place[name] = int(value)
    shared = schedule.model, schedule.gpu, schedule.dtype, schedule.weights, schedule.context, schedule.batch
    workload = workload_of(*shared)
    program = lower(workload.graph, config_from_dict(config), workload.target)
    result = validate(program, strict=True)
    if not result.ok:
        raise SystemExit(f"{path}: {result.errors[0]}")
    return Step(" ".join([path.name.removesuffix(".json"), *changes]), shared, pack_any(program))


def compile_step(step: Step, sources: Path) -> None:
    """Compile the step's kernel into the cache."""
    packed = step.packed.parts[0] if isinstance(step.packed, PackedRanks) else step.packed
    variant = packed.variant
    compile_variant(
        arch_name(variant.sm_arch), variant.threads, DTYPES[step.shared[2]], matrix_warps=variant.matrix_warps,
        rows=variant.rows, formats=variant.formats, ranked=variant.ranked, sources=sources,
    )  # fmt: skip


def measure(
    steps: Sequence[Step],
    kernels: Mapping[str, Path],
    rounds: int,
    times: dict[tuple[str, str], list[float]],
    wrong: list[str],
) -> None:
    """Add the medians of steps that share a model, and a line for each result that is wrong."""
    model, gpu, dtype, _, context, batch = steps[0].shared
    formats = workload_of(*steps[0].shared).formats
    source = open_source(model)
    first, *peers = open_gpus(gpus_of(gpu)[0])
    weights = weights_for(source, DTYPES[dtype], 0, formats, [first, *peers])
    with CudaModel(first, source.spec, DTYPES[dtype], context, weights, batch, peers=peers) as loaded:
        oracle = OracleWeights(source.spec, loaded.weights, TORCH_DTYPES[DTYPES[dtype]], "cuda")
        judge = Judge(oracle, DTYPES[dtype], context, default_positions(context), batch)
        place = judge.tokens[-1].tolist(), judge.positions[-1]
        contestants = [(step, name) for step in steps for name in kernels]
        examined: dict[tuple[str, str], Examined] = {}

        def note(which: tuple[str, str], verdict: Verdict) -> None:
            if not verdict.passed:
                wrong.append(f"{', '.join(which)}, round {turn + 1}: {verdict.reason}")

        for turn in range(rounds):
            order = contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]
            with ExitStack() as stack:
                sessions = [
                    stack.enter_context(loaded.load_packed(step.packed, sources=kernels[name])) for step, name in order
                ]
                names = [(step.name, name) for step, name in order]
                for which, session in zip(names, sessions, strict=True):
                    if turn == 0:
                        examined[which] = judge.examine(session)
                        note(which, examined[which].verdict)
                judge.prepare(sessions[0], place[1])
                found = time_sessions(sessions, *place, samples=SAMPLES, warmup=WARMUP)
                for which, session, samples in zip(names, sessions, found, strict=True):
                    times.setdefault(which, []).append(median(samples))
                    note(which, judge_repeated(session.read_rows(), examined[which].logits, place[1], session.dtype))


def table(steps: Sequence[str], kernels: Sequence[str], times: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """A line a schedule and kernel."""
    lines = [f"{'schedule':48} {'kernels':16} {'median':>9} {'least':>9} {'most':>9} {'ratio':>7}"]
    for step in steps:
        first = median(times[step, kernels[0]])
        for name in kernels:
            its = times[step, name]
            lines.append(
                f"{step:48} {name:16} {median(its):9.1f} {min(its):9.1f} {max(its):9.1f} {median(its) / first:7.4f}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
