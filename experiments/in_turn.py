"""Times schedules, with kernels of several source trees, in turn, in one process on this machine's GPUs.

    python experiments/in_turn.py SCHEDULE.json[:KNOB=VALUE,...] ... [--kernels NAME=FOLDER ...] [--rounds 8]
        [--traced LAUNCHES] [--record FILE]

A KNOB is a place in a ScheduleConfig whose value is a number: stream.inflight_bytes=49152 in its `tiling`, or
threads_per_block. A FOLDER has the sources of a kernel, as flywheel/vm/cuda of another checkout; `here` stands for
this tree's, which is the default. This tree lowers and packs the programs, so a FOLDER with another abi.h is refused.
The kernel that is loaded first packs the weights for all of them; if another one needs another order, its verdict
fails.

Schedules of the same weights, context and batch share a model. A round loads each of them with every kernel, in an
order that turns, and launches all alternately. With --traced, it then traces so many launches of each, and tells what
the all-reduces of several GPUs cost. In the first round, all tensors are compared with the oracle's, and in every round
the logits of the last launch with those. Exits with 1 if a result is wrong.
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

from flywheel.decode.cuda import CudaModel, CudaSession, time_sessions
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import open_source
from flywheel.errors import ConfigError
from flywheel.ir import config_from_dict, config_to_dict, validate
from flywheel.judge.verdicts import Examined, Judge, default_positions, judge_repeated
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.verdict import Verdict
from flywheel.models.decoder import DTYPES
from flywheel.models.oracle import OracleWeights
from flywheel.plan.kernels import arch_name
from flywheel.report.traced import exchange_times
from flywheel.search.workload import gpus_of, make_workload
from flywheel.store.schedule import load_schedule
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import open_gpus
from flywheel.vm.gpu.nvrtc import compile_variant, nvrtc_version
from flywheel.vm.gpu.sources import SOURCES, source_digest
from flywheel.vm.pack import AnyPacked, PackedRanks, pack_any

SAMPLES, WARMUP = 20, 3

Which = tuple[str, str]
"""A step's name and a kernel's."""


@dataclass(frozen=True, slots=True)
class Step:
    """A schedule's program."""

    name: str
    shared: tuple[str, str, str, int, int, str]
    """What `make_workload` takes: model, GPU, type, context, batch and weights. Steps that share a model have it in
    common."""
    packed: AnyPacked


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured: medians of rounds in us of a step, medians of traced launches in us of an all-reduce, by
    operation, and a line for each result that is wrong."""

    times: dict[Which, list[float]]
    sums: dict[tuple[str, str, str], list[float]]
    wrong: list[str]


def main() -> int:
    """Measure, print, record."""
    arguments = parse()
    kernels = dict(map(read_kernels, arguments.kernels))
    started = monotonic()
    steps = sorted(map(read_step, arguments.schedules), key=lambda step: step.shared)
    if len(kernels) < len(arguments.kernels) or len({step.name for step in steps}) < len(steps):
        raise SystemExit("two kernels or two schedules of the same name")
    variants = (False, True) if arguments.traced else (False,)
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(compile_step, step, sources, trace)
            for step in steps for sources in kernels.values() for trace in variants
        ]  # fmt: skip
        for job in jobs:
            job.result()
    print(f"{monotonic() - started:.0f} s to lower, prove, pack and compile", file=sys.stderr, flush=True)
    found = Found({}, {}, [])
    for _, group in groupby(steps, key=lambda step: step.shared):
        measure(list(group), kernels, arguments.rounds, arguments.traced, found)
        print(f"{monotonic() - started:.0f} s with these weights", file=sys.stderr, flush=True)
    environment = capture_environment()
    said = [*arguments.schedules, "--kernels", *arguments.kernels, "--rounds", str(arguments.rounds)]
    lines = [
        f"$ python experiments/in_turn.py {' '.join(said)} --traced {arguments.traced}",
        f"{environment.gpu}, driver {environment.driver}, NVRTC {nvrtc_version()}; us of a step, median and range of "
        f"{arguments.rounds} rounds' medians, and the median over that of the first line of the same weights"
        + ("; behind it us of an all-reduce, median and range of the traced launches' medians" if found.sums else ""),
        f"packed by commit {arguments.commit or environment.commit or 'unknown'}; digests of the kernels' sources: "
        + ", ".join(f"{name} {source_digest(sources)[:16]}" for name, sources in kernels.items()),
        *table(steps, list(kernels), found),
        *found.wrong,
    ]
    print("\n".join(lines))
    if arguments.record is not None:
        arguments.record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if found.wrong else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="schedules and kernels beside each other")
    parser.add_argument("schedules", nargs="+", metavar="SCHEDULE.json[:KNOB=VALUE,...]")
    parser.add_argument("--kernels", nargs="+", default=["here"], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--traced", type=int, default=0, metavar="LAUNCHES")
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


def read_step(text: str) -> Step:
    """A schedule's program, perhaps with some knobs changed, proved and packed. Raises SystemExit for a change without
    a number, a schedule that cannot be lowered, and a program without a proof."""
    path, _, changes = text.partition(":")
    schedule = load_schedule(Path(path))
    config: dict[str, Any] = config_to_dict(schedule.config)
    for change in filter(None, changes.split(",")):
        knob, _, value = change.partition("=")
        group, _, name = knob.rpartition(".")
        if not value.isdigit() or not (group or knob == "threads_per_block"):
            raise SystemExit(f"{text}: {change} is not GROUP.KNOB=NUMBER or threads_per_block=NUMBER")
        place = config["tiling"].setdefault(group, {}) if group else config
        place[name] = int(value)
    shared = schedule.model, schedule.gpu, schedule.dtype, schedule.context, schedule.batch, schedule.weights
    workload = make_workload(*shared)
    try:
        program = lower(workload.graph, config_from_dict(config), workload.target)
    except ConfigError as error:
        raise SystemExit(f"{text}: {error}") from error
    result = validate(program, strict=True)
    if not result.ok:
        raise SystemExit(f"{text}: {result.errors[0]}")
    return Step(f"{Path(path).name.removesuffix('.json')} {changes}".strip(), shared, pack_any(program))


def compile_step(step: Step, sources: Path, trace: bool) -> None:
    """Compile the step's kernel into the cache."""
    packed = step.packed.parts[0] if isinstance(step.packed, PackedRanks) else step.packed
    variant = packed.variant
    compile_variant(
        arch_name(variant.sm_arch), variant.threads, DTYPES[step.shared[2]], matrix_warps=variant.matrix_warps,
        rows=variant.rows, formats=variant.formats, trace=trace, ranked=variant.ranked,
        features=variant.features, sources=sources,
    )  # fmt: skip


def measure(steps: Sequence[Step], kernels: Mapping[str, Path], rounds: int, traced: int, found: Found) -> None:
    """Add what steps that share a model take."""
    model, gpu, dtype, context, batch, _ = steps[0].shared
    formats = make_workload(*steps[0].shared).formats
    source = open_source(model)
    first, *peers = open_gpus(gpus_of(gpu)[0])
    weights = weights_for(source, DTYPES[dtype], 0, formats, [first, *peers])
    with CudaModel(first, source.spec, DTYPES[dtype], context, weights, batch, peers=peers) as loaded:
        oracle = OracleWeights(source.spec, loaded.weights, TORCH_DTYPES[DTYPES[dtype]], "cuda")
        judge = Judge(oracle, DTYPES[dtype], context, default_positions(context), batch)
        place = judge.tokens[-1].tolist(), judge.positions[-1]
        contestants = {(step.name, name): (step, sources) for step in steps for name, sources in kernels.items()}
        examined: dict[Which, Examined] = {}

        def note(which: Which, verdict: Verdict) -> None:
            if not verdict.passed:
                found.wrong.append(f"{', '.join(which)}, round {turn + 1}: {verdict.reason}")

        def load(stack: ExitStack, which: Which, trace: bool) -> CudaSession:
            step, sources = contestants[which]
            return stack.enter_context(loaded.load_packed(step.packed, trace=trace, sources=sources))

        for turn in range(rounds):
            start = turn % len(contestants)
            order = [*list(contestants)[start:], *list(contestants)[:start]]
            with ExitStack() as stack:
                sessions = {which: load(stack, which, False) for which in order}
                for which, session in sessions.items():
                    if turn == 0:
                        examined[which] = judge.examine(session)
                        note(which, examined[which].verdict)
                judge.prepare(sessions[order[0]], place[1])
                samples = time_sessions(list(sessions.values()), *place, samples=SAMPLES, warmup=WARMUP)
                for (which, session), its in zip(sessions.items(), samples, strict=True):
                    found.times.setdefault(which, []).append(median(its))
                    note(which, judge_repeated(session.read_rows(), examined[which].logits, place[1], session.dtype))
            for which in order if traced else ():
                with ExitStack() as stack:
                    note_sums(load(stack, which, True), which, place, traced, found)


def note_sums(session: CudaSession, which: Which, place: tuple[Any, Any], launches: int, found: Found) -> None:
    """Add what all-reduces take in traced launches at `place`, which is tokens and a position."""
    for _ in range(launches):
        for each in exchange_times(session.trace(*place, warmup=WARMUP)[1]):
            found.sums.setdefault((*which, each.operation), []).append(each.median_us)


def table(steps: Sequence[Step], kernels: Sequence[str], found: Found) -> list[str]:
    """A line a schedule and kernel, and behind it one for each of its all-reduces."""
    lines = [f"{'schedule':56} {'kernels':12} {'median':>9} {'least':>9} {'most':>9} {'ratio':>7}"]
    for _, group in groupby(steps, key=lambda step: step.shared):
        whiches = [(step.name, name) for step in group for name in kernels]
        first = median(found.times[whiches[0]])
        for which in whiches:
            its = found.times[which]
            lines.append(
                f"{which[0]:56} {which[1]:12} {median(its):9.1f} {min(its):9.1f} {max(its):9.1f} "
                f"{median(its) / first:7.4f}"
            )
            for (*own, operation), us in found.sums.items():
                if tuple(own) == which:
                    lines.append(f"  {operation:54} {'':12} {median(us):9.2f} {min(us):9.2f} {max(us):9.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
