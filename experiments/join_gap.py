"""Measures how long sequences that decode wait for a token while another one's prompt is read, by `flywheel.Decoder`.

    python experiments/join_gap.py llama3-8b --prompt 2048

Seven sequences decode; an eighth joins with a prompt, ROUNDS times with a new one, and then twice with the last one. A
gap is the time between two tokens of one of the seven, as the host gets them. It is given in steps: the median gap
while nobody joins. The first round also loads kernels of torch. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from statistics import median

from flywheel import Decoder
from flywheel.serve.answers import Answer

SHORT, AFTER, ROUNDS = 64, 24, 4


class Watch:
    """The gaps between the tokens of some answers, in ms."""

    def __init__(self, decoder: Decoder, answers: Sequence[Answer]) -> None:
        self._decoder, self._answers = decoder, answers
        self._last = [time.perf_counter()] * len(answers)

    def gaps(self) -> Iterator[float]:
        """Those of one launch."""
        self._decoder.advance()
        now = time.perf_counter()
        for place, answer in enumerate(self._answers):
            if answer.ready():
                yield (now - self._last[place]) * 1e3
                self._last[place] = now

    def skip(self, launches: int) -> None:
        """Let launches pass."""
        for _ in range(launches):
            list(self.gaps())


def join(decoder: Decoder, watch: Watch, prompt: Sequence[int]) -> tuple[list[float], float, Answer]:
    """(gaps of the others until AFTER launches behind its first token, ms to its first token, the answer)."""
    begun, found = time.perf_counter(), list[float]()
    answer = decoder.submit(prompt, max_tokens=AFTER + 1, ignore_end=True)
    while not (pieces := answer.ready()):
        found += watch.gaps()
    first_ms = (time.perf_counter() - begun) * 1e3
    for _ in range(AFTER):
        found += watch.gaps()
        pieces += answer.ready()
    return found, first_ms, answer


def main() -> None:
    """A line a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that joins")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "reference"])
    arguments = parser.parse_args()
    context, dice = arguments.prompt + 512, random.Random(1)
    with Decoder.load(
        arguments.model, device=arguments.device, context=context, max_sequences=arguments.rows
    ) as decoder:
        def drawn(length: int) -> list[int]:
            return [dice.randrange(decoder.vocab) for _ in range(length)]

        short = min(SHORT, arguments.prompt)
        others = [
            decoder.submit(drawn(short), max_tokens=context - short, ignore_end=True)
            for _ in range(arguments.rows - 1)
        ]
        watch = Watch(decoder, others)
        watch.skip(4 * arguments.rows)
        step = median(gap for _ in range(40) for gap in watch.gaps())
        print(f"{arguments.model}, {len(others)} decode by {decoder.schedule}: {step:.2f} ms a step", flush=True)
        prompt: list[int] = []
        for number in range(ROUNDS + 2):
            again = number >= ROUNDS
            prompt = prompt if again else drawn(arguments.prompt)
            gaps, first_ms, answer = join(decoder, watch, prompt)
            read = answer.prompt_read
            print(
                f"{'again' if again else f'round {number + 1}'}: {read.pieces} pieces, {read.reused} tokens copied, "
                f"first token after {first_ms:.1f} ms; the others: longest gap {max(gaps):.2f} ms = "
                f"{max(gaps) / step:.2f} steps, median {median(gaps) / step:.2f}",
                flush=True,
            )
            answer.close()
            watch.skip(20)


if __name__ == "__main__":
    main()
