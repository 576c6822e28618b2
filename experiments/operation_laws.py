"""Tests the laws of the table of operations on many mutants, and prints their numbers.

Mutants are programs of every opcode, of recipes, of rewrites and of lowered decode steps. The reference VM must run
every program that `validate(strict=True)` accepts. A program that the VM refuses must be rejected with the task and the
bound. With --emulated, a program that the packer accepts, too, must end in the emulator of the CUDA VM, write only its
outputs, and compute the reference VM's numbers. The mutants are those of tests/mutants.py. A mutant that breaks a law
ends the script with its seed.

    python experiments/operation_laws.py [--emulated] [mutants]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    """Print how many mutants there were of each fate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mutants", type=int, nargs="?", default=25_000)
    parser.add_argument("--emulated", action="store_true", help="launch in the emulator of the CUDA VM")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    print_lines = print_emulated if arguments.emulated else print_reference
    print_lines(arguments.mutants)


def print_reference(count: int) -> None:
    """How many mutants were accepted, rejected and refused, and under which codes."""
    found = laws_in(TESTS / "vm" / "reference" / "test_laws.py").check(range(count))
    print(f"{count} mutants: no law was broken")
    print(f"{found.pop('accepted'):>7} accepted by validate(strict=True), and run by the reference VM without an error")
    print(f"{found.pop('rejected'):>7} rejected by validate(strict=True)")
    print(f"{found.pop('refused'):>7} of these for their operands, and refused by a reference VM without that proof")
    print("findings by code")
    for code, number in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])):
        print(f"{number:>7} {code}")


def print_emulated(count: int) -> None:
    """How many mutants were launched, by architecture and float type."""
    from emulator.canaries import MeasuredGpu
    from emulator.gpu import build_variant
    from mutants import HERE

    laws = laws_in(TESTS / "emulator" / "test_laws.py")
    with patch("flywheel.vm.gpu.weights.compile_variant", build_variant):
        for sm_arch, dtype in laws.ALL:
            gpu = MeasuredGpu(sm_arch=sm_arch, num_sms=HERE.num_sms, limit_s=60.0)
            launched = laws.check(gpu, range(count), dtype)["launched"]
            print(f"sm_{sm_arch} {dtype.name:4}: {launched} of {count} mutants launched, no law was broken", flush=True)


def laws_in(path: Path) -> ModuleType:
    """The module of tests."""
    spec = importlib.util.spec_from_file_location("laws", path)
    assert spec is not None and spec.loader is not None
    laws = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(laws)
    return laws


if __name__ == "__main__":
    main()
