"""What the code makes of the works in replay.tsv is what it made when the file was recorded.

A difference is either a bug or meant: then run `python experiments/replay.py record`, and say in the commit which.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from effort import sample
from replayed import FILE, Found, Work, differences, kernel_sources, read, read_kernels, renewed, results_of, write

from flywheel.cost_model import machine_for
from flywheel.ir import TARGETS, InstructionKind
from flywheel.models.decoder import DTYPES
from flywheel.models.families import FAMILIES
from flywheel.models.formats import CODES
from flywheel.search.knobs import KNOBS
from flywheel.search.space import make_space
from flywheel.store.schedule import shipped_schedules
from flywheel.vm.gpu.sources import SOURCES
from flywheel.vm.reference.ops import OPS

KEPT: Final = read()
SIZED: Final = ("rows.", "kv_block", "smem", "chunk", "inflight")
"""Beginnings of the names of knobs whose values depend on the model and the GPU."""


@pytest.mark.parametrize("number", sample(range(len(KEPT)), every=11))
def test_a_work_gives_what_it_gave(number: int) -> None:
    work, kept = KEPT[number]
    assert differences(kept, results_of(work)) == []


def test_the_kernels_sources_are_what_they_were() -> None:
    assert differences(read_kernels(), kernel_sources()) == []


def test_300_works_have_every_family_dtype_format_rank_lane_batch_and_architecture() -> None:
    works = [work for work, _ in KEPT]
    assert len(works) >= 300
    assert {work.spec.family for work in works} == set(FAMILIES)
    assert {work.dtype for work in works} == set(DTYPES)
    assert {name for name in CODES if any(name in work.weights for work in works)} == set(CODES)
    assert {work.ranks for work in works} == {1, 2, 3, 4}
    assert {work.lanes for work in works} >= {1, 2, 3, 4, 8} and {work.batch for work in works} >= {1, 2, 3, 4, 8}
    assert {TARGETS[work.gpu].sm_arch for work in works} == {target.sm_arch for target in TARGETS.values()}
    assert {work.schedule for work in works} == {"drawn", "default", *[each.stem for each in shipped_schedules()]}


def test_the_works_have_every_value_of_every_knob() -> None:
    drawn = {work: dict(work.choice) for work, _ in KEPT if work.schedule == "drawn"}
    values = {each.name: set(map(str, each.values)) for each in make_space(KEPT[1][0].workload()).dimensions}
    for knob in KNOBS:
        found = {choice[knob.name] for choice in drawn.values() if knob.name in choice}  # not of knobs that came later
        assert found >= (set() if knob.name.startswith(SIZED) else values[knob.name]), knob.name
        assert len(found) > 1, knob.name


def test_some_works_are_refused_and_every_other_one_is_proved_and_right() -> None:
    results = [found for _, found in KEPT]
    assert 0 < sum(found["refused"] != "-" for found in results) < 30
    assert {found["findings"] for found in results} == {"ok"}
    assert sum(found["verdict"] == "passed" for found in results) > 60
    assert {found["verdict"] for found in results} == {"passed", "-"}


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    again = tmp_path / "replay.tsv"
    write([work for work, _ in KEPT], [found for _, found in KEPT], again)
    assert again.read_bytes() == FILE.read_bytes()


TINY: Final = Work(0, "llama-deep", "bf16", "int8", "h200", 6, 1, 1, 1, 64, "default", ())
MIDDLE: Final = replace(TINY, model="llama-middle")  # its chunks have more than one unit


@cache
def unchanged(work: Work) -> Found:
    return results_of(work)


CHANGES: Final[dict[str, tuple[str, Any, set[str], set[str]]]] = {
    "packing": ("flywheel.vm.pack.memory.ALIGNMENT", 512, {"arena"}, {"document", "steps.op", "latency_us"}),
    "the stream": (
        "flywheel.plan.stream.CHUNK_UNITS", 5.0, {"segments.chunk_kblocks"}, {"document", "arena", "latency_us"}
    ),
    "lowering": (
        "flywheel.lowering.placement.TASK_COST_BYTES", 0, {"document", "instructions.sm"}, {"config", "findings"}
    ),
    "the cost model": (
        "flywheel.cost_model.predict.machine_for", lambda target: replace(machine_for(target), launch_us=1.01),
        {"latency_us"}, {"document", "floor_us", "steps.op"},
    ),
    "the proof": (
        "flywheel.ir.validate.check_races", lambda *_: None, {"mutants"}, {"document", "verdict"}
    ),
    "the reference VM": (
        "flywheel.vm.reference.binding.OPS", {**OPS, InstructionKind.ADD: OPS[InstructionKind.MUL]},
        {"verdict"}, {"document", "latency_us"},
    ),
}  # fmt: skip
"""Name -> what is changed, to what, columns in which that shows, and columns in which it does not."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_shows_where_it_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, value, shows, hidden = CHANGES[name]
    work = MIDDLE if name == "the stream" else TINY
    kept = unchanged(work)
    assert work is MIDDLE or kept["verdict"] == "passed"
    module, _, attribute = place.rpartition(".")
    monkeypatch.setattr(import_module(module), attribute, value)
    found = {each.partition(":")[0] for each in differences(kept, results_of(work))}
    assert shows <= found, found
    assert not hidden & found, found


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda text: text.replace("16", "32", 1), ["ops/rotate.cuh"]),
        (lambda text: f"// as measured\n{text}".replace("    ", "\t"), []),
    ],
)
def test_a_kernels_source_counts_by_its_words(
    tmp_path: Path, change: Callable[[str], str], differing: list[str]
) -> None:
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "ops" / "rotate.cuh"
    changed = change(file.read_text(encoding="utf-8"))
    assert changed != file.read_text(encoding="utf-8")
    file.write_text(changed, encoding="utf-8")
    found = differences(kernel_sources(SOURCES), kernel_sources(tmp_path))
    assert [each.partition(":")[0] for each in found] == differing


def test_rounding_of_another_cpu_is_no_difference() -> None:
    here, there = {"latency_us": "12.5", "tokens": "3 ? 7"}, {"latency_us": "12.500000000001", "tokens": "3 4 ?"}
    assert differences(here, there) == []
    assert renewed(here, {**there, "arena": "0a1b2c"}) == {**here, "arena": "0a1b2c"}
    assert differences({"latency_us": "12.5"}, {"latency_us": "12.50001"}) != []
    assert differences({"tokens": "3 4"}, {"tokens": "3 5"}) != [] != differences({"tokens": "3"}, {"tokens": "3 5"})
