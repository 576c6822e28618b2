"""Measures the gain of prompt lookup decoding: tokens per launch and us per token, on texts with and without
repetition.

    python experiments/lookup_speed.py --model llama3.2-1b --guesses 3

Weights are random, so a model's own text means nothing. The texts are known (those of `lookup_acceptance.py`), and each
choice of the program is replaced by the token that the text has there. Everything else is as ever: guesses from the
text so far, launches of 1 + guesses rows on one cache, the host that awaits each. "alone" is the program of one row,
whose launches are queued ahead, at the positions of the first text. Last comes the model's own greedy text: with
guesses, with none by the same program, which must be the same, and with none by the program of one row, whose roundings
differ. With `--device reference`, a small model shows the same tokens a launch, and times mean nothing.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from lookup_acceptance import EDITED, READ, SUMMARISED, TEXTS, summary_of, tokens_of

from flywheel.decode.opening import open_session
from flywheel.decode.sequences import SteppedSequences
from flywheel.decode.session import DecodeSession, Positions, Step, positions_of
from flywheel.decode.source import Source, open_source
from flywheel.lowering.lower import lower
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import GREEDY, Sampling
from flywheel.search.knowledge.chosen import choose_schedule
from flywheel.search.workload import Workload, find_target

SMALL = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 2048, 1e4, 1e-6, 2048)
ROUNDS = 3


class Known:
    """A session's launches, whose choices are the tokens of a known text."""

    def __init__(self, launches: Any, text: Sequence[int]) -> None:
        self._launches, self._text = launches, text
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launches, name)

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """As SteppedSequences asks, of one sequence."""
        self.count += 1
        steps: list[Step] = self._launches.step_rows(token_ids, position, wanted)
        if not self._text:
            return steps
        (place,) = positions_of(position, 1)
        behind = [self._text[min(place + lane + 1, len(self._text) - 1)] for lane in range(len(steps))]
        return [Step(step.logits, token) for step, token in zip(steps, behind, strict=True)]


def main() -> None:
    """Print a line a text, and one of the model's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--length", type=int, default=400, help="tokens of each prompt, and of each answer")
    parser.add_argument("--device", default="cuda", choices=["cuda", "reference"])
    arguments = parser.parse_args()
    source = open_source(arguments.model)
    if arguments.device == "reference":
        source = Source("small", SMALL, None, None)
    context, guesses = 2 * arguments.length + 8, arguments.guesses
    print(f"{source.name} on {arguments.device}, {guesses} guesses a launch, context {context}", flush=True)
    texts = dict(known_texts(arguments.length, source.spec.vocab))
    prompt = next(iter(texts.values()))[0]
    positions = len(prompt) + arguments.length - 1
    with opened(source, arguments, context, 1) as session:
        alone, own = timed(lambda: list(session.stream(prompt, positions, len(prompt) - 1)), session, prompt)
    print(f"alone: {alone:.1f} us a token", flush=True)
    with opened(source, arguments, context, guesses + 1) as session:
        for what, (prompt, answer) in texts.items():
            launches, us = followed(session, prompt, answer)
            print(f"{what}: {len(answer) / launches:.2f} tokens a launch, {us:.1f} us a token, {alone / us:.2f} times")
        prompt = next(iter(texts.values()))[0]
        by, none = (own_text(session, prompt, positions, each) for each in (GREEDY, Sampling(lookup=False)))
        assert by[0] == none[0], "guesses changed the text"
        alike = next((place for place, pair in enumerate(zip(by[0], own, strict=True)) if len(set(pair)) > 1), len(own))
        print(
            f"its own text: {len(by[0]) / by[1]:.2f} tokens a launch, {by[2]:.1f} us a token, {none[2]:.1f} without "
            f"guesses; the same text; that of one row for the first {alike} of {len(own)} tokens"
        )


def known_texts(length: int, vocab: int) -> Iterator[tuple[str, tuple[list[int], list[int]]]]:
    """(name, (prompt, answer)) of each text, twice `length` tokens together."""
    for name, old, new in EDITED:
        prompt, answer = tokens_of(TEXTS[name]), tokens_of(re.sub(rf"\b{old}\b", new, TEXTS[name]))
        yield f"{name}, {old} -> {new}", numbered(prompt[:length], answer[:length], vocab)
    for name in SUMMARISED:  # most of the tokens are the prompt's, since a summary is shorter
        prompt = tokens_of(TEXTS[name])[: length * 3 // 2]
        answer = tokens_of(summary_of("".join(prompt)))
        yield f"{name}, its summary", numbered(prompt, answer[: length // 2], vocab)
    for name in READ:
        read = tokens_of(TEXTS[name])
        yield f"{name}, read on", numbered(read[:length], read[length : 2 * length], vocab)


def numbered(prompt: list[str], answer: list[str], vocab: int) -> tuple[list[int], list[int]]:
    """The tokens as ids."""
    numbers = {token: number % vocab for number, token in enumerate(dict.fromkeys([*prompt, *answer]))}
    return [numbers[token] for token in prompt], [numbers[token] for token in answer]


@contextmanager
def opened(source: Source, arguments: argparse.Namespace, context: int, lanes: int) -> Iterator[DecodeSession]:
    """The model by the schedule that it has for so many rows, as lanes of one sequence."""
    work = Workload(source.name, source.spec, find_target(arguments.gpu), "bf16", context, lanes)
    chosen = choose_schedule(work)
    print(f"{lanes} rows: {chosen.words}", flush=True)
    program = lower(work.graph_of(lanes), chosen.config, work.target)
    with ExitStack() as undo:
        yield open_session(program, source, 0, arguments.device, undo)[0]


def timed(decode: Any, session: DecodeSession, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """(median us a token of ROUNDS, the tokens)."""
    found = []
    for _ in range(ROUNDS + 1):
        session.prefill(prompt[:-1])
        settle()
        start = time.perf_counter()
        tokens = decode()
        found.append((time.perf_counter() - start) * 1e6 / len(tokens))
    return median(found[1:]), tokens


def followed(session: DecodeSession, prompt: list[int], answer: list[int]) -> tuple[int, float]:
    """(launches of a known answer, median us a token of ROUNDS)."""
    found = []
    for _ in range(ROUNDS + 1):
        sequences = session.sequences()
        assert isinstance(sequences, SteppedSequences)
        known = sequences._session = Known(sequences._session, [*prompt, *answer])
        sequences.join(0, prompt, len(prompt) + len(answer) - 1, GREEDY, reuse=False)
        sequences._read()
        settle()
        start = time.perf_counter()
        heard = [made.token for made in drained(sequences)]
        found.append((time.perf_counter() - start) * 1e6 / len(heard))
        assert heard == answer, "the text is another one"
        sequences.close()
    return known.count, median(found[1:])


def own_text(
    session: DecodeSession, prompt: list[int], positions: int, sampling: Sampling
) -> tuple[list[int], int, float]:
    """(the model's own tokens, launches, us a token)."""
    sequences = session.sequences()
    assert isinstance(sequences, SteppedSequences)
    known = sequences._session = Known(sequences._session, ())
    sequences.join(0, prompt, positions, sampling, reuse=False)
    sequences._read()
    settle()
    start = time.perf_counter()
    heard = [made.token for made in drained(sequences)]
    us = (time.perf_counter() - start) * 1e6 / len(heard)
    sequences.close()
    return heard, known.count, us


def settle() -> None:
    """Wait until torch has read the prompt."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def drained(sequences: SteppedSequences) -> Iterator[Any]:
    """All that sequences make."""
    while made := sequences.advance():
        yield from made


if __name__ == "__main__":
    main()
