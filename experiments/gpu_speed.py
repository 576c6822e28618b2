"""Measures how much each knob changes the latency of one schedule, on this GPU.

    python experiments/gpu_speed.py CONFIG.json KNOB=VALUE[,VALUE...] ... [--model llama3.2-1b] [--gpu h200]
        [--context 512] [--batch 1]

A knob is one of the search's, or a size of `tiling` that no search varies, such as gemv.k_proj.N_tile. Each line
compares the schedule with one knob changed to the schedule itself: 30 launches of each, alternating, with an empty L2
cache, after all their tensors were compared with the eager oracle's. The first line compares the schedule with itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from flywheel.cli.files import load_config
from flywheel.decode.source import open_source
from flywheel.errors import ConfigError
from flywheel.ir import ScheduleConfig
from flywheel.judge.bench import CudaBench
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.measure.floor import floor_fraction, floor_us, weight_bytes_read
from flywheel.measure.outcome import Measured
from flywheel.models.decoder import DTYPES
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload
from flywheel.store.schedule import Schedule


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="one knob after the other around a schedule, timed")
    parser.add_argument("config")
    parser.add_argument("changes", nargs="*", metavar="KNOB=VALUE[,VALUE...]")
    parser.add_argument("--model", default="llama3.2-1b", help="where the config does not say")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    given = load_config(arguments.config)
    model = given.model if isinstance(given, Schedule) else arguments.model
    config = given.config if isinstance(given, Schedule) else given
    workload = make_workload(model, arguments.gpu, "bf16", arguments.context, arguments.batch)
    bench = CudaBench(open_source(model), DTYPES["bf16"], arguments.context, batch=arguments.batch)
    program = lower(workload.graph, config, workload.target)
    environment = capture_environment()
    print(f"{model}, context {arguments.context}, batch {arguments.batch}, config {config.config_id}")
    print(f"{environment.gpu}, driver {environment.driver}, NVRTC {environment.nvrtc}")
    rivals = [program]
    floor = floor_us(weight_bytes_read(program), workload.target)
    for name, changed in variants(make_space(workload), config, arguments.changes):
        try:
            contest = bench.compare(lower(workload.graph, changed, workload.target), rivals, 1)
        except ConfigError as error:
            print(f"  {name}: {error}", flush=True)
            continue
        outcome = contest.outcome
        if not isinstance(outcome, Measured):
            print(f"  {name}: {outcome}", flush=True)
            continue
        latency, ((own,), (base,)) = outcome.latency, contest.times_us
        reached = 100 * floor_fraction(floor, latency.median_us)
        ratios = sorted(one / other for one, other in zip(own, base, strict=True))
        print(
            f"  {name:24} {latency.median_us:8.1f} us (p10 {latency.p10_us:.1f}, p90 {latency.p90_us:.1f}; back to "
            f"back {latency.batch_us or 0.0:.1f}), {reached:.1f} % of the floor; "
            f"{median(ratios):.4f} of {median(base):.1f} (p10 {ratios[len(ratios) // 10]:.4f}, "
            f"p90 {ratios[-1 - len(ratios) // 10]:.4f}); error {outcome.verdict.error:.4f}",
            flush=True,
        )


def variants(space: Space, config: ScheduleConfig, changes: list[str]) -> Iterator[tuple[str, ScheduleConfig]]:
    """(name, config) of the schedule itself, then with each change; SystemExit for what is no value of a knob."""
    yield "itself", config
    choice = space.nearest(config)
    known = {dimension.name: dimension.values for dimension in space.dimensions}
    for change in changes:
        knob, _, values = change.partition("=")
        family, dot, size = knob.rpartition(".")
        for text in values.split(","):
            if dot and knob not in known and text.isdigit():
                sizes = {**config.tiling.get(family, {}), size: int(text)}
                yield f"{knob}={text}", replace(config, tiling={**config.tiling, family: sizes})
                continue
            value = next((each for each in known.get(knob, ()) if str(each) == text), None)
            if value is None:
                raise SystemExit(f"{knob}={text}: not one of {known.get(knob, sorted(known))}")
            yield f"{knob}={text}", space.to_config({**choice, knob: value})


if __name__ == "__main__":
    main()
