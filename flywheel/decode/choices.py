"""How the tokens of several rows are chosen at once, each as its own request asks, where their logits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.sampling import Sampling

_SPREAD: Final = 0x9E3779B97F4A7C15
"""An odd number whose multiples differ in all bits: seeds next to each other draw nothing alike."""

_COLUMNS: Final = ("temperature", "log_min_p", "penalty", "greedy", "chosen")


class Choices:
    """The choice behind each launch, of `batch` rows of logits [batch, vocab] on a device.

    Every operation is one of all rows, and none takes results of one row into another, so that a row's token depends
    on its own logits, request and position. The draw is an exponential race: of scores divided by independent
    exponential numbers the largest wins with the probability that its score has. Nothing waits for the device.
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
        """No row asks for anything."""
        for row in range(self._params.shape[1]):
            self.free(row)

    def begin(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """A row is a request's from now on; its text begins with `prompt`."""
        self.free(row)
        if sampling.is_argmax:
            return
        self._asked[row] = sampling
        least = log(sampling.min_p) if sampling.min_p else -torch.inf
        warmth = 1.0 if sampling.is_greedy else sampling.temperature
        self._set(row, warmth, least, sampling.repetition_penalty, sampling.is_greedy, True)
        self._seen[row] = False
        self._seen[row, torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True
        self._noise[row] = 1.0

    def free(self, row: int) -> None:
        """A row takes the program's own choice from now on."""
        self._asked.pop(row, None)
        self._set(row, 1.0, -torch.inf, 1.0, True, False)

    def replace(self, tokens: Tensor, logits: Tensor, positions: Mapping[int, int]) -> None:
        """Put what rows draw into the place of the program's own choice in `tokens` [batch], integers. `positions` are
        those of the rows that the launch was for."""
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
            self._seen.scatter_(1, tokens.long()[:, None], True)

    def _choose(self, scores: Tensor, asked: Mapping[int, Sampling]) -> Tensor:
        """[batch] of logits. What no row asks for is left out; it would change nothing. What orders a vocabulary takes
        longest, and is done for each row that asks, alone: a sum over several rows may round otherwise."""
        every = asked.values()
        if any(each.repetition_penalty != 1.0 for each in every):
            penalty = self._column("penalty")
            scores = torch.where(self._seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        if all(each.is_greedy for each in every):
            return scores.argmax(1)
        warm = scores / self._column("temperature")
        if any(0 < each.top_k < self._vocab for each in every):
            warm = self._cut(warm, asked)
        if any(each.min_p > 0.0 for each in every):
            warm = warm.masked_fill(warm < warm.amax(1, keepdim=True) + self._column("log_min_p"), -torch.inf)
        shares = warm.softmax(1)
        if any(each.top_p < 1.0 for each in every):
            for row, each in asked.items():
                if each.top_p < 1.0:
                    shares[row] = _nucleus(shares[row], each.top_p)
        return torch.where(self._column("greedy") > 0, scores, shares / self._noise).argmax(1)

    def _cut(self, warm: Tensor, asked: Mapping[int, Sampling]) -> Tensor:
        """The scores without those behind the last of the `top_k` that a row asks for."""
        least = torch.full_like(warm[:, :1], -torch.inf)
        for row, each in asked.items():
            if 0 < each.top_k < self._vocab:
                least[row] = warm[row].topk(each.top_k, sorted=False).values.amin()
        return warm.masked_fill(warm < least, -torch.inf)

    def _column(self, name: str) -> Tensor:
        """[batch, 1]."""
        return self._params[_COLUMNS.index(name)]

    def _set(self, row: int, *values: float) -> None:
        for column, value in zip(self._params, values, strict=True):
            column[row] = value  # a fill each: a copy from the host would wait for all launches


def _nucleus(shares: Tensor, top_p: float) -> Tensor:
    """Shares [vocab] without those behind the fewest, likeliest first, that add up to `top_p`."""
    ordered, places = shares.sort(descending=True)
    kept = ordered.cumsum(0) - ordered < top_p
    return torch.zeros_like(shares).scatter(0, places, ordered * kept)


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, position: int) -> Tensor:
    """The token, int64 [], behind `logits` [vocab] at a position; `seen` bool [vocab] are the tokens of the text."""
    choices = Choices(1, len(logits), logits.device)
    choices.begin(0, seen.nonzero()[:, 0].tolist(), sampling)
    token = logits.argmax()[None]
    choices.replace(token, logits[None], {0: position})
    return token[0]
