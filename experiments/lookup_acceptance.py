"""Counts the tokens that one launch would yield with prompt lookup decoding, for known answers, without a model or a
GPU.

An answer that edits code is a file with a name changed, and its prompt is the file itself. A summary's prompt is a
document, and it copies the headings, and the first sentence of each paragraph and list item. A text without repetition
is a document, with its own beginning as the prompt. Tokens are words, gaps and signs. A launch yields the model's token
and as many more as draft tokens were right. The texts are this repository's files at commit 99d3313, kept in
lookup_texts.json.xz, so that later edits of the files change no result.

    python experiments/lookup_acceptance.py > results/lookup_acceptance.txt
"""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

from flywheel.decode.sequences import Lookup, accepted

TEXTS: dict[str, str] = json.loads(lzma.decompress((Path(__file__).parent / "lookup_texts.json.xz").read_bytes()))
"""Name of a file -> its text."""
EDITED = (
    ("flywheel/decode/choices.py", "row", "place"),
    ("flywheel/ir/positions.py", "task", "job"),
    ("flywheel/vm/cuda/sync.cuh", "counter", "tally"),
)
READ = SUMMARISED = ("docs/serve.md", "docs/decode.md")


def tokens_of(text: str) -> list[str]:
    """Words, gaps and signs."""
    return re.findall(r"\w+|\s+|.", text)


def summary_of(text: str) -> str:
    """Its headings, and the first sentence of each paragraph and item outside of listings and tables; a line each."""
    lines, listed = [], False
    for block in text.split("\n\n"):
        fences = block.count("```")
        if not (listed or fences or block.startswith("|")):
            parts = [block] if block.startswith("#") else re.split(r"\n(?=- )", block)
            lines += [" ".join(re.split(r"(?<=[.:])\s", part)[0].split()) for part in parts]
        listed ^= fences % 2 == 1
    return "\n".join(lines)


def launches(prompt: list[str], answer: list[str], guesses: int) -> int:
    """How many an answer takes, each with so many guesses."""
    numbers = {token: number for number, token in enumerate(dict.fromkeys([*prompt, *answer]))}
    lookup, known = Lookup([numbers[token] for token in prompt]), [numbers[token] for token in answer]
    done = count = 0
    while done < len(known):
        guessed = lookup.propose(guesses)[: len(known) - done - 1]
        made = known[done : done + accepted(guessed, known[done : done + len(guessed) + 1])]
        lookup.extend(made)
        done += len(made)
        count += 1
    return count


def main() -> None:
    """Print a line for each text."""
    print("tokens a launch, by guesses a launch:", *range(1, 8), sep="\t")
    for name, old, new in EDITED:
        text = TEXTS[name]
        show(f"{name}, {old} -> {new}", tokens_of(text), tokens_of(re.sub(rf"\b{old}\b", new, text)))
    for name in SUMMARISED:
        show(f"{name}, its summary", tokens_of(TEXTS[name]), tokens_of(summary_of(TEXTS[name])))
    for name in READ:
        read = tokens_of(TEXTS[name])
        show(f"{name}, behind its first tenth", read[: len(read) // 10], read[len(read) // 10 :])


def show(what: str, prompt: list[str], answer: list[str]) -> None:
    """Print the line of a text."""
    rates = [len(answer) / launches(prompt, answer, guesses) for guesses in range(1, 8)]
    print(what, *(f"{rate:.2f}" for rate in rates), sep="\t")


if __name__ == "__main__":
    main()
