"""Measures how far clocks of SMs stray from an even rate within a launch, against the timer that all SMs share.

    python experiments/sm_clocks.py SCHEDULE.json [--launches 3] [--commit COMMIT] [--record FILE]

It launches the schedule's traced variant at the last position, on as many GPUs as the schedule is for. The rows are SMs
of neighbouring numbers that stray alike; the columns, times since a launch began. A number is what the time of a task's
begin would be off by, in us, if an SM's clock ran at an even rate between the launch's first tick and its last.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flywheel.decode.cuda import CudaModel
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import open_source
from flywheel.ir import validate
from flywheel.lowering.lower import lower
from flywheel.measure.environment import capture_environment
from flywheel.models.decoder import DTYPES
from flywheel.search.workload import gpus_of, make_workload
from flywheel.store.schedule import load_schedule
from flywheel.vm.abi import Stamp, Tie
from flywheel.vm.gpu.driver import open_gpus
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.gpu.stamps import even_ns, stamps_ns
from flywheel.vm.pack import pack_any

WARMUP = 3
PARTS = 10
"""Columns."""
ALIKE_US = 0.5
"""How far the largest differences of two SMs of one row may be apart."""

Strayed = npt.NDArray[np.float64]


def main() -> None:
    """Launch, print, record."""
    parser = argparse.ArgumentParser(description="clocks of SMs within a launch")
    parser.add_argument("schedule", type=Path, metavar="SCHEDULE.json")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    environment = capture_environment()
    lines = [
        f"$ python experiments/sm_clocks.py {arguments.schedule} --launches {arguments.launches}",
        f"{environment.gpu}, driver {environment.driver}, commit {arguments.commit or environment.commit or 'unknown'}",
        *measured(arguments.schedule, arguments.launches),
    ]
    print("\n".join(lines))
    if arguments.record is not None:
        arguments.record.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(path: Path, launches: int) -> list[str]:
    """A table of each launch and GPU. Raises SystemExit for a program without a proof."""
    schedule = load_schedule(path)
    work = make_workload(
        schedule.model, schedule.gpu, schedule.dtype, schedule.context, schedule.batch, schedule.weights
    )
    program = lower(work.graph, schedule.config, work.target)
    if errors := validate(program).errors:
        raise SystemExit(f"{path}: {errors[0]}")
    dtype = DTYPES[schedule.dtype]
    gpus = open_gpus(gpus_of(schedule.gpu)[0])
    source = open_source(schedule.model)
    weights = weights_for(source, dtype, 0, work.formats, gpus)
    lines = []
    with (
        CudaModel(gpus[0], source.spec, dtype, schedule.context, weights, schedule.batch, peers=gpus[1:]) as model,
        model.load_packed(pack_any(program), trace=True) as session,
    ):
        for number in range(launches):
            session.trace([1] * schedule.batch, schedule.context - 1, warmup=WARMUP)
            for gpu, part in enumerate(session.loaded.parts):
                lines += [f"launch {number + 1}, GPU {gpu}", *table(*strayed(part), part.packed.instructions["sm"])]
    return lines


def strayed(part: LoadedProgram) -> tuple[Strayed, Strayed]:
    """(when, what an even rate is off by) in us, of each instruction's stamp CURRENT in the last launch."""
    rows, anchors = part.read_rows()
    stamps, sms = rows[:, : len(Stamp)], part.packed.instructions["sm"]
    tied = stamps_ns(stamps, rows[:, Tie.TIMER_NS], anchors, sms)[:, Stamp.CURRENT].astype(np.int64)
    off = even_ns(stamps, anchors, sms)[:, Stamp.CURRENT] - tied
    return (tied - tied.min()) / 1e3, off / 1e3


def table(when: Strayed, off: Strayed, sms: npt.NDArray[np.int32]) -> list[str]:
    """A row for each run of SMs that stray alike."""
    most = [float(max(off[sms == sm], key=abs, default=0.0)) for sm in range(int(sms.max()) + 1)]
    runs: list[list[int]] = []
    for sm, value in enumerate(most):
        if runs and abs(value - np.mean([most[other] for other in runs[-1]])) < ALIKE_US:
            runs[-1].append(sm)
        else:
            runs.append([sm])
    spans = list(pairwise(np.linspace(0.0, float(when.max()) + 1e-3, PARTS + 1)))
    lines = [f"  {'us':<15}" + "".join(f"{(low + high) / 2:8,.0f}" for low, high in spans) + "    most"]
    for run in runs:
        own = (sms >= run[0]) & (sms <= run[-1])
        cells = [off[own & (when >= low) & (when < high)] for low, high in spans]
        shown = [f"{np.median(cell):8.1f}" if cell.size else f"{'-':>8}" for cell in cells]
        name = f"SM {run[0]} to {run[-1]}"
        lines.append(f"  {name:<15}{''.join(shown)}{np.mean([most[sm] for sm in run]):8.1f}")
    return lines


if __name__ == "__main__":
    main()
