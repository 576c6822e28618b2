"""How likely tokens were, as torch's log_softmax says."""

from __future__ import annotations

import pytest
import torch

from flywheel.decode.choices import WORDS, read_row, report
from flywheel.errors import UsageError
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import GREEDY, MOST_LIKELY, Sampling

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64)


@pytest.mark.parametrize(("vocab", "most"), [(70, 0), (70, 5), (70, MOST_LIKELY), (3, MOST_LIKELY)])
def test_a_report_is_torchs_log_softmax(vocab: int, most: int) -> None:
    logits, tokens = torch.randn(3, vocab, generator=torch.manual_seed(1)) * 4, torch.tensor([2, 0, 1])
    words = report(logits, tokens, most).numpy()
    assert words.shape[1] <= WORDS
    shares = torch.log_softmax(logits, 1)
    for row, token in enumerate(tokens.tolist()):
        found = read_row(words[row], Sampling(logprobs=most))
        assert found is not None
        assert found.chosen == float(shares[row, token])
        best = shares[row].topk(min(most, vocab))
        assert found.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_a_row_gets_as_many_as_it_asks_for() -> None:
    words = report(torch.randn(1, 70), torch.tensor([4]), 9).numpy()[0]
    found = read_row(words, Sampling(logprobs=2))
    assert found is not None
    assert len(found.top) == 2
    assert read_row(words, GREEDY) is None


def test_more_than_can_be_asked_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"logprobs: 21 is not in 0\.\.20"):
        Sampling(logprobs=MOST_LIKELY + 1)
