"""Verdicts: on a program by every tensor that a launch leaves in its buffers, which the oracle makes again from the
same operands, and on a contestant by its logits alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.interface import Launched
from flywheel.decode.session import DecodeSession, Step
from flywheel.decode.source import Weights
from flywheel.errors import NonFiniteError, UsageError
from flywheel.ir import DType
from flywheel.judge.deviations import Oracle, Scored, gather, score
from flywheel.measure.verdict import BOUND, FREE_RUNNING, REPEATED, Verdict, judge
from flywheel.models.oracle import EagerDecoder, LayerCache, OracleWeights
from flywheel.models.oracle_steps import LayerByLayer, Past, run_forced
from flywheel.tensors import TORCH_DTYPES

FLAT: Final = 0.25
"""Standard deviation of the scores of cached keys at the last judged position, so that each of many rows counts."""

NEEDLE: Final = 4.5
"""Score of one key at the position before the last. A row that weighs about as much as all others together is the most
sensitive test of the softmax scale."""

GAINS: Final = (8.0, 2.0, 1.0)
"""Gains of cached keys. Most positions have the first, whose sharp scores show errors in rotated queries; the second is
for the position before the last, the third for the last."""

_EDGE: Final = 16
_HEAVY: Final = 4.0
"""Gain of the values of the first and last row of each `_EDGE` rows, where windows begin and end."""

_RANGE: Final = 512.0
"""More than the largest cached number over its deviation, so that no row of a half type overflows."""

_STRIDE: Final = 7919
"""Offset in elements between the noise of one layer and of the next."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of judging a program: the verdict, the program's `logits` [batch, vocab] at the last position, and all
    comparisons."""

    verdict: Verdict
    logits: Tensor
    scores: Scored


class Judge:
    """Inputs for programs of one model, dtype and batch at some positions, and the oracle that judges the results.

    `tokens` [positions, batch], unless given, and caches are random, from `seed`. The caches hold keys whose scores
    with the oracle's own queries follow FLAT, NEEDLE and GAINS. `logits` [positions, batch, vocab] are the oracle's,
    where each operation works on the oracle's own values. Raises UsageError for no positions, and for one outside the
    context, and NonFiniteError if the oracle's own tensors are not finite, so that nothing could be compared with them.
    """

    def __init__(
        self,
        weights: OracleWeights,
        dtype: DType,
        context: int,
        positions: Sequence[int],
        batch: int,
        seed: int = 0,
        tokens: Tensor | None = None,
    ) -> None:
        tried = sorted(set(positions))
        if not tried:
            raise UsageError("positions: none given; at least one after 0 is needed")
        outside = next((position for position in tried if not 0 <= position < context), None)
        if outside is not None:
            raise UsageError(f"position {outside} is not in 0..{context - 1}, the program's context")
        spec = weights.spec
        self.positions: Final = tuple(tried)
        self.batch: Final = batch
        self.dtype: Final = dtype
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, spec.vocab, (len(tried), batch), generator=generator)
        self.tokens: Final = drawn if tokens is None else tokens
        self.gains: Final = tuple([GAINS[0]] * len(tried) + list(GAINS[1:]))[-len(tried) :]
        heads, head_dim = spec.most_cached
        shape = (2, batch, heads, tried[-1], head_dim)
        noise = torch.rand(shape, generator=generator).sub_(0.5).mul_(sqrt(12.0)).to(weights.device)
        self.past: Final = torch.empty((spec.n_layers, *shape), dtype=TORCH_DTYPES[dtype], device=weights.device)
        gains = torch.tensor(self.gains, device=weights.device)
        windows = tuple([spec.window_of(layer) for layer in range(spec.n_layers)])
        self._layers: Final = [spec.of_layer(layer) for layer in range(spec.n_layers)]
        drawing = _Drawing(noise, self.past, gains, self.positions, windows, spec.attention_scale)
        tokens_there, at = self.tokens.to(weights.device), torch.tensor(self.positions, device=weights.device)
        run_forced(weights, tokens_there, at, context, drawing)
        drawing.require_finite()
        self._oracle: Final = Oracle(weights, tokens_there, at, context, self.past, gains)
        self.logits: Final = drawing.logits[0].view(len(tried), batch, -1)

    def examine(self, session: DecodeSession) -> Examined:
        """Run one launch per position of a session of the judge's model, dtype and batch, and judge them.

        In the last launch all sequences are at the last position; in the others they take turns at the other positions.
        Leaves the caches as the last launch left them.
        """
        launches = [self._launch(session, places, apart=True) for places in self._turns()]
        (first, *others), new, changed = (list(each) for each in zip(*launches, strict=True))
        shown = gather(session.taps, first.then(others), torch.stack(new))
        changed_rows = torch.stack(changed, 2).flatten(2, 3)  # [layers, 2, positions * batch, heads]
        if self.batch > 1:
            order = torch.tensor(self._order(), device=changed_rows.device)
            shown, changed_rows = shown.ordered(order), changed_rows[:, :, order]
        scores = self._oracle.compare(shown).copy()
        scores.require(
            [
                f"L{layer}.{side}_cache, another row than the new one,"
                for layer in range(len(self.past))
                for side in "kv"
            ],
            changed_rows.flatten(0, 1),
        )
        logits = shown.tensor("logits")
        scores.require(["next_token"], _unlike_argmax(logits, shown.tensor("next_token")[:, None])[None])
        last = logits[-self.batch :]
        if session.shares_memory:
            scores.require(
                ["what a launch makes where buffers share memory"], self._unlike_plain(session, last, new[-1])
            )
        scored = scores.scored()
        error, where = scored.worst(self.positions, self.batch)
        verdict = judge(error=error, where=where, positions=self.positions, dtype=self.dtype.name)
        return Examined(verdict, last, scored)

    def prepare(self, session: DecodeSession, position: int) -> list[int]:
        """Fill the caches with the rows before one of the positions. Returns the tokens at that position."""
        return self._prepare(session, [self.positions.index(position)] * self.batch)

    def _prepare(self, session: DecodeSession, places: Sequence[int]) -> list[int]:
        """`prepare` for one position per sequence, given by its index in `positions`."""
        gains = [self.gains[place] for place in places]
        session.caches.write_past(self.past, [self.positions[place] for place in places], gains)
        return [int(self.tokens[place, row]) for row, place in enumerate(places)]

    def _turns(self) -> list[list[int]]:
        """For each launch, the index in `positions` of each sequence's position."""
        last, rows = len(self.positions) - 1, range(self.batch)
        return [[(launch + row) % last for row in rows] for launch in range(last)] + [[last] * self.batch]

    def _order(self) -> list[int]:
        """The rows of all launches [launches * batch], sorted by position."""
        turns = self._turns()
        at = {(place, row): launch for launch, places in enumerate(turns) for row, place in enumerate(places)}
        rows = range(self.batch)
        return [at[place, row] * self.batch + row for place in range(len(turns)) for row in rows]

    def _launch(self, session: DecodeSession, places: Sequence[int], *, apart: bool) -> tuple[Launched, Tensor, Tensor]:
        """(tensors, new cache rows, whether other cache rows changed) of one launch."""
        positions, gains = [self.positions[place] for place in places], [self.gains[place] for place in places]
        tokens = self._prepare(session, places)
        launched = session.show(tokens, positions[0] if len(set(positions)) == 1 else positions, apart=apart)
        return launched, session.caches.new_rows(positions), session.caches.changed(self.past, positions, gains)

    def _unlike_plain(self, session: DecodeSession, logits: Tensor, new: Tensor) -> Tensor:
        """[1, positions * batch, 1]: whether the program with its own memory plan computes something else at the last
        position than with separate memory for each buffer, which gave `logits` and the `new` rows."""
        launched, new_rows, changed = self._launch(session, self._turns()[-1], apart=False)
        unlike = (session.taps.stack(launched, ["logits"], new.dtype)[0] != logits).any(-1)
        for each in (new_rows != new, changed):
            unlike |= each.movedim(2, 0).flatten(1).any(-1)
        wrong = torch.zeros(1, len(self.positions) * self.batch, 1, dtype=torch.bool, device=unlike.device)
        wrong[0, -self.batch :, 0] = unlike
        return wrong

    def layer_caches(self, place: int, row: int) -> list[LayerCache]:
        """The caches of a sequence before a position."""
        length, gain = self.positions[place], self.gains[place]
        rows = self.past[:, :, row, :, :length].transpose(2, 3)
        layers = [
            each[:, :, : own.n_kv_heads, : own.head_dim] for own, each in zip(self._layers, rows, strict=True)
        ]
        return [(keys * gain, values) for keys, values in layers]


def _unlike_argmax(logits: Tensor, tokens: Tensor) -> Tensor:
    """Whether each of `tokens` [rows, 1] differs from the first index of the row's largest logit."""
    indices = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(logits == logits.amax(-1, keepdim=True), indices, len(indices)).amin(-1, keepdim=True)
    return first != tokens


@dataclass(slots=True)
class _Drawing(LayerByLayer):
    """Fills `past_rows` from `noise` [2, batch, heads, rows, head_dim], both with the most heads and the longest of any
    layer, and keeps the logits."""

    noise: Tensor
    past_rows: Tensor
    gains: Tensor
    positions: tuple[int, ...]
    windows: tuple[int | None, ...]
    """Of each layer."""
    scale: float | None
    """What scores are multiplied by; None for head_dim ** -0.5."""
    logits: list[Tensor] = field(default_factory=list)
    finite: dict[str, Tensor] = field(default_factory=dict)
    """Whether each row of a tensor is finite, [rows], in the order of the operations."""

    def take(self, names: tuple[str, ...], made: Tensor, parts: int) -> Tensor:
        (name,) = names
        self.finite[name] = made[0].isfinite().all(-1)
        if name == "logits":
            self.logits.append(made[0])
        return made

    def require_finite(self) -> None:
        """Raises NonFiniteError, with its place, if a tensor so far is not finite. Waits for the device."""
        wrong = ~torch.stack(list(self.finite.values())).cpu()
        if bool(wrong.any()):
            place, row = divmod(int(wrong.flatten().to(torch.uint8).argmax()), wrong.shape[1])
            at, row = divmod(row, self.past_rows.shape[2])
            where = f"position {self.positions[at]}, row {row}, {list(self.finite)[place]}"
            raise NonFiniteError(f"{where}: not finite in the oracle itself, so no program can be compared with it")

    def past(self, layers: range, q: Tensor, v: Tensor) -> Past:
        (layer,), q, v = layers, q[0], v[0]
        n_kv_heads, head_dim = v.shape[1], v.shape[2]
        own = (..., slice(n_kv_heads), slice(None), slice(head_dim))
        rows = self.past_rows[layer][own]
        queries = q.float().view(len(q), n_kv_heads, -1, head_dim)
        sizes = torch.stack(
            (
                FLAT * self._over(head_dim) / queries.square().sum(-1).mean((0, 2)).sqrt(),
                v.float().square().mean((0, 2)).sqrt(),
            )
        ).clamp(max=torch.finfo(rows.dtype).max / _RANGE)  # [2, n_kv_heads]; queries may be 0
        noise = self.noise.flatten().roll(layer * _STRIDE).view(self.noise.shape)[own]
        drawn = noise * sizes[:, None, :, None, None]
        places = torch.arange(drawn.shape[-2], device=drawn.device)
        heavy = (places % _EDGE == 0) | (places % _EDGE == _EDGE - 1)
        window = self.windows[layer]
        if window is not None:  # the last row out of sight and the first in sight
            for position in self.positions:
                heavy |= (places == position - window) | (places == position + 1 - window)
        drawn[1].mul_(torch.where(heavy, _HEAVY, 1.0)[:, None])
        self._place_needle(drawn[0], queries, window)
        rows.copy_(drawn)
        return Past(rows[:1], rows[1:], self.gains)

    def _over(self, head_dim: int) -> float:
        """What a product of a query and a key is divided by in a score."""
        return sqrt(head_dim) if self.scale is None else 1 / self.scale

    def _place_needle(self, keys: Tensor, queries: Tensor, window: int | None) -> None:
        """Write the needle: the shortest key that scores NEEDLE with each query [rows, n_kv_heads, group, head_dim] of
        the position before the last, at the first heavy row that only the last two positions see, or of these that one
        alone."""
        if len(self.positions) < 2:
            return
        seen_before = self.positions[-3] if len(self.positions) > 2 else 0
        in_sight = 0 if window is None else self.positions[-2] + 1 - window
        place = max(-(-seen_before // _EDGE) * _EDGE, in_sight)
        if place >= self.positions[-2]:
            return
        batch = len(keys)
        if not bool(queries.isfinite().all()):
            self.require_finite()  # pinv takes no other
        own = queries.view(-1, batch, *queries.shape[1:])[-2].double()  # [batch, n_kv_heads, group, head_dim]
        wanted = torch.full(
            (*own.shape[:-1], 1), NEEDLE * self._over(own.shape[-1]) / GAINS[1], dtype=own.dtype, device=own.device
        )
        keys[:, :, place] = (torch.linalg.pinv(own) @ wanted).squeeze(-1).to(keys.dtype)


def default_positions(context: int) -> tuple[int, ...]:
    """The first, one in the middle and the last two of a context."""
    return tuple(sorted({each for each in (0, context // 2, context - 2, context - 1) if 0 <= each < context}))


def make_oracle(session: DecodeSession, weights: Weights) -> EagerDecoder:
    """The oracle for a session: the same model, dtype, context and weights, on the weights' device."""
    device = next(iter(weights.values())).device
    return EagerDecoder(session.spec, weights, TORCH_DTYPES[session.dtype], session.context, device)


def make_judge(session: DecodeSession, weights: Weights, positions: Sequence[int], seed: int = 0) -> Judge:
    """The judge for a session: the same model, dtype, context, batch and weights, on the weights' device. Raises as
    Judge does."""
    device = next(iter(weights.values())).device
    own = OracleWeights(session.spec, weights, TORCH_DTYPES[session.dtype], device)
    return Judge(own, session.dtype, session.context, positions, session.batch, seed)


def verify(session: DecodeSession, weights: Weights, positions: Sequence[int], seed: int = 0) -> Verdict:
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
