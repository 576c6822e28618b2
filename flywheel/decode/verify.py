"""Verdicts: on a program by all its tensors, and on a contestant by its logits alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from flywheel.decode.judge import Judge
from flywheel.decode.scores import score
from flywheel.decode.session import BatchSession, DecodeSession, JudgedSession
from flywheel.decode.source import Weights
from flywheel.decode.step import Step
from flywheel.errors import NonFiniteError
from flywheel.ir import DType
from flywheel.measure.verdict import BOUND, FREE_RUNNING, REPEATED, Verdict, judge
from flywheel.models.eager import EagerDecoder, OracleWeights
from flywheel.tensors import TORCH_DTYPES, all_finite


def default_positions(context: int) -> tuple[int, ...]:
    """The first, one in the middle and the last two of a context."""
    return tuple(sorted({each for each in (0, context // 2, context - 2, context - 1) if 0 <= each < context}))


def make_oracle(session: DecodeSession, weights: Weights) -> EagerDecoder:
    """The oracle for a session: the same model, dtype, context and weights, on the weights' device."""
    device = next(iter(weights.values())).device
    return EagerDecoder(session.spec, weights, TORCH_DTYPES[session.dtype], session.context, device)


def make_judge(session: BatchSession, weights: Weights, positions: Sequence[int], seed: int = 0) -> Judge:
    """The judge for a session: the same model, dtype, context, batch and weights, on the weights' device. Raises as
    Judge does."""
    device = next(iter(weights.values())).device
    own = OracleWeights(session.spec, weights, TORCH_DTYPES[session.dtype], device)
    return Judge(own, session.dtype, session.context, positions, session.batch, seed)


def verify(session: JudgedSession, weights: Weights, positions: Sequence[int], seed: int = 0) -> Verdict:
    """The verdict on a program with these weights, for random tokens and caches. Raises as Judge does."""
    return make_judge(session, weights, positions, seed).examine(session).verdict


def judge_free(steps: Sequence[Step], made: Judge) -> Verdict:
    """The verdict on a contestant that shows only its logits, from one step of each sequence at the last of a judge's
    positions, on the judge's caches. It checks the logits, in which the rounding of all layers accumulates, and the
    token chosen from them."""
    wanted = made.logits[-1]
    error, row = max(
        (_free_error(step, logits), -row) for row, (step, logits) in enumerate(zip(steps, wanted, strict=True))
    )
    where = f"position {made.positions[-1]}, row {-row}, logits of a whole step"
    bound = FREE_RUNNING[made.dtype.name]
    return judge(error=error, where=where, positions=made.positions[-1:], dtype=made.dtype.name, bound=bound)


def _free_error(step: Step, logits: Tensor) -> float:
    if step.token != int(step.logits.argmax()):
        return inf
    error = float((step.logits.to(logits.device) - logits).abs().max() / logits.abs().max())
    return error if error >= 0 else inf


def judge_repeated(steps: Sequence[Step], logits: Tensor, position: int, dtype: DType) -> Verdict:
    """The verdict on a repeated launch: whether its logits match the `logits` [batch, vocab] that were judged
    before."""
    again = torch.stack([step.logits for step in steps]).to(logits.device)
    errors = score(again, logits).flatten().tolist()
    error = max(errors)
    where = f"position {position}, row {errors.index(error)}, logits of another launch"
    return judge(error=error, where=where, positions=[position], dtype=dtype.name, bound=REPEATED * BOUND[dtype.name])


def is_tie(logits: Tensor, token: int, dtype: DType) -> bool:
    """Whether rounding alone may explain that a program chose `token` over the first choice of the oracle's `logits`:
    in half types, if their logits differ by no more than the error allowed for a whole step. False for an id outside
    the vocabulary. Raises NonFiniteError for logits that are not finite, which nothing is within rounding of."""
    if not all_finite([logits]):
        raise NonFiniteError("a tie: the oracle's logits are not finite")
    if dtype is DType.F32 or not 0 <= token < len(logits):
        return False
    return float(logits.max() - logits[token]) <= FREE_RUNNING[dtype.name] * float(logits.abs().max())
