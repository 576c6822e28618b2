"""Times a verdict beside the launches that it judges, in CPU seconds.

    python experiments/verdict_speed.py [--model NAME] [--device reference|cuda] > results/verdict_speed.txt

"launches" is the time of a verdict on logits alone: caches written and one step at each of the positions, with each
step's logits compared with given ones. On a GPU, seconds are wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from flywheel.decode.cuda import CudaModel
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.session import DecodeSession
from flywheel.decode.source import open_source
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import open_gpu

CONTEXT, TIMES = 512, 5


def main() -> None:
    """Print a line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--device", choices=("reference", "cuda"), default="reference")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    torch.set_num_threads(1)
    source, dtype = open_source(arguments.model), DType.BF16
    target = TARGETS[arguments.gpu]
    weights = source.weights(dtype, 0, "cuda" if on_gpu else "cpu")
    clock = time.perf_counter if on_gpu else time.process_time
    own = OracleWeights(source.spec, weights, TORCH_DTYPES[dtype], "cuda" if on_gpu else "cpu")
    judge = Judge(own, dtype, CONTEXT, default_positions(CONTEXT), 1)
    space = make_space(Workload(arguments.model, source.spec, target, "bf16", CONTEXT))
    print(f"{arguments.model}, bf16, context {CONTEXT}, {arguments.device}: median seconds of {TIMES}")
    model = CudaModel(open_gpu(), source.spec, dtype, CONTEXT, weights) if on_gpu else None
    for name, config in {"unfused": ScheduleConfig(), "known good": space.to_config(space.known_good()[0])}.items():
        program = lower(decode_step(source.spec, CONTEXT, dtype), config, target)
        session: DecodeSession = (
            ReferenceSession(program, source.spec, weights) if model is None else model.load(program)
        )
        bare, whole = (
            taken(clock, lambda s=session: launches(s, judge)),
            taken(clock, lambda s=session: judge.examine(s)),
        )
        shared = "some buffers share memory" if session.shares_memory else "no buffers share memory"
        print(f"  {name:12} launches {bare:.3f}, verdict with them {whole:.3f}, {whole / bare:.2f} times; {shared}")


def launches(session: DecodeSession, judge: Judge) -> None:
    """A step at each position behind its caches, and its logits compared."""
    for place, position in enumerate(judge.positions):
        step = session.step_rows(judge.prepare(session, position), position)[0]
        (step.logits.to(judge.logits.device) - judge.logits[place, 0]).abs().max().item()


def taken(clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Median of TIMES, after once without."""
    work()
    found = []
    for _ in range(TIMES):
        start = clock()
        work()
        found.append(clock() - start)
    return median(found)


if __name__ == "__main__":
    main()
