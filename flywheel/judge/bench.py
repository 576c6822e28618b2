"""Measures programs of one model on the GPU: loads each, checks it against the oracle, and times it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import torch

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch, time_sessions
from flywheel.decode.memory import memory_named
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import Source
from flywheel.ir import DType, MegakernelProgram
from flywheel.judge.verdicts import Examined, Judge, default_positions, judge_repeated
from flywheel.measure.dismissal import is_settled
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Contest, Implausible, Incorrect, Measured, TrialOutcome
from flywheel.measure.verdict import Verdict
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.models.oracle import OracleWeights
from flywheel.models.quantise import kept_bytes
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import open_gpus
from flywheel.vm.gpu.timing import summarise
from flywheel.vm.pack import AnyPacked, pack_any
from flywheel.vm.worker import enter_phase

_OPEN_S: Final = 120.0
"""Wall seconds in which a driver must open its GPUs."""
_WEIGHTS_S: Final = 900.0
"""Wall seconds that loading and packing weights may take, from a slow file system, too."""
_USUAL_S: Final = 20.0
"""Wall seconds that it takes on a usual day: 5 to 10 for 8 B weights on an H200."""
_SAMPLES: Final = 30
_FINAL_SAMPLES: Final = 10
"""Samples in a round of a final. Latency varies as much between loadings, by placement in memory, as between samples,
so more rounds tell more than more samples."""
_WARMUP: Final = 3
_TURNED_WARMUP: Final = 1
"""Warm-up launches of a candidate that is timed with loaded rivals: the judge has just launched it."""


class CudaBench:
    """Measures programs of one model on one GPU, or on `ranks` GPUs.

    It holds what all programs share: the checkpoint's weights in `formats` (without a checkpoint, random ones from
    `seed`), packed; the caches; and a Judge with its inputs at `default_positions(context)` for each of `batch`
    sequences. Launches are timed at the last position, on the judge's caches. Programs come with their proof, so no GPU
    waits for one.

    Raises NoGpuError, KernelCompileError, GpuMemoryError, and UsageError for a context longer than the model's.
    """

    def __init__(
        self,
        source: Source,
        dtype: DType,
        context: int,
        seed: int = 0,
        batch: int = 1,
        formats: WeightFormats = PLAIN,
        ranks: int = 1,
    ) -> None:
        enter_phase("opens the GPU", _OPEN_S)
        gpu, *peers = open_gpus(ranks)
        prepare_torch()
        enter_phase("loads weights", _WEIGHTS_S, _USUAL_S)
        self._name: Final = source.name
        held = kept_bytes(source.spec, formats, dtype)
        with memory_named(f"{source.name}: {held:,} bytes of weights, held twice while schedules are verified"):
            weights = weights_for(source, dtype, seed, formats, [gpu, *peers])
            self._model = CudaModel(gpu, source.spec, dtype, context, weights, batch, peers=peers)
            own = OracleWeights(source.spec, self._model.weights, TORCH_DTYPES[dtype], "cuda")
            self._judge: Final = Judge(own, dtype, context, default_positions(context), batch, seed)
            torch.cuda.empty_cache()  # the VM allocates memory outside torch
            if ranks == 1:
                self._model.pack_matrices()
        self._last: Final = (self._judge.tokens[-1].tolist(), self._judge.positions[-1])
        self._rivals: Sequence[MegakernelProgram | AnyPacked] = ()
        self._rival_programs: list[MegakernelProgram] = []
        self._kept: list[tuple[CudaSession, Examined]] = []  # the rivals, loaded

    def measure(self, program: MegakernelProgram | AnyPacked) -> TrialOutcome:
        """See `vm.worker.Bench.measure`. Returns Measured, Incorrect or Implausible.

        Raises as `CudaModel.load_packed` and `pack_any`, LaunchTimeoutError and GpuFaultError.
        """
        packed = _packed(program)
        with memory_named(self._name), self._model.load_packed(packed) as session:
            examined = self._judge.examine(session)
            if not examined.verdict.passed:
                return Incorrect(examined.verdict, str(examined.verdict.reason))
            latency = session.time(*self._last, samples=_SAMPLES, warmup=_WARMUP)
            return self._judge_last(session, examined) or judge_latency(packed.program, latency, examined.verdict)

    def compare(
        self,
        program: MegakernelProgram | AnyPacked,
        rivals: Sequence[MegakernelProgram | AnyPacked],
        rounds: int,
    ) -> Contest:
        """See `vm.worker.Bench.compare`. A program that is Incorrect has no times. Raises as `measure` does.

        With one round, the rivals stay loaded for the next call, a candidate that is dismissed against the first rival
        has few samples, and only a candidate as fast as all rivals is also timed in a batch. With several rounds, each
        round loads all programs again and in another order, so that placement in memory is not mistaken for speed. The
        rounds end early once one program `is_settled` to be the fastest.
        """
        with memory_named(self._name), ExitStack() as undo:
            undo.callback(self._drop_rivals)  # whatever stops the candidate's launches stops theirs
            if rounds == 1:
                contest = self._compare_once(_packed(program), rivals)
            else:
                self._drop_rivals()
                contest = self._compare_in_rounds([_packed(each) for each in (program, *rivals)], rounds)
            undo.pop_all()
        return contest

    def _compare_once(
        self, packed: AnyPacked, rivals: Sequence[MegakernelProgram | AnyPacked]
    ) -> Contest:
        if rivals is not self._rivals:
            self._drop_rivals()
            self._rival_programs = []
            for rival in map(_packed, rivals):
                with ExitStack() as undo:
                    session = undo.enter_context(self._model.load_packed(rival))
                    self._kept.append((session, self._judge.examine(session)))
                    undo.pop_all()
                self._rival_programs.append(rival.program)
            self._rivals = rivals
        with self._model.load_packed(packed) as session:
            examined = [self._judge.examine(session), *(found for _, found in self._kept)]
            verdicts = [each.verdict for each in examined]
            if not verdicts[0].passed:
                return Contest(Incorrect(verdicts[0], str(verdicts[0].reason)))
            sessions = [session, *(kept for kept, _ in self._kept)]
            times = time_sessions(sessions, *self._last, samples=_SAMPLES, warmup=_TURNED_WARMUP, dismissing=True)
            latency = _summarise(times[:1], _TURNED_WARMUP)
            if all(latency.median_us <= _summarise([samples]).median_us for samples in times[1:]):
                latency = self._with_batch(session, latency)
            wrong = [self._judge_last(*each) for each in zip(sessions, examined, strict=True)]
        programs = (packed.program, *self._rival_programs)
        return _contest(programs, verdicts, wrong, [[samples] for samples in times], latency)

    def _compare_in_rounds(self, packed: Sequence[AnyPacked], rounds: int) -> Contest:
        """Judge programs when they are first loaded. In later rounds they must compute the same results again."""
        times: list[list[tuple[float, ...]]] = [[] for _ in packed]
        examined: list[Examined] = []
        for turn in range(rounds):
            with ExitStack() as stack:
                order = [(turn + place) % len(packed) for place in range(len(packed))]
                loaded = {place: stack.enter_context(self._model.load_packed(packed[place])) for place in order}
                sessions = [loaded[place] for place in range(len(packed))]
                examined = examined or [self._judge.examine(session) for session in sessions]
                verdicts = [each.verdict for each in examined]
                self._judge.prepare(sessions[0], self._last[1])  # the caches are everybody's
                found = time_sessions(sessions, *self._last, samples=_FINAL_SAMPLES, warmup=_WARMUP)
                for rounds_of_one, samples in zip(times, found, strict=True):
                    rounds_of_one.append(tuple(samples))
                wrong = [self._judge_last(*each) for each in zip(sessions, examined, strict=True)]
                over = turn == rounds - 1 or is_settled([tuple(rounds_of_one) for rounds_of_one in times])
                if over or any(wrong) or not all(verdict.passed for verdict in verdicts):
                    under_load = sessions[0].time_batch(self._last[1], _summarise(times[0][-1:]))
                    break
        latency = replace(_summarise(times[0]), batch_us=under_load.batch_us, gpu_state=under_load.gpu_state)
        return _contest([each.program for each in packed], verdicts, wrong, times, latency)

    def _with_batch(self, session: CudaSession, latency: MeasuredLatency) -> MeasuredLatency:
        """The latency with the state of the GPU under many launches, unless the program was cut short."""
        return latency if latency.samples < _SAMPLES else session.time_batch(self._last[1], latency)

    def _judge_last(self, session: CudaSession, examined: Examined) -> Incorrect | None:
        """Check that the last timed launch computed what the judged one did; None if it did."""
        verdict = judge_repeated(session.read_rows(), examined.logits, self._last[1], session.dtype)
        return None if verdict.passed else Incorrect(verdict, f"while timed: {verdict.reason}")

    def _drop_rivals(self) -> None:
        while self._kept:
            self._kept.pop()[0].close()
        self._rivals = ()


def _packed(program: MegakernelProgram | AnyPacked) -> AnyPacked:
    return pack_any(program) if isinstance(program, MegakernelProgram) else program


def _contest(
    programs: Sequence[MegakernelProgram],
    verdicts: Sequence[Verdict],
    wrong: Sequence[Incorrect | None],
    times_us: Sequence[Sequence[Sequence[float]]],
    first: MeasuredLatency,
) -> Contest:
    """The result of programs that were timed together. All of them had the GPU in the state that `first` records."""
    outcomes: list[TrialOutcome] = []
    for program, verdict, fault, rounds in zip(programs, verdicts, wrong, times_us, strict=True):
        latency = first if not outcomes else replace(_summarise(rounds, first.warmup), gpu_state=first.gpu_state)
        if not verdict.passed:
            outcomes.append(Incorrect(verdict, str(verdict.reason)))
        else:
            outcomes.append(fault or judge_latency(program, latency, verdict))
    return Contest(
        outcomes[0], tuple(outcomes[1:]), tuple(tuple(tuple(samples) for samples in rounds) for rounds in times_us)
    )


def _summarise(rounds: Sequence[Sequence[float]], warmup: int = _WARMUP) -> MeasuredLatency:
    return summarise([us for samples in rounds for us in samples], warmup)


def judge_latency(program: MegakernelProgram, latency: MeasuredLatency, verdict: Verdict) -> Measured | Implausible:
    """The outcome of a timed program: Implausible if the latency is below the floor of the program's target."""
    assert program.target is not None
    floor = floor_us(weight_bytes_read(program), program.target)
    return Measured(latency, verdict) if latency.median_us >= floor else Implausible(latency.median_us, floor)
