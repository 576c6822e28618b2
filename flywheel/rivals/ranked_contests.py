"""Compares a multi-GPU program with PyTorch over NCCL: the oracle judges each, then they are timed alternately, in
rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from flywheel.decode.cuda import CudaModel, prepare_torch
from flywheel.decode.memory import memory_named
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import Source, Weights
from flywheel.errors import GpuMemoryError, KernelCompileError
from flywheel.ir import DType, MegakernelProgram
from flywheel.judge.verdicts import Judge, default_positions, judge_free
from flywheel.measure.comparison import Comparison, Entry, comparison_of
from flywheel.measure.outcome import NoMemory, Rejected
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.models.oracle import OracleWeights
from flywheel.rivals.contestants import OURS, Record, Runner, judge_session, time_round
from flywheel.rivals.lineup import Rival, TimingPlan
from flywheel.rivals.ranked_rivals import WARMUP, Behind, RankedRival, RankedWork
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.timing import summarise


class RankedContests:
    """A model on several GPUs, for comparisons like those of `Contests`. Raises as `Contests`."""

    def __init__(
        self, gpus: Sequence[Gpu], source: Source, dtype: DType, seed: int, say: Callable[[str], None],
        formats: WeightFormats = PLAIN,
    ) -> None:  # fmt: skip
        prepare_torch()
        self._gpus, self._source, self._dtype, self._seed, self._say = gpus, source, dtype, seed, say
        self._formats = formats
        with memory_named(source.name):
            self._weights: Final[Weights] = weights_for(source, dtype, seed, formats, gpus)

    def hold(
        self, program: MegakernelProgram, context: int, rivals: Sequence[Rival], read_gbs: float, plan: TimingPlan,
        batch: int = 1,
    ) -> Comparison:  # fmt: skip
        """See `Contests.hold`. The rivals run in their own processes, one per GPU. Raises as `Contests.hold`,
        MismatchError if a rival's ranks disagree on logits, and WorkerDiedError if its processes end."""

        def say(told: str) -> None:
            self._say(f"context {context}, batch {batch}: {told}")

        gpu, *peers = self._gpus
        with (
            memory_named(self._source.name),
            CudaModel(gpu, self._source.spec, self._dtype, context, self._weights, batch, peers=peers) as model,
            ExitStack() as stack,
        ):
            model.load(program).close()  # fails early, before steps that take minutes
            say("what the oracle expects")
            own = OracleWeights(self._source.spec, self._weights, TORCH_DTYPES[self._dtype], "cuda")
            made = Judge(own, self._dtype, context, default_positions(context), batch, self._seed)
            torch.cuda.empty_cache()  # the VM allocates memory outside torch
            ready = [self._start(rival, context, made, stack, say) for rival in rivals]
            entries = self._hold_rounds(model, program, ready, made, plan, say)
        return comparison_of(program, context, batch, read_gbs, entries)

    def _start(
        self, rival: Rival, context: int, made: Judge, stack: ExitStack, say: Callable[[str], None]
    ) -> tuple[Record, RankedRival] | Entry:
        """A rival that is ready, or the entry of a rival that cannot run."""
        say(f"{rival.name}, {rival.how}" + (", takes minutes" if rival.compiled else ""))
        outcome: Rejected | NoMemory
        if self._formats != PLAIN:
            outcome = Rejected(("rival",), "the weights are quantised; it multiplies plain ones")
        else:
            try:
                work = RankedWork(
                    self._source.name, self._dtype, context, self._seed, rival, len(self._gpus), behind(made)
                )
                return Record(rival.name, rival.how), stack.enter_context(RankedRival(work))
            except KernelCompileError as error:
                outcome = Rejected(("rival",), str(error))
            except GpuMemoryError as error:
                outcome = NoMemory(str(error))
        say(f"{rival.name} does not run: {outcome.reason}")
        return Entry(rival.name, rival.how, outcome)

    def _hold_rounds(
        self, model: CudaModel, program: MegakernelProgram, ready: Sequence[tuple[Record, RankedRival] | Entry],
        made: Judge, plan: TimingPlan, say: Callable[[str], None],
    ) -> tuple[Entry, ...]:  # fmt: skip
        """The program's entry, then those of its rivals. Each round begins with another contestant."""
        ours = Record(OURS, "the program, one launch a step and GPU")
        running = [each for each in ready if not isinstance(each, Entry)]
        for turn in range(plan.rounds):
            say(f"round {turn + 1} of {plan.rounds}")
            turns: list[Callable[[], None]] = [
                partial(self._time_ours, model, program, ours, made, plan.samples),
                *[partial(time_rival, record, rival, made, plan.samples) for record, rival in running],
            ]
            first = turn % len(turns)
            for take in (*turns[first:], *turns[:first]):
                take()
        rivals = [each if isinstance(each, Entry) else each[0].entry(program) for each in ready]
        return (ours.entry(program), *rivals)

    def _time_ours(
        self, model: CudaModel, program: MegakernelProgram, record: Record, made: Judge, samples: int
    ) -> None:
        position, tokens = made.positions[-1], made.tokens[-1].tolist()
        with model.load(program) as session:
            examined = made.examine(session)
            record.note(examined.verdict)
            launch, finish = session.launcher(tokens, position)
            runner = Runner(record, launch, partial(judge_session, session, examined, position))
            time_round(self._gpus[0], [runner], finish, samples, self._gpus[1:])


def behind(made: Judge) -> Behind:
    """The inputs of a step at the last of a judge's positions, on the CPU."""
    caches = [
        [(keys.cpu().clone(), values.cpu().clone()) for keys, values in made.layer_caches(-1, row)]
        for row in range(made.batch)
    ]
    return Behind(tuple(made.tokens[-1].tolist()), made.positions[-1], tuple(caches))


def time_rival(record: Record, rival: RankedRival, made: Judge, samples: int) -> None:
    """Time one round of a rival; a rival that was wrong is skipped. Raises as `RankedRival.take_turn`."""
    if record.verdict is None:
        record.note(judge_free(rival.take_turn(0)[1], made))
    if record.wrong is not None:
        return
    found, steps = rival.take_turn(samples)
    record.times_us.append(found.times_us)
    record.latencies.append(replace(summarise(found.times_us, WARMUP), batch_us=found.batch_us))
    record.note(judge_free(steps, made), while_timed=True)
