"""Prompts that begin alike: what another sequence has read is not read again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.decode.growing import HostGranules
from flywheel.decode.prompts import LEAST, Prefill
from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Sequences
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 256)
CONTEXT, GRANULE = 160, 4096
BEGINNING = tuple(range(3, 3 + 40))


def session_of(batch: int, granules: HostGranules | None = None, seed: int = 1) -> ReferenceSession:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(SPEC, CONTEXT, DType.F32, batch), ScheduleConfig(), target)
    weights = random_weights(SPEC, seed, TORCH_DTYPES[DType.F32])
    return ReferenceSession(program, SPEC, weights, granules=granules)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill has read."""
    counts: list[int] = []
    forward = Prefill._forward

    def counted(prefill: Prefill, tokens: object, *where: object) -> None:
        counts.append(len(tokens))  # type: ignore[arg-type]
        forward(prefill, tokens, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(Prefill, "_forward", counted)
    return counts


def heard(sequences: Sequences, row: int, count: int) -> list[int]:
    """That many tokens of a row, while others go on."""
    found: list[int] = []
    while len(found) < count:
        found += [made.token for made in sequences.advance() if made.row == row]
    return found


def fresh(prompt: tuple[int, ...], count: int) -> list[int]:
    """What a session makes of a prompt that has seen no other."""
    sequences = session_of(1).sequences()
    assert sequences.join(0, prompt, len(prompt) + count, GREEDY) == 0
    return heard(sequences, 0, count)


def test_a_prompt_that_begins_as_a_live_one_reads_only_what_is_new(read: list[int]) -> None:
    sequences = session_of(3).sequences()
    first, second = (*BEGINNING, 1, 2), (*BEGINNING, 50, 51, 52)
    assert sequences.join(0, first, 60, GREEDY) == 0
    heard(sequences, 0, 3)
    assert sequences.join(2, second, 60, GREEDY) == len(BEGINNING)
    assert read == [len(first) - 1, len(second) - 1 - len(BEGINNING)]
    assert heard(sequences, 2, 8) == fresh(second, 8)


def test_a_turn_of_a_chat_goes_on_in_its_row_though_that_was_free_meanwhile(read: list[int]) -> None:
    sequences = session_of(2).sequences()
    sequences.join(0, BEGINNING, 60, GREEDY)
    answer = heard(sequences, 0, 6)
    sequences.leave(0)
    sequences.join(1, (9, 8, 7), 20, GREEDY)  # whose launches write position 0 of the free row
    heard(sequences, 1, 3)
    turn = (*BEGINNING, *answer, 5, 6)
    assert sequences.pick([0], turn) == 0
    assert sequences.join(0, turn, 70, GREEDY) == len(BEGINNING) + len(answer) - 1
    assert read == [len(BEGINNING) - 1, 2, 2]
    assert heard(sequences, 0, 8) == fresh(turn, 8)


def test_a_row_is_picked_that_holds_nothing_or_was_used_longest_ago() -> None:
    sequences = session_of(3).sequences()
    for row, last in ((1, 4), (0, 5)):
        sequences.join(row, (*BEGINNING[last:], last), 60, GREEDY)
        sequences.leave(row)
    assert sequences.pick([0, 1, 2], BEGINNING[::-1]) == 2
    assert sequences.pick([0, 1], BEGINNING[::-1]) == 1


@pytest.mark.parametrize("length", [LEAST - 1, LEAST])
def test_few_tokens_alike_are_read_again(length: int) -> None:
    sequences = session_of(2).sequences()
    sequences.join(0, BEGINNING, 50, GREEDY)
    other = (*BEGINNING[:length], *[60] * 9)
    assert sequences.join(1, other, 50, GREEDY) == (length if length >= LEAST else 0)
    assert heard(sequences, 1, 4) == fresh(other, 4)


def test_who_wants_none_reads_all_of_it_and_so_does_another_session() -> None:
    session = session_of(2)
    sequences = session.sequences()
    sequences.join(0, BEGINNING, 50, GREEDY)
    assert sequences.join(1, BEGINNING, 50, GREEDY, reuse=False) == 0
    sequences.close()
    assert session.sequences().join(0, BEGINNING, 50, GREEDY) == 0
    assert session_of(2, seed=2).sequences().join(0, BEGINNING, 50, GREEDY) == 0


def test_what_lost_its_memory_to_another_sequence_is_read_again() -> None:
    # Eight streams of 160 positions of 64 bytes: 20 granules, of which 43 positions take 13.
    session = session_of(2, HostGranules(limit_bytes=21 * GRANULE, nbytes=GRANULE))
    sequences = session.sequences()
    sequences.join(0, BEGINNING, 44, GREEDY)
    expected = heard(sequences, 0, 3)
    sequences.leave(0)
    sequences.join(1, [60] * 150, 151, GREEDY)
    assert not session.caches.reaches(0, 1)
    sequences.leave(1)
    assert sequences.join(0, BEGINNING, 44, GREEDY) == 0
    assert heard(sequences, 0, 3) == expected
