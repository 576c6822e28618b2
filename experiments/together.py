"""Times a token of each of several sequences that decode together, by `flywheel.Decoder` on this machine's GPU.

    python experiments/together.py llama3-8b --max-sequences 1 8 --sampling greedy warm top_p

It varies the number of rows, the number of running sequences and the sampling. After the first tokens of all sequences,
TOKENS launches are timed by the host's clock, in ms a launch, which is ms a token of each sequence. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from flywheel import Decoder
from flywheel.runtime.sequences import GREEDY, Sampling
from flywheel.serve.answers import Answer

CONTEXT, PROMPT, TOKENS, ROUNDS = 512, 64, 120, 3
WAYS = {
    "greedy": GREEDY,
    "warm": Sampling(0.8, seed=1),
    "top_p": Sampling(0.8, top_p=0.95, seed=1),
    "penalty": Sampling(0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=1),
}


def measure(decoder: Decoder, count: int, sampling: Sampling) -> float:
    """ms a launch of `count` sequences."""
    prompt = list(range(1, PROMPT + 1))
    answers: list[Answer] = []
    for number in range(count):
        answers.append(decoder.generate([*prompt, number], max_tokens=TOKENS + 60, sampling=sampling, ignore_end=True))
        answers[-1].begin()
    for _ in range(count + 20):
        decoder.advance()
    started = time.perf_counter()
    for _ in range(TOKENS):
        decoder.advance()
    took = time.perf_counter() - started
    for answer in answers:
        answer.close()
    return took / TOKENS * 1e3


def main() -> None:
    """A line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--max-sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--sampling", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "reference"])
    arguments = parser.parse_args()
    for name in arguments.models:
        for rows in arguments.max_sequences:
            with Decoder.load(name, device=arguments.device, context=CONTEXT, max_sequences=rows) as decoder:
                print(f"{name}, {rows} rows, {decoder.schedule}")
                for way in arguments.sampling:
                    for count in sorted({1, rows}):
                        found = [measure(decoder, count, WAYS[way]) for _ in range(ROUNDS)]
                        print(f"  {count} of {rows}, {way}: {median(found):.3f} ms a token of each", flush=True)


if __name__ == "__main__":
    main()
