"""Times packing in CPU seconds: `python experiments/pack_speed.py`. The limit is 0.15 s for llama3-8b, and 0.2 s for
the two programs of two GPUs that share it (`--ranks 2`).

Each time is of a program that was just lowered, as in a search. "random" are configs of the space, drawn once.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
from contextlib import suppress
from time import process_time

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, make_workload
from flywheel.vm.pack import AnyPacked, PackedRanks, pack_any

BAR_S = {("llama3-8b", 1): 0.15, ("llama3-8b", 2): 0.2}
"""By model and number of GPUs."""

RANDOM = 15


def cost(workload: Workload, config: ScheduleConfig) -> tuple[float, AnyPacked]:
    """Seconds of CPU time, and the packed program. Raises as `lower` and `pack_any`."""
    program = lower(workload.graph, config, workload.target)
    gc.collect()
    start = process_time()
    packed = pack_any(program)
    return process_time() - start, packed


def random_costs(space: Space) -> list[float]:
    """Seconds of each of RANDOM configs that can be packed."""
    chance, found = random.Random(0), list[float]()
    while len(found) < RANDOM:
        choice = {each.name: chance.choice(each.values) for each in space.dimensions}
        with suppress(ConfigError, InvalidProgramError):
            found.append(cost(space.workload, space.to_config(choice))[0])
    return found


def sizes(packed: AnyPacked) -> tuple[int, int, int]:
    """The tasks of the program, and the steps and segments of all its GPUs."""
    parts = packed.parts if isinstance(packed, PackedRanks) else (packed,)
    return len(packed.program.tasks), sum(len(each.steps) for each in parts), sum(len(each.segments) for each in parts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama3.2-1b,llama3-8b,llama3-70b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share each model")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(
        f"Python {platform.python_version()}, CPU time, medians of {arguments.repeats} runs or {RANDOM} random "
        f"configs, {arguments.ranks} x {arguments.gpu}, bf16, context 512"
    )
    print(f"{'model':<14}{'config':<28}{'tasks':>8}{'steps':>8}{'segments':>10}{'pack ms':>9}")
    for model in arguments.models.split(","):
        workload = make_workload(model, arguments.gpu, "bf16", 512, any_size=True, ranks=arguments.ranks)
        space = make_space(workload)
        configs = {"default": ScheduleConfig()}
        configs |= {f"known-good, kv_block {c['kv_block']}": space.to_config(c) for c in space.known_good()}
        slowest_s = 0.0
        for name, config in configs.items():
            runs = [cost(workload, config) for _ in range(arguments.repeats)]
            took_s, packed = statistics.median(seconds for seconds, _ in runs), runs[0][1]
            slowest_s = max(slowest_s, took_s)
            tasks, steps, segments = sizes(packed)
            print(f"{model:<14}{name:<28}{tasks:>8}{steps:>8}{segments:>10}{1e3 * took_s:>9.1f}")
        print(f"{model:<14}{'random':<28}{'':>26}{1e3 * statistics.median(random_costs(space)):>9.1f}")
        bar_s = BAR_S.get((model, arguments.ranks))
        if bar_s is not None:
            verdict = "holds" if slowest_s <= bar_s else "is missed"
            print(f"bar: {model} within {1e3 * bar_s:.0f} ms {verdict}; slowest {1e3 * slowest_s:.1f} ms")


if __name__ == "__main__":
    main()
