"""The verdict on a program: its logits against the eager oracle's, behind the same filled caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flywheel.decode.session import DecodeSession
from flywheel.decode.source import Weights
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.measure.verdict import TOLERANCE, Verdict, judge
from flywheel.models.eager import EagerDecoder
from flywheel.models.weights import TORCH_DTYPES


def default_positions(context: int) -> tuple[int, ...]:
    """The first ones, one in the middle and the last of a context."""
    return tuple(sorted({position for position in (0, 1, 7, context // 2, context - 1) if position < context}))


def make_oracle(session: DecodeSession, weights: Weights) -> EagerDecoder:
    """The oracle of a session: its model, dtype and context, with the same weights."""
    return EagerDecoder(session.spec, weights, TORCH_DTYPES[session.dtype], session.context)


def verify(session: DecodeSession, oracle: EagerDecoder, positions: Sequence[int], seed: int = 0) -> Verdict:
    """Compare one launch at each of `positions`, over random tokens, with the oracle.

    Before it, the session's caches are what the oracle cached of the tokens before that position, and nothing after.
    `oracle` has the session's model, dtype and context. Raises UsageError for positions outside the context.
    """
    tried = sorted(set(positions))
    if not tried:
        raise UsageError("positions: none given; at least one after 0 is needed")
    outside = next((position for position in tried if not 0 <= position < session.context), None)
    if outside is not None:
        raise UsageError(f"position {outside} is not in 0..{session.context - 1}, the program's context")
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, session.spec.vocab, (tried[-1] + 1,), generator=generator).tolist()
    oracle.reset()
    absolute, relative, agreed = [], [], 0
    for position in tried:
        if position > oracle.length:
            oracle.prefill(tokens[oracle.length : position])
        session.write_cache(oracle.read_cache())
        got = session.step(tokens[position], position)
        wanted = oracle.step(tokens[position], position)
        error = (got.logits.to(wanted.device) - wanted).abs().max()
        absolute.append(error)
        relative.append(error / wanted.abs().max())
        agreed += got.token == int(wanted.argmax()) or is_tie(wanted, got.token, session.dtype)
    return judge(
        max_abs_error=float(torch.stack(absolute).max()),
        max_rel_error=float(torch.stack(relative).max()),
        top1_agreement=agreed / len(tried),
        positions=tried,
        dtype=session.dtype.name,
    )


def is_tie(logits: Tensor, token: int, dtype: DType) -> bool:
    """Whether rounding may decide between `token` and the first choice of the oracle's `logits`: where ties agree, if
    their logits are closer than the verdict lets one logit be off by. False for what is no token."""
    bound = TOLERANCE[dtype.name]
    if not bound.ties_agree or not 0 <= token < len(logits):
        return False
    return float(logits.max() - logits[token]) <= bound.max_rel_error * float(logits.abs().max())
