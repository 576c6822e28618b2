"""Chooses the tokens of several rows at once on the device of their logits, each as its own request asks, and computes
their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, log
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from flywheel.ir import NO_TOKEN
from flywheel.runtime.sequences import MOST_LIKELY, Logprobs, Sampling
from flywheel.tensors import sent

_SPREAD: Final = 0x9E3779B97F4A7C15
"""An odd number whose multiples differ in all bits, so that neighbouring seeds draw independent numbers."""

_COLUMNS: Final = ("temperature", "top_p", "log_min_p", "penalty", "greedy", "chosen")

_WHOLE: Final = 2**40
"""Shares are counted in multiples of 1 / this: sums of integers do not depend on their order, nor on other rows."""
_BLOCK: Final = 512
"""Elements that are summed sequentially; blocks of them are summed in parallel."""

WORDS: Final = 1 + 2 * MOST_LIKELY
"""Most 32-bit words of a row of `report`."""


class Choices:
    """Chooses the token of each row after a launch, from logits [batch, vocab] on a device.

    Every operation covers all rows, and none mixes rows, so a row's token depends only on its own logits, request and
    position. A draw is an exponential race: scores are divided by independent exponential numbers, and the largest
    quotient wins with the probability of its score. Nothing waits for the device.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        self._asked: dict[int, Sampling] = {}
        self._params = torch.zeros(len(_COLUMNS), batch, 1, dtype=torch.float32, device=device)
        self._seen = torch.zeros(batch, vocab, dtype=torch.bool, device=device)
        self._noise = torch.ones(batch, vocab, dtype=torch.float32, device=device)
        self._generator = torch.Generator(device)
        self.free_all()

    def free_all(self) -> None:
        """Let every row take the program's own choice."""
        for row in range(self._params.shape[1]):
            self.free(row)

    def begin(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Choose a row's tokens by a request's sampling from now on. Its text starts with `prompt`."""
        self.free(row)
        if sampling.is_argmax:
            return
        self._asked[row] = sampling
        least = log(sampling.min_p) if sampling.min_p else -torch.inf
        warmth = 1.0 if sampling.is_greedy else sampling.temperature
        self._set(row, warmth, sampling.top_p, least, sampling.repetition_penalty, sampling.is_greedy, True)
        self._seen[row] = False
        self._seen[row, sent(prompt, self._device)] = True
        self._noise[row] = 1.0

    def free(self, row: int) -> None:
        """Let a row take the program's own choice from now on."""
        self._asked.pop(row, None)
        self._set(row, 1.0, 1.0, -torch.inf, 1.0, True, False)

    def replace(self, tokens: Tensor, logits: Tensor, positions: Mapping[int, int]) -> None:
        """Write the tokens that rows draw over the program's own choices in `tokens` [batch], integers. `positions` has
        the positions of the launch's rows. A row whose scores are not finite draws NO_TOKEN."""
        asked = {row: each for row, each in self._asked.items() if row in positions}
        if not asked:
            return
        for row, each in asked.items():
            if not each.is_greedy:
                self._generator.manual_seed((each.seed * _SPREAD + positions[row]) % 2**63)
                self._noise[row].exponential_(generator=self._generator)
        chosen = self._choose(logits.float(), asked)
        tokens.copy_(torch.where(self._column("chosen")[:, 0] > 0, chosen.to(tokens.dtype), tokens))
        if any(each.repetition_penalty != 1.0 for each in asked.values()):
            self._seen.scatter_(1, tokens.long().clamp(min=0)[:, None], True)

    def _choose(self, scores: Tensor, asked: Mapping[int, Sampling]) -> Tensor:
        """Chosen tokens [batch] from logits. Steps that no row asks for are skipped, since they would change nothing.
        Sorting the vocabulary takes longest, and is done once, for the rows that need it."""
        every = asked.values()
        if any(each.repetition_penalty != 1.0 for each in every):
            penalty = self._column("penalty")
            scores = torch.where(self._seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        if all(each.is_greedy for each in every):
            return _first_largest(scores)
        warm = scores / self._column("temperature")
        limits = {row: each.top_k for row, each in asked.items() if 0 < each.top_k < self._vocab}
        if limits:
            warm = _cut(warm, limits)
        if any(each.min_p > 0.0 for each in every):
            warm = warm.masked_fill(warm < warm.amax(1, keepdim=True) + self._column("log_min_p"), -torch.inf)
        shares = warm.softmax(1)
        rows = [row for row, each in asked.items() if each.top_p < 1.0]
        if rows:
            nuclei = _nuclei(_pick(shares, rows), _pick(self._column("top_p"), rows))
            for row, nucleus in zip(rows, nuclei, strict=True):
                shares[row] = nucleus
        return _first_largest(torch.where(self._column("greedy") > 0, scores, shares / self._noise))

    def _column(self, name: str) -> Tensor:
        """A sampling parameter of all rows, [batch, 1]."""
        return self._params[_COLUMNS.index(name)]

    def _set(self, row: int, *values: float) -> None:
        for column, value in zip(self._params, values, strict=True):
            column[row] = value  # a fill each: a copy from the host would wait for all launches


def _first_largest(scores: Tensor) -> Tensor:
    """The index of each row's largest score, the first of equals; NO_TOKEN where that score is infinite or NaN, which
    counts as the largest."""
    largest, chosen = scores.max(1)
    return torch.where(largest.isfinite(), chosen, NO_TOKEN)


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Copies of some rows. An index from the host would wait for all launches."""
    return torch.stack([values[row] for row in rows])


def _cut(warm: Tensor, limits: Mapping[int, int]) -> Tensor:
    """Scores [batch, vocab] with only the largest `limits[row]` of each limited row kept."""
    largest = _pick(warm, list(limits)).topk(max(limits.values())).values
    least = torch.full_like(warm[:, :1], -torch.inf)
    for place, (row, limit) in enumerate(limits.items()):
        least[row] = largest[place, limit - 1]
    return warm.masked_fill(warm < least, -torch.inf)


def _nuclei(shares: Tensor, top_p: Tensor) -> Tensor:
    """Shares [rows, vocab] with only the fewest kept that add up to `top_p` [rows, 1]: the likeliest first, and of
    equal ones the smaller id."""
    ordered, places = shares.sort(dim=1, descending=True, stable=True)
    counted = (ordered * _WHOLE).long()
    kept = _running_sums(counted) - counted < (top_p * _WHOLE).long()
    return torch.zeros_like(shares).scatter(1, places, ordered * kept)


def _running_sums(counted: Tensor) -> Tensor:
    """Cumulative sums of each row of int64 [rows, width]."""
    rows, width = counted.shape
    within = pad(counted, (0, -width % _BLOCK)).view(rows, -1, _BLOCK).cumsum(2)
    blocks = within[:, :, -1]
    return (within + (blocks.cumsum(1) - blocks)[:, :, None]).view(rows, -1)[:, :width]


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> Tensor:
    """The token, int64 [], after `logits` [vocab] at a position; NO_TOKEN where the logits are not finite. `seen` bool
    [vocab] marks tokens of the text."""
    choices = Choices(1, len(logits), logits.device)
    choices.begin(0, seen.nonzero()[:, 0].tolist(), sampling)
    token = _first_largest(logits[None].float())
    choices.replace(token, logits[None], {0: position})
    return token[0]


def most_asked(samplings: Iterable[Sampling]) -> int | None:
    """The largest number of likeliest tokens that a sampling asks for; None if none asks for log-probabilities."""
    return max((each.logprobs for each in samplings if each.logprobs is not None), default=None)


def report(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """int32 [batch, 1 + 2 * most]: the log-probabilities of each row's token and of its `most` likeliest tokens, as the
    bits of float32, then the ids of the likeliest. `logits` [batch, vocab], `tokens` [batch] integers. At most `vocab`
    tokens are reported."""
    shares = logits.float().log_softmax(1)
    best = shares.topk(min(most, shares.shape[1]), 1)
    chosen = shares.gather(1, tokens.long()[:, None])
    return torch.cat([chosen.view(torch.int32), best.values.view(torch.int32), best.indices.int()], 1)


def read_row(words: npt.NDArray[Any], sampling: Sampling) -> Logprobs | None:
    """The log-probabilities that a sampling asks for, from a row of `report` in any 32-bit type. Tokens whose logit is
    -inf are not among the likeliest."""
    if sampling.logprobs is None:
        return None
    most = (len(words) - 1) // 2
    shares = words[: 1 + most].view(np.float32).tolist()
    ids = words[1 + most :].view(np.int32).tolist()
    likeliest = list(zip(ids, shares[1:], strict=True))[: sampling.logprobs]
    return Logprobs(shares[0], tuple([(token, share) for token, share in likeliest if share > -inf]))
