"""What a generated token takes beside the step that makes it, on the GPU here.

    python experiments/generate_speed.py --works llama3.2-1b:llama3.2-1b.schedule.json llama3-8b:llama3-8b.schedule.json

Three ways in turn, medians of ROUNDS: "step" is one launch of many back to back at the middle of the text, as
`flywheel bench` has it; "queued" a token of a text whose launches are queued ahead of the host; "one by one" a token
where the host reads each before it launches the next. All decode the same positions, behind the same prompt.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from flywheel.cli.files import load_config
from flywheel.decode.cuda import CudaModel, CudaSession
from flywheel.decode.session import stream_by_steps
from flywheel.decode.source import open_source
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.vm.driver import open_gpu

CONTEXT, TOKENS, ROUNDS = 512, 256, 5
PROMPT = tuple(range(1, 129))


def main() -> None:
    """Print a line a work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", required=True, metavar="MODEL:SCHEDULE.json")
    parser.add_argument("--gpu", default="h200")
    arguments = parser.parse_args()
    for work in arguments.works:
        name, _, path = work.partition(":")
        given = load_config(path)
        config = given if isinstance(given, ScheduleConfig) else given.config
        source, dtype = open_source(name), DType.BF16
        program = lower(decode_step(source.spec, CONTEXT, dtype), config, TARGETS[arguments.gpu])
        weights = source.weights(dtype, 0, "cuda")
        with CudaModel(open_gpu(), source.spec, dtype, CONTEXT, weights) as model, model.load(program) as session:
            steps, queued, single = zip(*(one_round(session) for _ in range(ROUNDS)), strict=True)
        step = median(steps)
        print(
            f"{name}: step {spread(steps)}, queued {spread(queued)}, {median(queued) / step:.3f} times, "
            f"one by one {spread(single)}, {median(single) / step:.3f} times; us a token"
        )


def one_round(session: CudaSession) -> tuple[float, float, float]:
    """Us of a step back to back, of a queued token and of one that the host waits for."""
    positions = len(PROMPT) + TOKENS - 1
    step = session.time(1, len(PROMPT) + TOKENS // 2, samples=20, warmup=3).batch_us
    assert step is not None
    start = time.perf_counter()
    tokens = list(session.stream(PROMPT, positions))
    between = time.perf_counter()
    again = list(stream_by_steps(session, PROMPT, positions))
    end = time.perf_counter()
    assert tokens == again, "the same prompt gave other tokens"
    return step, (between - start) / positions * 1e6, (end - between) / positions * 1e6


def spread(values: tuple[float, ...]) -> str:
    """Median and extremes."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
