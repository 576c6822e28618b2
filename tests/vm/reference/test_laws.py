"""What strict validation accepts, the reference VM runs; what the VM refuses, validation rejects by name."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from effort import examples
from mutants import SINGLES, mutant, tensors

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import InstructionKind, MegakernelProgram, validate
from flywheel.vm.reference import ReferenceVM

SHORT, LONG = examples(1500), 25_000
OF_OPERANDS = {"operand-size", "operand-type", "tile-bounds", "kv-bounds", "kv-target", "arity", "missing-param"}


def launch(program: MegakernelProgram, seed: int) -> None:
    """Run it where it stands, and at position 0 where it can move there."""
    machine, given = ReferenceVM(program), tensors(program, seed)
    machine.run(given, "adversarial", seed)
    try:
        machine.run(given, pos=0)
    except ConfigError as error:
        assert "has no position" in str(error) or "fixes" in str(error)


def refusal(program: MegakernelProgram, seed: int) -> str | None:
    """Why the VM, which was told of no proof, does not run the tasks; None where it does."""
    try:
        ReferenceVM.unchecked(program).run(tensors(program, seed))
    except InvalidProgramError as error:
        return str(error)
    return None


def check(seeds: range) -> Counter[str]:
    """Both laws over mutants; how many were of each kind."""
    found: Counter[str] = Counter()
    for seed in seeds:
        program = mutant(seed)
        result = validate(program, strict=True)
        if result.ok:
            launch(program, seed)
            found["accepted"] += 1
            continue
        found["rejected"] += 1
        for finding in result.errors:
            found[finding.code] += 1
            if finding.code in OF_OPERANDS:
                assert re.match(rf"task {finding.task} \(.*\): [A-Z_]+", finding.message), (seed, finding)
            if finding.code in ("operand-size", "tile-bounds", "kv-bounds"):
                assert re.search(r"\[\d[\d, ]*\].*\d|\d.*\[\d[\d, ]*\]", finding.message), (seed, finding)
        codes = {finding.code for finding in result.errors}
        if codes & OF_OPERANDS and not codes & {"bad-shape", "unknown-buffer", "abi-limit"}:
            refused = refusal(program, seed)
            assert refused is not None, (seed, result.report())
            found["refused"] += 1
    return found


def test_every_opcode_has_a_program_to_mutate() -> None:
    assert {task.op for program in SINGLES for task in program.tasks} == set(InstructionKind) - {InstructionKind.FUSED}


def test_what_is_accepted_runs_and_what_is_refused_is_rejected_by_name() -> None:
    found = check(range(SHORT))
    assert found["accepted"] >= SHORT // 5 and found["refused"] >= SHORT // 5, found


@pytest.mark.slow
def test_what_is_accepted_runs_and_what_is_refused_is_rejected_by_name_in_many_mutants() -> None:
    found = check(range(LONG))
    assert found["accepted"] >= LONG // 5 and found["refused"] >= LONG // 5, found
