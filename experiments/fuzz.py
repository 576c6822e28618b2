"""Gives mutated files to the commands that read them, and prints how the commands ended.

    python experiments/fuzz.py [--processes 12] [--minutes 60] [--cases N] [--seed 0] [--targets program,store,...] \\
        > results/fuzz.txt

A case is a good program, config, schedule, options file, machine file, table, model config, safetensors header,
tokenizer, directory of a tokenizer, chat template, store, sizes of a model, or store that computes (`traps`).
tests/mutations.py, tests/strange_files.py, tests/tokenizer_directories.py and tests/chat_templates.py change a few of
its bytes or its structure. Each command must end with a documented exit code, at most one line of trouble, no traceback
and no half-written file, within the time and memory of tests/strangers.py. A tokenizer and a chat template must be
understood as by transformers. The targets take turns. The processes share the cases: the first process has numbers 0,
12, 24 and so on. Fails if a case does. `--seed NUMBER --cases 1` repeats a case. Targets whose package is not installed
are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strangers import LIMIT_BYTES, LIMIT_S, NEEDS, TARGETS, Strangers

_START_S = 300.0
"""What a process may take beyond its minutes, to make the good files and to end."""


@dataclass(slots=True)
class Tally:
    """Of one target: its cases, their seconds, and how many commands ended with which code."""

    cases: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Print a line for each target, and what went wrong; whether anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="that share the cases  [default: 1]")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of them  [default: 60]")
    parser.add_argument("--cases", type=int, default=10**9, help="of each target and process, at most")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case  [default: 0]")
    parser.add_argument("--targets", default="", help="names, with commas; all of them unless given")
    parser.add_argument("--log", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [name for name in arguments.targets.split(",") if name] or list(TARGETS)
    missing = {name: [each for each in NEEDS.get(name, ()) if find_spec(each) is None] for name in wanted}
    left_out = {name: gone for name, gone in missing.items() if gone}
    names = [name for name in wanted if name not in left_out]
    if arguments.log:
        run(names, arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tallies, wrong = gather(share(Path(folder), names, arguments))
    show(tallies, wrong, left_out, arguments)
    return min(len(wrong), 1)


def run(names: list[str], arguments: argparse.Namespace) -> None:
    """One process: a line of JSON before a case, which counts where the process dies over it, and one after it."""
    logging.disable()
    end = monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder, Path(arguments.log).open("w", encoding="utf-8", buffering=1) as log:
        strangers = Strangers(Path(folder))
        for case in range(arguments.cases):
            number = arguments.seed + case * arguments.processes
            for name in names:
                began = monotonic()
                if began > end:
                    return
                log.write(json.dumps({"target": name, "number": number}) + "\n")
                wrong, ended = strangers.run(name, number)
                done = {"codes": ended, "seconds": monotonic() - began, "wrong": wrong}
                log.write(json.dumps(done) + "\n")


def share(folder: Path, names: list[str], arguments: argparse.Namespace) -> list[tuple[Path, str]]:
    """Run all processes; (what each wrote, how it failed, if it did)."""
    begun = []
    for process in range(arguments.processes):
        log = folder / f"{process}.jsonl"
        words = [
            "--log", log, "--seed", arguments.seed + process, "--minutes", arguments.minutes,
            "--cases", arguments.cases, "--processes", arguments.processes, "--targets", ",".join(names),
        ]  # fmt: skip
        command = [sys.executable, __file__, *map(str, words)]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        said = (folder / f"{process}.err").open("w")
        begun.append((log, Path(said.name), subprocess.Popen(command, env=environ, stdout=said, stderr=said)))
        said.close()
    ended = []
    deadline = monotonic() + 60 * arguments.minutes + _START_S
    for log, said_at, each in begun:
        try:
            code = each.wait(max(1.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            code = each.wait()
        last = said_at.read_text(errors="replace").strip().splitlines()[-1:] if code else []
        ended.append((log, f"the process ended with code {code}: {' '.join(last)[:300]}" if code else ""))
    return ended


def gather(ended: list[tuple[Path, str]]) -> tuple[dict[str, Tally], list[str]]:
    """(the sums of all processes by target, what went wrong)."""
    tallies: dict[str, Tally] = {}
    wrong: list[str] = []
    for log, failure in ended:
        lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
        case: dict[str, Any] = {}
        for line in map(json.loads, lines):
            if "target" in line:
                case = line
                continue
            tally = tallies.setdefault(case["target"], Tally())
            tally.cases += 1
            tally.seconds += line["seconds"]
            tally.codes.update(map(str, line["codes"]))
            wrong += line["wrong"]
        if failure:
            wrong.append(f"{case.get('target', 'no case')} {case.get('number', '')}: {failure}")
    return tallies, wrong


def show(
    tallies: dict[str, Tally], wrong: list[str], left_out: dict[str, list[str]], arguments: argparse.Namespace
) -> None:
    """The table."""
    where = f"{arguments.processes} processes of {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the end"
    print(f"Cases from number {arguments.seed} on; {where}.")
    print(f"A command may take {LIMIT_S:g} s and {LIMIT_BYTES / 2**30:g} GiB more than was there before.\n")
    print(f"{'target':<12}{'cases':>8}{'commands':>10}{'seconds':>9}  exit codes")
    for name, tally in tallies.items():
        ended = ", ".join(f"{code}: {times:,}" for code, times in sorted(tally.codes.items()))
        print(f"{name:<12}{tally.cases:>8,}{tally.codes.total():>10,}{tally.seconds:>9,.0f}  {ended}")
    for name, gone in left_out.items():
        print(f"{name:<12}left out: no {', '.join(gone)}")
    commands = sum(tally.codes.total() for tally in tallies.values())
    print(f"\n{sum(tally.cases for tally in tallies.values()):,} cases, {commands:,} commands, {len(wrong)} went wrong")
    for each in wrong:
        print(each.encode("unicode_escape").decode())


if __name__ == "__main__":
    sys.exit(main())
