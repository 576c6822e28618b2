"""Times the steps of a trial in CPU seconds: lowering, the proof, the program's id and its prediction.

Run `python experiments/lowering_speed.py` on an idle machine. For every config, lowering must take at most 0.1 s for
llama3-8b and 0.3 s for llama3-70b.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
from collections.abc import Callable, Iterator
from time import process_time
from typing import TypeVar

from flywheel.cost_model import predict
from flywheel.ir import ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.plan import program_id
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload

BARS_S = {"llama3-8b": 0.1, "llama3-70b": 0.3}
T = TypeVar("T")


def configs(space: Space, sample: int) -> Iterator[tuple[str, ScheduleConfig]]:
    """The default config, the known-good ones, and a seeded random sample of the space."""
    yield "default", ScheduleConfig()
    for choice in space.known_good():
        yield f"known-good, kv_block {choice['kv_block']}", space.to_config(choice)
    generator = random.Random(0)
    for number in range(sample):
        choice = {dimension.name: generator.choice(dimension.values) for dimension in space.dimensions}
        yield f"random {number}", space.to_config(choice)


def timed(step: Callable[[], T]) -> tuple[T, float]:
    """What a step gives, and its seconds of CPU time."""
    start = process_time()
    result = step()
    return result, process_time() - start


def measure(space: Space, config: ScheduleConfig, repeats: int) -> tuple[int, list[float]]:
    """Tasks of the program, and the median seconds of lower, validate(strict), program_id and predict."""
    work = space.workload
    rows = []
    for _ in range(repeats):
        program, lower_s = timed(lambda: lower(work.graph, config, work.target))
        result, validate_s = timed(lambda program=program: validate(program, strict=True))
        assert result.ok, result.report()
        _, identity_s = timed(lambda program=program: program_id(program))
        _, predict_s = timed(lambda program=program: predict(program))
        rows.append((lower_s, validate_s, identity_s, predict_s))
    return len(program.tasks), [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama3-8b,llama3-70b,llama3.2-1b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    medians = f"medians of {arguments.repeats} runs in ms of CPU time"
    print(f"Python {platform.python_version()}, {medians}, bf16, context 512")
    for model in arguments.models.split(","):
        workload = make_workload(model, arguments.gpu, "bf16", 512, any_size=True)
        space = make_space(workload)
        gc.collect()
        gc.freeze()
        gc.disable()  # as a search does while it evaluates
        print(f"\n{model} on {arguments.gpu}")
        print(f"{'config':<28}{'tasks':>8}{'lower':>9}{'validate':>10}{'id':>8}{'predict':>10}{'sum':>9}")
        sampled = []
        slowest_s = 0.0
        for name, config in configs(space, arguments.sample):
            tasks, seconds = measure(space, config, arguments.repeats)
            slowest_s = max(slowest_s, seconds[0])
            if name.startswith("random"):
                sampled.append((tasks, seconds))
            else:
                show(name, tasks, seconds)
        for name, pick in (("random sample, median", statistics.median), ("random sample, worst", max)):
            columns = zip(*[seconds for _, seconds in sampled], strict=True)
            show(name, round(pick([tasks for tasks, _ in sampled])), [pick(column) for column in columns])
        if model in BARS_S:
            verdict = "holds" if slowest_s <= BARS_S[model] else "is missed"
            print(f"bar: lowering within {1e3 * BARS_S[model]:.0f} ms {verdict}; slowest {1e3 * slowest_s:.1f} ms")


def show(name: str, tasks: int, seconds: list[float]) -> None:
    """Print one row, with the sum of its steps."""
    lower_ms, validate_ms, identity_ms, predict_ms = (1e3 * each for each in seconds)
    total_ms = lower_ms + validate_ms + identity_ms + predict_ms
    print(
        f"{name:<28}{tasks:>8}{lower_ms:>9.1f}{validate_ms:>10.1f}{identity_ms:>8.1f}{predict_ms:>10.1f}{total_ms:>9.1f}"
    )


if __name__ == "__main__":
    main()
