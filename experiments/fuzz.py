"""Gives changed files to the commands that read them and prints what they made of them.

    python experiments/fuzz.py [--minutes 60] [--cases N] [--seed 0] [--targets program,store,...] > results/fuzz.txt

A case is a good program, config, schedule, campaign file, machine file, table, model config, safetensors header,
tokenizer or store, changed in a few bytes or in its structure by tests/mutations.py. Each command must end with a
documented exit code, at most one line of trouble, no traceback, no half-written file, within the time and the memory
that tests/strangers.py says. The targets take turns. Fails where anything is wrong; a case is repeated by its number.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strangers import LIMIT_BYTES, LIMIT_S, Strangers


def main() -> int:
    """Print a line for each target, and what went wrong; how many things did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=10**9, help="of each target, at most")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--targets", default="", help="names, with commas; all of them unless given")
    arguments = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        return run(Strangers(Path(folder)), arguments)


def run(strangers: Strangers, arguments: argparse.Namespace) -> int:
    """Cases of all targets in turn, until the time is up."""
    names = [name for name in arguments.targets.split(",") if name] or list(strangers.targets)
    cases, seconds = Counter[str](), Counter[str]()
    codes = {name: Counter[int | str]() for name in names}
    wrong: list[str] = []
    end = monotonic() + 60 * arguments.minutes
    for number in count(arguments.seed):
        for name in names:
            began = monotonic()
            if began > end or number >= arguments.seed + arguments.cases:
                show(names, cases, codes, seconds, wrong)
                return min(len(wrong), 1)
            told, ended = strangers.run(name, number)
            for each in told:
                sys.stderr.write(each.encode("unicode_escape").decode() + "\n")
            wrong += told
            cases[name] += 1
            codes[name].update(ended)
            seconds[name] += monotonic() - began  # type: ignore[assignment]  # a Counter adds floats, too
    return 0


def show(
    names: list[str], cases: Counter[str], codes: dict[str, Counter[int | str]], seconds: Counter[str], wrong: list[str]
) -> None:
    """The table."""
    print(f"A command may take {LIMIT_S:g} s and {LIMIT_BYTES / 2**30:g} GiB more than was there before.\n")
    print(f"{'target':<12}{'cases':>8}{'commands':>10}{'seconds':>9}  exit codes")
    for name in names:
        ended = ", ".join(f"{code}: {times:,}" for code, times in sorted(codes[name].items(), key=str))
        print(f"{name:<12}{cases[name]:>8,}{codes[name].total():>10,}{seconds[name]:>9,.0f}  {ended}")
    print(f"\n{cases.total():,} cases, {sum(map(Counter.total, codes.values())):,} commands, {len(wrong)} went wrong")
    for each in wrong:
        print(each.encode("unicode_escape").decode())


if __name__ == "__main__":
    sys.exit(main())
