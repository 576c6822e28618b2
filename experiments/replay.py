"""Keeps what the code makes of some hundred works, and checks that it still makes the same.

    python experiments/replay.py check
    python experiments/replay.py record
    python experiments/replay.py draw
    python experiments/replay.py add

`check` makes everything of the works in tests/golden/replay.tsv again. It prints for each work that differs the first
column that does, and the names of the others. It fails if a work differs, or the words of a kernel's source in
tests/golden/kernels.tsv. `record` writes both files again, for the same works, and prints how many works differ in
which columns: do it for a difference that is meant, and say in the commit which. `draw` writes them for works drawn
from today's search space. `add` adds the works of families and shipped schedules that have none yet. tests/replayed.py
says what is kept.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import replayed


def main() -> int:
    """Check or record; whether something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "record", "draw", "add"))
    what = parser.parse_args().what
    began = perf_counter()
    gc.freeze()
    gc.disable()
    kept = [(work, {}) for work in replayed.draw()] if what == "draw" else replayed.read()
    if what == "add":
        known = {work.number for work, _ in kept}
        first = 1 + max(number for number in known if number < replayed.LATER)
        added = [
            *replayed.of_shipped(first, {work.schedule for work, _ in kept}),
            *[work for work in replayed.further() if work.number not in known],
        ]
        replayed.write(*zip(*kept, *[(work, replayed.results_of(work)) for work in added], strict=True))
        replayed.write_kernels()
        print(f"{len(added)} works added ({perf_counter() - began:.0f} s)")
        return 0
    if what == "check":
        wrong = check(kept)
        print(f"{len(kept)} works, {wrong} differ ({perf_counter() - began:.0f} s)")
        return min(wrong, 1)
    results, changed = [], Counter[str]()
    for work, before in kept:
        found = replayed.results_of(work)
        changed.update([each.partition(":")[0] for each in replayed.differences(before, found)])
        results.append(replayed.renewed(before, found))
        gc.collect()
    replayed.write([work for work, _ in kept], results)
    replayed.write_kernels()
    if what == "record":
        print("".join([f"{name}: {count} works differ\n" for name, count in changed.items()]), end="")
    print(f"{len(kept)} works recorded ({perf_counter() - began:.0f} s)")
    return 0


def check(kept: list[tuple[replayed.Work, replayed.Found]]) -> int:
    """Print what differs; how many works and sources do."""
    wrong = replayed.differences(replayed.read_kernels(), replayed.kernel_sources())
    for each in wrong:
        print(f"kernels: {each}")
    count = len(wrong)
    for work, before in kept:
        found = replayed.differences(before, replayed.results_of(work))
        gc.collect()
        if found:
            others = " ".join([each.partition(":")[0] for each in found[1:]])
            print(f"work {work}: {found[0]}{f'; so do {others}' if others else ''}", flush=True)
        count += bool(found)
    return count


if __name__ == "__main__":
    sys.exit(main())
