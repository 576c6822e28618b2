"""Sequences that come and go, and what each of them gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flywheel.runtime.sequences import GREEDY, Sampling, Sequences


@dataclass(frozen=True)
class Voice:
    """A sequence: its prompt, how many tokens it wants, how they are chosen, and after how many it is cut off."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling = GREEDY
    leaves: int | None = None


def voices(count: int, vocab: int, context: int, seed: int) -> list[Voice]:
    """Voices of random lengths, of which some draw and some leave early."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        length = dice.randint(1, context // 3)
        tokens = dice.randint(1, context // 3)
        sampling = Sampling(1.2, top_p=0.9, seed=number) if number % 3 == 1 else GREEDY
        prompt = tuple(dice.randrange(vocab) for _ in range(length))
        found.append(Voice(prompt, tokens, sampling, dice.randint(1, tokens) if number % 4 == 2 else None))
    return found


def sing(sequences: Sequences, all_voices: Sequence[Voice]) -> list[list[int]]:
    """The tokens of each voice: they wait for a free row, in their order, and one joins between two launches."""
    waiting, singing = list(range(len(all_voices))), dict[int, int]()
    heard: list[list[int]] = [[] for _ in all_voices]
    while waiting or singing:
        free = [row for row in range(sequences.batch) if row not in singing]
        if waiting and free:
            number = waiting.pop(0)
            voice = all_voices[number]
            sequences.join(free[-1], voice.prompt, len(voice.prompt) + voice.tokens - 1, voice.sampling)
            singing[free[-1]] = number
        for row, token, _ in sequences.advance():
            number = singing[row]
            heard[number].append(token)
            voice = all_voices[number]
            if len(heard[number]) == (voice.leaves or voice.tokens):
                sequences.leave(row)
                del singing[row]
    return heard


def alone(make: Callable[[], Sequences], voice: Voice, row: int = 0) -> list[int]:
    """What a voice gets in a session in which nobody else is."""
    sequences = make()
    sequences.join(row, voice.prompt, len(voice.prompt) + voice.tokens - 1, voice.sampling)
    heard: list[int] = []
    while len(heard) < (voice.leaves or voice.tokens):
        heard += [made.token for made in sequences.advance()]
    sequences.close()
    return heard
