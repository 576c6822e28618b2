"""Sequences that come and go between launches: each gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chorus import alone, sing, voices

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import UsageError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64)
CONTEXT = 40
CONFIGS = {
    "whole": ScheduleConfig(),
    "split": ScheduleConfig(
        tiling={"attention": {"kv_block": 16}},
        fusion_grouping=[["q_rope", "k_rope", "k_append", "v_append", "attention"]],
    ),
}


def session_of(config: str, batch: int, dtype: DType = DType.F32) -> ReferenceSession:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(SPEC, CONTEXT, dtype, batch), CONFIGS[config], target)
    return ReferenceSession(program, SPEC, random_weights(SPEC, 1, TORCH_DTYPES[dtype]))


@pytest.mark.parametrize(("config", "dtype"), [("whole", DType.F32), ("split", DType.BF16)])
def test_each_sequence_gets_what_it_gets_alone_whoever_comes_and_goes(config: str, dtype: DType) -> None:
    session, every = session_of(config, 3, dtype), voices(7, SPEC.vocab, CONTEXT, 5)
    together = sing(session.sequences(), every)
    for number, voice in enumerate(every):
        assert together[number] == alone(session.sequences, voice, number % 3)
    assert len({tuple(heard) for heard in together}) == len(every)


def test_one_sequence_is_what_a_session_of_one_streams() -> None:
    session = session_of("whole", 1)
    (voice, *_) = voices(1, SPEC.vocab, CONTEXT, 2)
    last = len(voice.prompt) - 1
    session.prefill(voice.prompt[:last])
    streamed = list(session.stream(voice.prompt, len(voice.prompt) + voice.tokens - 1, last))
    assert alone(session.sequences, voice) == streamed


def test_a_sequence_that_cannot_be_or_a_row_that_is_taken_is_refused() -> None:
    sequences = session_of("whole", 2).sequences()
    sequences.join(0, (1, 2), 8, GREEDY)
    for row, prompt, positions, words in (
        (0, (1,), 8, "row 0 is taken"),
        (1, (), 8, "without a token"),
        (1, (1, 70), 8, r"token 70 is not in 0\.\.69"),
        (1, (1,), CONTEXT + 1, r"position 40 is not in 0\.\.39"),
        (1, (1, 2, 3), 2, "2 positions for a prompt of 3 tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            sequences.join(row, prompt, positions, GREEDY)
    assert [made.row for made in sequences.advance()] == [0]


def test_a_sequence_at_its_end_makes_no_more_tokens() -> None:
    sequences = session_of("whole", 2).sequences()
    sequences.join(1, (1, 2), 3, GREEDY)
    assert [len(sequences.advance()) for _ in range(3)] == [1, 1, 0]
