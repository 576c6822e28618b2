"""Launches queued ahead of the host, on a GPU that is late: no token is lost, and none is another sequence's."""

from __future__ import annotations

from contextlib import closing

import pytest
from chorus import alone, sing, voices
from decode.late_gpu import CONTEXT, GRANULE, SPEC, LateReading, late_sequences, speech

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


def test_a_prompt_is_read_between_launches_of_which_few_are_queued_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, program, _ = late_sequences(monkeypatch, 2)
    for row in (1, 0):
        sequences.join(row, [3, 1, 4], 100, GREEDY)
        heard = [sequences.advance() for _ in range(4)]
        sequences.leave(1)
    prompt, pieces, queued = [5] * 30, [], []
    read = LateReading.read

    def counted(reading: LateReading, layers: int) -> None:
        pieces.append(program.launches)
        read(reading, 1)

    monkeypatch.setattr(LateReading, "read", counted)
    sequences.join(1, prompt, 40, GREEDY)
    done = program.launches - AHEAD
    while not any(made.row == 1 for made in heard[-1]):
        heard.append(sequences.advance())
        done += 1
        queued.append(program.launches - done)
    assert pieces == list(range(pieces[0], pieces[0] + 3 * 6))  # one before each launch: three layers of six chunks
    assert queued[:4] == [AHEAD - 1, AHEAD - 2, 1, 1] and set(queued[2:-2]) == {1}
    tokens = [made.token for some in heard for made in some if made.row == 0]
    assert tokens == speech([3, 1, 4], len(tokens))
    assert drain(sequences)[0][1] == speech(prompt, 11)[1:]


@pytest.mark.parametrize("granules", [None, 1 + 8])
def test_a_row_gets_memory_for_a_prompt_once_the_launches_are_over_while_others_get_their_tokens(
    granules: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, program, caches = late_sequences(monkeypatch, 2, granules)
    sequences.join(0, [3, 1, 4], 190, GREEDY)
    heard = [sequences.advance() for _ in range(3)]
    assert program.launches == 3 + AHEAD
    prompt = [5] * (12 if granules is None else 199)
    sequences.join(1, prompt, 200, GREEDY)
    monkeypatch.setattr(sequences._rows, "settle", None)  # which would wait for all launches at once
    heard += [sequences.advance() for _ in range(AHEAD)]
    assert not caches.reaches(1, 10)
    heard += [sequences.advance() for _ in range(20)]
    assert all(any(made.row == 0 for made in some) for some in heard)
    lost = sequences.lost()
    tokens = {row: [made.token for some in heard for made in some if made.row == row] for row in (0, 1)}
    if granules is None:
        assert lost == {} and len(tokens[1]) > 5
        assert caches.reaches(1, 12)
    else:
        assert list(lost) == [1] and isinstance(lost[1], CacheMemoryError)
        assert "199 positions of a sequence take" in str(lost[1])
    assert tokens == {0: speech([3, 1, 4], len(tokens[0])), 1: speech(prompt, len(tokens[1]))}


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
