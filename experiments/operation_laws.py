"""Tests the laws of the table of operations on many mutants and prints what they were.

Mutated programs of every opcode, of recipes, of rewrites and of lowered decode steps: what `validate(strict=True)`
accepts runs in the reference VM, and what that VM refuses is rejected with the task and the bound. The mutants are
those of tests/mutants.py; one that breaks a law ends the script with its seed.

    python experiments/operation_laws.py [mutants]
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def main(count: int) -> None:
    """Print how many mutants were accepted, rejected and refused, and under which codes."""
    sys.path.insert(0, str(TESTS))
    spec = importlib.util.spec_from_file_location("laws", TESTS / "vm" / "reference" / "test_laws.py")
    assert spec is not None and spec.loader is not None
    laws = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(laws)
    found = laws.check(range(count))
    rows = [
        f"{count} mutants: no law was broken",
        f"{found.pop('accepted'):>7} accepted by validate(strict=True), and run by the reference VM without an error",
        f"{found.pop('rejected'):>7} rejected by validate(strict=True)",
        f"{found.pop('refused'):>7} of these for their operands, and refused by a reference VM without that proof",
        "findings by code",
        *(f"{number:>7} {code}" for code, number in sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))),
    ]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25_000)
