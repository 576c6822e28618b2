"""What ranks do in tests, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed
from torch import Tensor

from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.judge.verdicts import Judge, judge_free
from flywheel.measure.verdict import Verdict
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.process import one_torch_thread
from flywheel.rivals.tensor_parallel import ShardedDecoder, shard_of
from flywheel.rivals.torch_decoder import fuse, steps_of
from flywheel.tensors import TORCH_DTYPES

CONTEXT = 48


@dataclass(frozen=True, slots=True)
class Case:
    """A step of a model, `compiled` or not."""

    spec: DecoderSpec
    dtype: DType = DType.F32
    batch: int = 1
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A rank's verdicts on its step and on one in which no rank adds what the others made, and its logits' digest."""

    verdict: Verdict
    alone: Verdict
    digest: str


class Alone(ShardedDecoder):
    """A rank that keeps to itself."""

    def _sum_of_ranks(self, summand: Tensor) -> Tensor:
        return summand


def step_each(rank: int, ranks: int, cases: Sequence[Case]) -> list[Made]:
    with one_torch_thread(), torch.no_grad():
        return [step(rank, ranks, case) for case in cases]


def step(rank: int, ranks: int, case: Case) -> Made:
    dtype = TORCH_DTYPES[case.dtype]
    weights = random_weights(case.spec, 3, dtype)
    judge = Judge(OracleWeights(case.spec, weights, dtype), case.dtype, CONTEXT, (0, 24, 46, 47), case.batch, 5)
    shard = shard_of(case.spec, rank, ranks)
    fused, verdicts, digest = fuse(shard.spec, shard.of(weights)), [], ""
    for kind in (Alone, ShardedDecoder):
        decoder = kind(shard, fused, case.dtype, CONTEXT, batch=case.batch)
        for row in range(case.batch):
            decoder.write_cache(judge.layer_caches(-1, row), row)
        decoder.set_tokens(judge.tokens[-1].tolist())
        forward = decoder.forward
        if case.compiled:
            torch._dynamo.reset()
            forward = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=False)
        steps = steps_of(*forward(judge.positions[-1]))
        verdicts.append(judge_free(steps, judge))
        digest = sha256(b"".join(step.logits.numpy().tobytes() for step in steps)).hexdigest()
    return Made(verdicts[1], verdicts[0], digest)


def die_in_company(rank: int, guilty: int) -> None:
    """All add, again and again, until one is killed."""
    row = torch.ones(8)
    torch.distributed.all_reduce(row)
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        torch.distributed.all_reduce(row)


def refuse_in_company(rank: int, guilty: int) -> None:
    row = torch.ones(8)
    torch.distributed.all_reduce(row)
    if rank == guilty:
        raise UsageError(f"rank {rank} refuses")
    while True:
        torch.distributed.all_reduce(row)


def fail_alone(rank: int, guilty: int) -> None:
    if rank == guilty:
        raise RuntimeError("a product failed\nin many words")
    while True:
        signal.pause()
