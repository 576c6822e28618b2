"""Compares the quick proofs of a program with the proof that looks at each of its tasks.

    python experiments/proofs.py layers|runs [--configs N] [--mutants N]

`layers` is the proof of a program whose layers are alike, `runs` that of runs of tiles. Programs are those of random
configs of small models, and mutants: such programs with damage in a head, a template, a tail or a table (layers), or in
waits, operands and tiles (runs). On each, both proofs must give the same verdict, findings and numbers. Of the configs
of `layers`, the program's id, floor and prediction must be the same, too. The checks are those of
tests/lowering/test_proof_by_layers.py and test_proof_by_runs.py. The first difference ends the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from time import perf_counter

TESTS = Path(__file__).parents[1] / "tests"
SAME = {
    "layers": "verdict, findings, numbers, id, floor and prediction are those of the tasks",
    "runs": "the verdict is that of the whole proof, and all are proved by runs",
}


def main() -> None:
    """Print a line for the configs and one for the mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proof", choices=SAME)
    parser.add_argument("--configs", type=int, default=600)
    parser.add_argument("--mutants", type=int, default=20_000, help="at least some hundreds, of which some are sound")
    asked = parser.parse_args()
    sys.path += [str(TESTS), str(TESTS / "lowering")]
    found = importlib.util.spec_from_file_location("checks", TESTS / "lowering" / f"test_proof_by_{asked.proof}.py")
    assert found is not None and found.loader is not None
    checks = importlib.util.module_from_spec(found)
    found.loader.exec_module(checks)
    began = perf_counter()
    checks.check_configs(asked.configs)
    print(f"{asked.configs:,} random configs: {SAME[asked.proof]} ({perf_counter() - began:.0f} s)", flush=True)
    began = perf_counter()
    checks.check_mutants(asked.mutants)
    print(f"{asked.mutants:,} mutants: the result is that of the whole proof ({perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
