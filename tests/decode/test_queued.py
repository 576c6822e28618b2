"""Launches queued ahead of the host, on a GPU that is late: no token is lost, and none is another sequence's."""

from __future__ import annotations

from contextlib import closing

import pytest
from chorus import alone, sing, voices
from decode.late_gpu import CONTEXT, GRANULE, SPEC, late_sequences, speech

from flywheel.decode.queued import AHEAD, QueuedSequences, decode_ahead
from flywheel.errors import CacheMemoryError
from flywheel.runtime.sequences import GREEDY


def test_sequences_that_come_and_go_get_what_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    every = voices(20, SPEC.vocab, CONTEXT, 5)
    with closing(late_sequences(monkeypatch, 3)[0]) as sequences:
        heard = sing(sequences, every)
    for number, voice in enumerate(every):
        if voice.sampling == GREEDY:
            assert heard[number] == speech(voice.prompt, len(heard[number]))
        else:
            assert heard[number] == alone(lambda: late_sequences(monkeypatch, 3)[0], voice, number % 3)


def test_launches_are_queued_ahead_and_none_behind_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, program, _ = late_sequences(monkeypatch, 1)
    sequences.join(0, [3, 1, 4], 20, GREEDY)
    seen = [program.launches for _ in iter(sequences.advance, [])]
    assert seen == [min(1 + AHEAD + made, 18) for made in range(18)]


def drain(sequences: QueuedSequences) -> tuple[dict[int, list[int]], dict[int, CacheMemoryError], list[int]]:
    """(tokens by row, rows lost, those that were lost with each advance) until nothing comes."""
    heard: dict[int, list[int]] = {}
    lost: dict[int, CacheMemoryError] = {}
    when = []
    while True:
        made = sequences.advance()
        for each in made:
            assert each.row not in lost
            heard.setdefault(each.row, []).append(each.token)
        new = sequences.lost()
        lost |= new
        when.append(len(new))
        if not made and not new:
            return heard, lost, when


def test_a_sequence_that_cannot_grow_ends_behind_all_tokens_that_its_memory_holds(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    # One granule is everybody's. Values begin 512 bytes into their first one, and end first: behind position 119.
    sequences, program, _ = late_sequences(monkeypatch, 1, granules=1 + 4)
    reach = (2 * GRANULE - 512) // 64
    sequences.join(0, [5, 6, 7], CONTEXT, GREEDY)
    heard, lost, when = drain(sequences)
    assert heard == {0: speech([5, 6, 7], reach - 2)}
    assert program.launches == reach - 2
    assert f"KV caches: {reach + 1:,} positions of a sequence take" in str(lost[0])
    assert when == [0] * (reach - 3) + [1, 0]


def test_the_others_go_on_by_the_memory_of_one_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, _, caches = late_sequences(monkeypatch, 2, granules=1 + 8)
    prompts = ([5, 6, 7], [8] * 9)
    for row, prompt in enumerate(prompts):
        sequences.join(row, prompt, 130, GREEDY)
    heard, lost, _ = drain(sequences)
    (ended,) = lost
    other = 1 - ended
    assert heard[other] == speech(prompts[other], 130 - len(prompts[other]) + 1)
    assert heard[ended] == speech(prompts[ended], len(heard[ended]))
    assert len(heard[ended]) > 40
    assert caches.held_bytes <= 8 * GRANULE
    sequences.join(ended, [1, 2], 5, GREEDY)
    assert drain(sequences)[0] == {ended: speech([1, 2], 4)}


def test_a_row_that_is_left_before_its_last_tokens_are_read_is_not_lost_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, program, _ = late_sequences(monkeypatch, 1, granules=1 + 4)
    sequences.join(0, [5, 6, 7], CONTEXT, GREEDY)
    before = 0
    while program.launches > before:  # until no memory is found for another one
        before = program.launches
        assert sequences.advance()
    assert not sequences.lost()
    sequences.leave(0)
    sequences.join(0, [9, 9], 6, GREEDY)
    assert drain(sequences)[:2] == ({0: speech([9, 9], 5)}, {})


def test_a_stream_that_cannot_grow_raises_behind_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    _, program, caches = late_sequences(monkeypatch, 1, granules=1 + 4)
    caches.hold(0, 1)
    loaded: object = program
    heard = []
    with pytest.raises(CacheMemoryError, match="positions of a sequence take"):
        for token in decode_ahead(loaded, caches, [4, 2], CONTEXT, 0, GREEDY, 1.0):  # type: ignore[arg-type]
            heard.append(token)
    assert heard == speech([4, 2], len(heard))
    assert len(heard) == program.launches - 1
