"""Guesses from the text itself: whatever is guessed, the text is the model's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import lines_run

from flywheel.decode.sequences import LONGEST, Lookup, accepted

Model = Callable[[Sequence[int]], int]
"""The token behind a text."""

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def model_of(seed: int, order: int) -> Model:
    """A model whose choice depends on the last tokens, and on how many there are."""
    return lambda text: hash((seed, tuple(text[-order:]), len(text) // 7)) % 4


def step(model: Model, text: list[int], guesses: Sequence[int]) -> list[int]:
    """What one launch gives: the model's choice behind the text, and behind each guess that follows it."""
    chosen = [model([*text, *guesses[:place]]) for place in range(len(guesses) + 1)]
    return chosen[: accepted(guesses, chosen)]


@given(TEXTS, st.integers(0, 99), st.integers(1, 4), st.data())
def test_any_guesses_leave_the_text_that_the_model_makes_alone(
    prompt: list[int], seed: int, order: int, data: st.DataObject
) -> None:
    model = model_of(seed, order)
    alone, guessed = list(prompt), list(prompt)
    for _ in range(12):
        guesses = data.draw(st.lists(st.integers(0, 3), max_size=7))
        guessed += step(model, guessed, guesses)
    while len(alone) < len(guessed):
        alone.append(model(alone))
    assert alone == guessed


@given(TEXTS, st.integers(1, 7))
def test_a_guess_is_what_stood_behind_the_longest_end_that_stood_there_before(text: list[int], count: int) -> None:
    expected: list[int] = []
    for size in range(min(LONGEST, len(text)), 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            grown = list(text)
            for place in range(count):
                grown.append(grown[ends[-1] + place])
            expected = grown[len(text) :]
            break
    assert Lookup(text).propose(count) == expected


@given(TEXTS, TEXTS)
@settings(max_examples=50)
def test_a_text_in_pieces_is_the_whole_text(first: list[int], second: list[int]) -> None:
    grown = Lookup(first)
    grown.extend(second)
    assert grown.propose(5) == Lookup(first + second).propose(5)


@pytest.mark.parametrize(
    ("proposed", "chosen", "count"),
    [((), (5,), 1), ((5,), (5, 6), 2), ((4,), (5, 6), 1), ((5, 6, 1), (5, 6, 7, 8), 3), ((1, 6), (5, 6, 7), 1)],
)
def test_guesses_count_up_to_the_first_wrong_one(
    proposed: tuple[int, ...], chosen: tuple[int, ...], count: int
) -> None:
    assert accepted(proposed, chosen) == count


def test_a_text_that_repeats_itself_takes_less_than_half_the_steps() -> None:
    period = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    text, launches = period * 3, 0
    lookup = Lookup(text)
    while len(text) < 130:
        made = step(lambda known: period[len(known) % len(period)], text, lookup.propose(3))
        text += made
        lookup.extend(made)
        launches += 1
    assert launches == 25  # four tokens each


def test_a_longer_text_costs_no_more_a_token() -> None:
    def work(length: int) -> int:
        lookup = Lookup([place % 50 for place in range(length)])

        def grow() -> None:
            lookup.extend([1])
            lookup.propose(4)

        return lines_run(grow)

    assert work(20_000) == work(200)


def test_the_recorded_acceptance_is_what_its_script_prints_today() -> None:
    root = Path(__file__).parents[2]
    script = [sys.executable, str(root / "experiments" / "lookup_acceptance.py")]
    printed = subprocess.run(script, cwd=root, capture_output=True, text=True, check=True).stdout
    recorded = (root / "results" / "lookup_acceptance.txt").read_text(encoding="utf-8")
    assert recorded.split("\n", 2)[2] == printed  # behind the command and the date
