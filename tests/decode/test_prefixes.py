"""Prompts that begin alike: what another sequence has read is not read again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flywheel.decode.growing import HostGranules
from flywheel.decode.prefixes import BLOCK, Prefixes, _Check, keys_of
from flywheel.decode.prompts import Prefill
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.sequences import SteppedSequences
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
SHARED = len(BEGINNING) // BLOCK * BLOCK
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * BLOCK
"""Keys and values of two layers of two heads of 16 floats."""


def session_of(batch: int, granules: HostGranules | None = None, seed: int = 1) -> ReferenceSession:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(SPEC, CONTEXT, DType.F32, batch), ScheduleConfig(), target)
    weights = random_weights(SPEC, seed, TORCH_DTYPES[DType.F32])
    return ReferenceSession(program, SPEC, weights, granules=granules)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each chunk that was read."""
    counts: list[int] = []
    enter = Prefill.enter

    def counted(prefill: Prefill, tokens: torch.Tensor, start: int, caches: object, row: int) -> object:
        counts.append(len(tokens))
        return enter(prefill, tokens, start, caches, row)  # type: ignore[arg-type]

    monkeypatch.setattr(Prefill, "enter", counted)
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
    sequences.join(0, prompt, len(prompt) + count, GREEDY)
    return heard(sequences, 0, count)


def test_a_prompt_that_begins_as_a_live_one_reads_only_what_is_new(read: list[int]) -> None:
    sequences = session_of(3).sequences()
    first, second = (*BEGINNING, 1, 2), (*BEGINNING, 50, 51, 52)
    sequences.join(0, first, 60, GREEDY)
    heard(sequences, 0, 3)
    sequences.join(2, second, 60, GREEDY)
    tokens = heard(sequences, 2, 8)
    assert [sequences.read_of(row).reused for row in (0, 2)] == [0, SHARED]
    assert read == [len(first) - 1, len(second) - 1 - SHARED]
    assert tokens == fresh(second, 8)


def test_equal_prompts_that_come_together_are_read_once(read: list[int]) -> None:
    sequences = session_of(3).sequences()
    for row in range(3):
        sequences.join(row, BEGINNING, 60, GREEDY)
    tokens = {row: heard(sequences, row, 5) for row in (2, 1, 0)}
    assert [sequences.read_of(row).reused for row in range(3)] == [0, SHARED, SHARED]
    assert read == [len(BEGINNING) - 1, *[len(BEGINNING) - 1 - SHARED] * 2]
    assert tokens[2] == fresh(BEGINNING, 5)


@pytest.mark.parametrize("row", [0, 1])
def test_a_turn_of_a_chat_reads_only_what_is_new_in_any_row(row: int, read: list[int]) -> None:
    sequences = session_of(2).sequences()
    sequences.join(0, BEGINNING, 80, GREEDY)
    answer = heard(sequences, 0, 25)
    sequences.leave(0)
    sequences.join(1 - row, (9, 8, 7), 20, GREEDY)  # whose launches write position 0 of the free row
    heard(sequences, 1 - row, 3)
    turn = (*BEGINNING, *answer, 5, 6)
    sequences.join(row, turn, 90, GREEDY)
    tokens = heard(sequences, row, 8)
    held = (len(BEGINNING) + len(answer) - 1) // BLOCK * BLOCK  # the last token is not cached
    assert sequences.read_of(row).reused == held > SHARED
    assert read == [len(BEGINNING) - 1, 2, len(turn) - 1 - held]
    assert tokens == fresh(turn, 8)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK - 1])
def test_whole_blocks_alike_are_copied(length: int) -> None:
    sequences = session_of(2).sequences()
    sequences.join(0, BEGINNING, 50, GREEDY)
    other = (*BEGINNING[:length], *[60] * 19)
    sequences.join(1, other, 60, GREEDY)
    tokens = heard(sequences, 1, 4)
    assert sequences.read_of(1).reused == length // BLOCK * BLOCK
    assert tokens == fresh(other, 4)


def test_a_block_is_not_found_behind_another_beginning() -> None:
    sequences = session_of(2).sequences()
    sequences.join(0, BEGINNING, 50, GREEDY)
    other = (1, *BEGINNING[1:])
    sequences.join(1, other, 50, GREEDY)
    assert heard(sequences, 1, 4) == fresh(other, 4)
    assert sequences.read_of(1).reused == 0


def test_the_last_token_of_a_prompt_is_decoded_though_blocks_hold_it() -> None:
    sequences = session_of(1).sequences()
    for prompt, reused in ((BEGINNING[:33], 0), (BEGINNING[:32], 16), (BEGINNING[:33], 32)):
        sequences.join(0, prompt, 60, GREEDY)
        assert heard(sequences, 0, 4) == fresh(prompt, 4)
        assert sequences.read_of(0).reused == reused
        sequences.leave(0)


def test_who_wants_none_reads_all_of_it_and_so_does_another_session() -> None:
    session = session_of(2)
    sequences = session.sequences()
    for row, reuse in ((0, True), (1, False)):
        sequences.join(row, BEGINNING, 50, GREEDY, reuse)
        heard(sequences, row, 1)
        assert sequences.read_of(row).reused == 0
    sequences.close()
    for other in (session, session_of(2, seed=2)):
        again = other.sequences()
        again.join(0, BEGINNING, 50, GREEDY)
        heard(again, 0, 1)
        assert again.read_of(0).reused == 0


def test_blocks_outlive_the_memory_of_their_row() -> None:
    # Eight streams of 160 positions of 64 bytes: 20 granules, of which 43 positions take 13.
    session = session_of(2, HostGranules(limit_bytes=21 * GRANULE, nbytes=GRANULE))
    sequences = session.sequences()
    sequences.join(0, BEGINNING, 44, GREEDY)
    expected = heard(sequences, 0, 3)
    sequences.leave(0)
    sequences.join(1, [60] * 150, 151, GREEDY)
    heard(sequences, 1, 1)
    assert not session.caches.reaches(0, 1)
    sequences.leave(1)
    sequences.join(0, BEGINNING, 44, GREEDY)
    assert heard(sequences, 0, 3) == expected
    assert sequences.read_of(0).reused == SHARED


def test_the_least_recently_used_blocks_go_first_and_the_ends_of_texts_before_their_beginnings() -> None:
    session = session_of(1)
    prefixes = Prefixes(session.caches, 5 * BLOCK_BYTES + 1)
    texts = [[token] * (3 * BLOCK) for token in range(3)]
    for text in texts[:2]:
        session.prefill(text)
        prefixes.save(0, keys_of(text))
    held = [prefixes.find(keys_of(text), wait=False) for text in texts]
    assert [len(blocks or []) for blocks in held] == [2, 3, 0]
    prefixes.find(keys_of(texts[0]), wait=False)
    session.prefill(texts[2])
    prefixes.save(0, keys_of(texts[2]))
    held = [prefixes.find(keys_of(text), wait=False) for text in texts]
    assert [len(blocks or []) for blocks in held] == [2, 0, 3]


def test_of_a_text_that_exceeds_the_bound_the_beginning_stays() -> None:
    session = session_of(1)
    prefixes = Prefixes(session.caches, 2 * BLOCK_BYTES)
    text = list(range(3 * BLOCK))
    session.prefill(text)
    prefixes.save(0, keys_of(text))
    blocks = prefixes.find(keys_of(text), wait=False)
    assert blocks is not None and len(blocks) == 2
    assert sum(block.untyped_storage().nbytes() for block in blocks) == 2 * BLOCK_BYTES
    small = Prefixes(session.caches, BLOCK_BYTES - 1)
    small.save(0, keys_of(text))
    assert small.find(keys_of(text), wait=False) == []


def test_where_a_sequence_finds_no_memory_the_blocks_give_theirs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(2, HostGranules(limit_bytes=27 * GRANULE, nbytes=GRANULE))
    sequences = session.sequences()
    assert isinstance(sequences, SteppedSequences)
    sequences.join(0, BEGINNING, 44, GREEDY)
    heard(sequences, 0, 1)
    assert sequences._prefixes.find(keys_of(BEGINNING), wait=True)
    hold, tried = session.caches.hold, list[int]()

    def held(row: int, positions: int, *, may_take: bool = False) -> None:
        tried.append(len(sequences._prefixes._blocks))
        hold(row, positions, may_take=may_take)

    monkeypatch.setattr(session.caches, "hold", held)
    with pytest.raises(Exception, match="KV caches: 150 positions of a sequence take"):
        sequences.join(1, [60] * 150, 151, GREEDY)
    assert tried == [2, 0]
    assert heard(sequences, 0, 3) == fresh(BEGINNING, 4)[1:]


def test_nobody_waits_until_the_device_has_told_whether_a_block_is_finite(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, known = session_of(2).sequences(), []
    monkeypatch.setattr(_Check, "is_over", property(lambda _: bool(known)))
    sequences.join(0, BEGINNING, 60, GREEDY)
    heard(sequences, 0, 2)
    sequences.join(1, BEGINNING, 60, GREEDY)
    told = [made.row for _ in range(5) for made in sequences.advance()]
    assert told == [0] * 5 and len(read) == 1
    known.append(True)
    assert heard(sequences, 1, 4) == fresh(BEGINNING, 4)
    assert sequences.read_of(1).reused == SHARED
    known.clear()
    sequences.leave(0)
    sequences.leave(1)
    sequences.join(0, BEGINNING, 60, GREEDY)  # alone, so it waits for the device
    assert [made.row for made in sequences.advance()] == [0]
    assert sequences.read_of(0).reused == SHARED


def test_a_copy_for_which_memory_is_short_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(1)
    prefixes = Prefixes(session.caches)
    session.prefill(BEGINNING)
    prefixes.save(0, keys_of(BEGINNING[:BLOCK]))

    def short(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(session.caches, "save", short)
    prefixes.save(0, keys_of(BEGINNING))
    assert prefixes.find(keys_of(BEGINNING), wait=True) == []
