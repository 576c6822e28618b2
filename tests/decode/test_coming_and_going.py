"""Sequences that join, leave and run out of memory at random: their texts, and the memory behind their caches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from decode.test_prefixes import BEGINNING, CONTEXT, GRANULE, SPEC, session_of
from effort import sample

from flywheel.decode.growing import HostGranules
from flywheel.errors import CacheMemoryError
from flywheel.runtime.sequences import GREEDY, Sampling, Sequences


@dataclass
class Guest:
    """A sequence that somebody wants, and its tokens so far."""

    prompt: tuple[int, ...]
    positions: int
    sampling: Sampling
    heard: list[int] = field(default_factory=list)


def drawn(dice: random.Random, before: list[Guest]) -> Guest:
    """A new guest, who often begins as BEGINNING does or as an earlier one went on."""
    new = tuple(dice.randrange(SPEC.vocab) for _ in range(dice.randint(1, 30)))
    kind = dice.random()
    if kind < 0.3:
        new = (*BEGINNING[: dice.randint(1, len(BEGINNING))], *new)
    elif kind < 0.7 and before:
        other = dice.choice(before)
        new = (*other.prompt, *other.heard, *new)
    new = new[: CONTEXT - 20]
    sampling = Sampling(1.1, seed=dice.randrange(99)) if dice.random() < 0.3 else GREEDY
    return Guest(new, dice.randint(len(new), min(CONTEXT, len(new) + 30)), sampling)


def play(sequences: Sequences, dice: random.Random, moves: int) -> tuple[list[Guest], int]:
    """All guests who joined, and how often memory was out."""
    all_guests: list[Guest] = []
    here: dict[int, Guest] = {}
    refused = 0
    for _ in range(moves):
        free = [row for row in range(sequences.batch) if row not in here]
        if free and dice.random() < 0.5:
            guest = drawn(dice, all_guests)
            row = dice.choice(free)
            try:
                sequences.join(row, guest.prompt, guest.positions, guest.sampling, dice.random() < 0.9)
            except CacheMemoryError:
                refused += 1
                continue
            here[row] = guest
            all_guests.append(guest)
        if here and dice.random() < 0.2:
            row = dice.choice(list(here))
            sequences.leave(row)
            del here[row]
        for made in sequences.advance():
            here[made.row].heard.append(made.token)
        for row in sequences.lost():
            del here[row]
            refused += 1
        for row in [row for row, each in here.items() if len(each.prompt) - 1 + len(each.heard) == each.positions]:
            sequences.leave(row)
            del here[row]
    return all_guests, refused


@pytest.mark.parametrize("seed", sample(range(6)))
def test_whoever_comes_and_goes_a_text_is_that_of_a_fresh_session_and_all_granules_come_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 8)
    # A row of 160 positions takes 20 granules, and one is everybody's: three do not fit.
    granules = HostGranules(limit_bytes=36 * GRANULE, nbytes=GRANULE)
    session = session_of(3, granules)
    guests, refused = [], 0
    dice = random.Random(seed)
    for _ in range(2):  # sequences after sequences of one session
        sequences = session.sequences()
        more, times = play(sequences, dice, 60)
        sequences.close()
        guests += more
        refused += times
        assert len(granules._made) * GRANULE == session.caches.held_bytes + GRANULE
    assert refused and len(guests) > 20
    alone = session_of(1)
    for guest in guests:
        fresh = alone.sequences()
        fresh.join(0, guest.prompt, guest.positions, guest.sampling, reuse=False)
        heard: list[int] = []
        while len(heard) < len(guest.heard):
            heard += [made.token for made in fresh.advance()]
        assert heard == guest.heard
        fresh.close()
    session.caches.give_back()
    assert len(granules._made) == 1
    session.caches.close()
    assert not granules._made
