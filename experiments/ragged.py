"""Times a step of sequences at positions of their own, beside the step with all of them at the longest position.

    python experiments/ragged.py llama3-8b llama3.2-1b --context 4096

For each model, the schedule of `flywheel serve` decodes eight sequences: from 64 to 4000, all at 4000, one beside seven
free rows, all at 64. Single launches alternate, with an empty L2 cache before each. The result is medians, and their
ratios to all at 4000. The program is first judged against the oracle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.source import open_source
from flywheel.ir import ScheduleConfig
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.runtime.session import LAUNCH_LIMIT_S
from flywheel.search.knowledge.chosen import choose_schedule, settle_work
from flywheel.search.trials.device import gpu_of
from flywheel.vm.gpu.driver import open_gpu
from flywheel.vm.gpu.timing import time_contestants

FIRST, LAST, BATCH = 64, 4000, 8


def measure(name: str, context: int, samples: int, config: ScheduleConfig | None) -> None:
    """One model's lines."""
    source = open_source(name)
    workload = settle_work(source, None, gpu_of("cuda"), context=context, batch=BATCH)
    chosen = choose_schedule(workload)
    program = lower(workload.graph, config or chosen.config, workload.target)
    weights = source.weights(workload.graph.dtype, 0, "cuda")
    with (
        CudaModel(open_gpu(), source.spec, workload.graph.dtype, context, weights, BATCH) as model,
        model.load(program) as session,
    ):
        verdict = verify(session, model.weights, (FIRST, context // 2, LAST - 1, LAST))
        print(f"{name}, {BATCH} sequences, context {context}, {chosen.words if config is None else 'as given'}")
        print(f"  verdict: {'pass' if verdict.passed else 'FAIL'}, error {verdict.error:.2e} of {verdict.bound:.2e}")
        spread = [FIRST + (LAST - FIRST) * row // (BATCH - 1) for row in range(BATCH)]
        cases = {
            f"in lock-step at {LAST}": [LAST] * BATCH,
            f"from {FIRST} to {LAST}": spread,
            f"one at {LAST}, {BATCH - 1} free": [LAST] + [0] * (BATCH - 1),
            f"in lock-step at {FIRST}": [FIRST] * BATCH,
        }
        times = time_in_turns(session, list(cases.values()), samples)
        first = median(times[0])
        for each, found in zip(cases, times, strict=True):
            print(f"  {each}: {median(found):.1f} us, {median(found) / first:.3f} of the first")


def time_in_turns(session: CudaSession, cases: list[list[int]], samples: int) -> list[list[float]]:
    """Samples of launches at some positions, in turn."""
    import torch

    session._prepare([1] * BATCH, cases[0])
    loaded = session.loaded
    places = [torch.tensor(case, dtype=torch.int32, device="cuda") for case in cases]
    torch.cuda.synchronize()

    def launcher(place: torch.Tensor) -> Callable[[], None]:
        return lambda: loaded.launch(LAST, place.data_ptr())

    return time_contestants(
        loaded.gpu, [launcher(place) for place in places], partial(loaded.sync, LAUNCH_LIMIT_S),
        samples=samples, warmup=3,
    )  # fmt: skip


def main() -> None:
    """The table on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=60)
    arguments = parser.parse_args()
    prepare_torch()
    for name in arguments.models:
        measure(name, arguments.context, arguments.samples, None)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
