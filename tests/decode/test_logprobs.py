"""How likely tokens were, as torch's log_softmax says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flywheel.decode.choices import WORDS, read_row, report
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import UsageError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
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


def test_sequences_that_ask_get_the_shares_of_their_logits_and_nobody_else_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(SPEC, 40, DType.F32, 2), ScheduleConfig(), target)
    session = ReferenceSession(program, SPEC, random_weights(SPEC, 1, torch.float32))
    sequences = session.sequences()
    sequences.join(0, (1, 2), 8, GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr("flywheel.decode.sequences.report", None)
        assert [made.logprobs for made in sequences.advance()] == [None]
    sequences.join(1, (5, 6, 7), 8, Sampling(1.5, seed=3, logprobs=4))
    first, second = sequences.advance()
    assert first.logprobs is None
    assert second.logprobs is not None
    again = ReferenceSession(program, SPEC, random_weights(SPEC, 1, torch.float32))
    again.prefill((5, 6), 1)
    shares = again.step_rows([0, 7], [0, 2])[1].logits.log_softmax(0)
    assert second.logprobs.chosen == float(shares[second.token])
    assert [token for token, _ in second.logprobs.top] == shares.topk(4).indices.tolist()
