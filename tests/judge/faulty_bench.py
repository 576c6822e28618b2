"""A bench on the GPU that can be told to go wrong, in a module of its own so that a spawned worker can find it.

What it does to a program is in the program's `meta["fault"]`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flywheel.decode.cuda import CudaModel
from flywheel.decode.source import Source
from flywheel.ir import Counter, DType, MegakernelProgram, Wait
from flywheel.judge.bench import CudaBench
from flywheel.measure.outcome import Incorrect, TrialOutcome
from flywheel.models.spec import DecoderSpec
from flywheel.vm.pack import pack

CONTEXT = 64
SPEC = DecoderSpec("tiny", "llama", 128, 224, 2, 8, 2, 16, 320, 5e5, 1e-5, 128)
_PLANTED = "model.layers.1.mlp.down_proj.weight"


class FaultyBench(CudaBench):
    """`mark` is a file that is there once a worker has been killed."""

    def __init__(self, mark: Path) -> None:
        super().__init__(Source("tiny", SPEC, None, None), DType.BF16, CONTEXT)
        self._mark = mark

    def measure(self, program: MegakernelProgram) -> TrialOutcome:
        match program.meta.get("fault"):
            case "nan":
                return self._with_a_nan(program)
            case "never signalled":
                return self._run_packed(never_signalled(program))
            case "out of bounds":
                return self._run_packed(program, far_away=True)
            case "memory":
                self._model.gpu.alloc(1 << 45)
            case "kill" if not self._mark.exists():
                self._mark.touch()
                with self._model.load(program) as session:
                    self._judge.prepare(session, self._judge.positions[1])
                    session.loaded.launch(7)
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(program)

    def _with_a_nan(self, program: MegakernelProgram) -> TrialOutcome:
        planted = self._model.weights[_PLANTED].clone()
        planted[5, 9] = torch.nan
        weights = {**self._model.weights, _PLANTED: planted}
        with (
            CudaModel(self._model.gpu, SPEC, DType.BF16, CONTEXT, weights) as model,
            model.load(program) as session,
        ):
            verdict = self._judge.examine(session).verdict
        return Incorrect(verdict, str(verdict.reason))

    def _run_packed(self, program: MegakernelProgram, far_away: bool = False) -> TrialOutcome:
        packed = pack(program)
        if far_away:
            segments = packed.segments.copy()
            segments["src"][-1] += np.uint64(1 << 46)
            packed = replace(packed, segments=segments)
        with self._model.load_packed(packed) as session:
            session._limit_s = 1.0
            verdict = self._judge.examine(session).verdict
        return Incorrect(verdict, str(verdict.reason))


def never_signalled(program: MegakernelProgram) -> MegakernelProgram:
    """The last task waits for a counter that no task signals."""
    counter = Counter(1 + max(each.id for each in program.counters))
    *others, last = program.tasks
    last = replace(last, waits=(*last.waits, Wait(counter.id, 1)))
    return replace(program, counters=(*program.counters, counter), tasks=(*others, last))


def make_faulty(mark: str) -> FaultyBench:
    """For a worker."""
    return FaultyBench(Path(mark))
