"""The verdict on a program: its logits against the eager oracle's, behind the same filled caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flywheel.decode.session import BatchSession, DecodeSession, Step
from flywheel.decode.source import Weights
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.measure.verdict import TOLERANCE, Verdict, judge
from flywheel.models.eager import EagerDecoder, LayerCache
from flywheel.tensors import TORCH_DTYPES


def default_positions(context: int) -> tuple[int, ...]:
    """The first ones, one in the middle and the last of a context."""
    return tuple(sorted({position for position in (0, 1, 7, context // 2, context - 1) if position < context}))


def make_oracle(session: DecodeSession, weights: Weights) -> EagerDecoder:
    """The oracle of a session: its model, dtype and context, with the same weights, where those are."""
    device = next(iter(weights.values())).device
    return EagerDecoder(session.spec, weights, TORCH_DTYPES[session.dtype], session.context, device)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the oracle makes of random `tokens`, one a position: its `logits` at each of `positions`, and `cache`, what
    it had cached before the last of them; before an earlier one, it is the beginning of that."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[Tensor, ...]
    cache: tuple[LayerCache, ...]

    def cache_before(self, position: int) -> list[LayerCache]:
        """What stands before one of `positions`, as views."""
        return [(keys[:position], values[:position]) for keys, values in self.cache]


def expect(oracle: EagerDecoder, positions: Sequence[int], seed: int = 0) -> Expectation:
    """The oracle's part of a comparison, which holds for every program of its model, dtype and context.

    Raises UsageError for no positions, and for one outside the oracle's context.
    """
    tried = sorted(set(positions))
    if not tried:
        raise UsageError("positions: none given; at least one after 0 is needed")
    outside = next((position for position in tried if not 0 <= position < oracle.context), None)
    if outside is not None:
        raise UsageError(f"position {outside} is not in 0..{oracle.context - 1}, the program's context")
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, oracle.spec.vocab, (tried[-1] + 1,), generator=generator).tolist()
    oracle.reset()
    logits = []
    for position in tried:
        if position > oracle.length:
            oracle.prefill(tokens[oracle.length : position])
        logits.append(oracle.step(tokens[position], position))
    cache = tuple((keys[: tried[-1]].clone(), values[: tried[-1]].clone()) for keys, values in oracle.read_cache())
    return Expectation(tuple(tried), tuple(tokens), tuple(logits), cache)


def compare(session: DecodeSession, expected: Expectation) -> Verdict:
    """The verdict on one launch at each of the expected positions.

    Before it, the session's caches are what the oracle had cached before that position, and nothing after. The session
    has the oracle's model, dtype and context.
    """

    def launched() -> Iterator[Step]:
        for position in expected.positions:
            session.write_cache(expected.cache_before(position))
            yield session.step(expected.tokens[position], position)

    return judge_steps(launched(), expected.logits, expected.positions, session.dtype)


def judge_steps(steps: Iterable[Step], wanted: Sequence[Tensor], positions: Sequence[int], dtype: DType) -> Verdict:
    """The verdict on what launches at `positions` gave, one step or one a sequence each, against the oracle's logits
    there."""
    absolute, relative, agreed = [], [], 0
    for got, logits in zip(steps, wanted, strict=True):
        error = (got.logits.to(logits.device) - logits).abs().max()
        absolute.append(error)
        relative.append(error / logits.abs().max())
        agreed += got.token == int(logits.argmax()) or is_tie(logits, got.token, dtype)
    return judge(
        max_abs_error=float(torch.stack(absolute).max()),
        max_rel_error=float(torch.stack(relative).max()),
        top1_agreement=agreed / len(absolute),
        positions=positions,
        dtype=dtype.name,
    )


def verify(session: BatchSession, oracle: EagerDecoder, positions: Sequence[int], seed: int = 0) -> Verdict:
    """Compare one launch at each of `positions`, over random tokens, with the oracle. Raises as `expect` does."""
    return compare_rows(session, expect_rows(oracle, positions, session.batch, seed))


def expect_rows(
    oracle: EagerDecoder, positions: Sequence[int], batch: int, seed: int = 0
) -> tuple[Expectation, ...]:
    """The oracle's part for `batch` sequences, each of its own tokens, decoded one after the other. Raises as `expect`
    does."""
    return tuple(expect(oracle, positions, seed + row) for row in range(batch))


def compare_rows(session: BatchSession, expected: Sequence[Expectation]) -> Verdict:
    """As `compare`, for a sequence each, at the same positions: the verdict on every row of every launch."""
    if len(expected) == 1:
        return compare(session, expected[0])
    positions = expected[0].positions

    def launched() -> Iterator[Step]:
        for position in positions:
            for row, each in enumerate(expected):
                session.write_cache(each.cache_before(position), row)
            yield from session.step_rows([each.tokens[position] for each in expected], position)

    wanted = [each.logits[place] for place in range(len(positions)) for each in expected]
    return judge_steps(launched(), wanted, positions, session.dtype)


def is_tie(logits: Tensor, token: int, dtype: DType) -> bool:
    """Whether rounding may decide between `token` and the first choice of the oracle's `logits`: where ties agree, if
    their logits are closer than the verdict lets one logit be off by. False for what is no token."""
    bound = TOLERANCE[dtype.name]
    if not bound.ties_agree or not 0 <= token < len(logits):
        return False
    return float(logits.max() - logits[token]) <= bound.max_rel_error * float(logits.abs().max())
