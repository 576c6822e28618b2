"""Log-probabilities of tokens: the log-softmax of a launch's logits, of the chosen token and of the likeliest
tokens."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flywheel.runtime.sequences import MOST_LIKELY, Logprobs, Sampling

WORDS: Final = 1 + 2 * MOST_LIKELY
"""Most 32-bit words of a row of `report`."""


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
