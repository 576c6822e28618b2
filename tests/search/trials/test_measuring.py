from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from threading import Barrier, Thread
from time import sleep
from typing import Any

import pytest

from flywheel.errors import KernelCompileError, NoGpuError
from flywheel.ir import TARGETS
from flywheel.measure.device import Device
from flywheel.measure.environment import Environment
from flywheel.models.catalog import CATALOG
from flywheel.plan import variant_of
from flywheel.search.space import make_space
from flywheel.search.trials import measuring
from flywheel.search.trials.evaluate import prepare
from flywheel.search.workload import Workload
from flywheel.vm.pack import pack
from flywheel.vm.worker import Parcel

Variant = tuple[str, int, int, int]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """What a slow compiler was asked for."""
    asked: list[Variant] = []

    def compile_slowly(
        arch: str, threads: int, dtype: Any, *, matrix_warps: int, rows: int, formats: object, ranked: bool,
        features: object,
    ) -> None:  # fmt: skip
        assert not ranked and not features
        asked.append((arch, threads, matrix_warps, rows))
        sleep(0.05)

    monkeypatch.setattr(measuring, "compile_variant", compile_slowly)
    measuring._compile_once.cache_clear()
    yield asked
    measuring._compile_once.cache_clear()


def test_what_is_compiled_for_all_is_not_compiled_again_for_one(lab: Any, compiled: list[Variant]) -> None:
    space = lab.space()
    program = prepare(space.to_config(space.known_good()[0]), lab.workload).program
    assert program is not None
    kernels = space.kernels()
    thread = Thread(target=measuring.compile_all, args=("bf16", 90, kernels, lambda: False, (), 1))
    thread.start()
    measuring.compile_ahead("bf16", program)  # first in line, so at work on it now
    thread.join()
    assert compiled == [("sm_90a", *kernel) for kernel in kernels]


def test_nothing_is_compiled_for_nobody(lab: Any, compiled: list[Variant]) -> None:
    measuring.compile_all("bf16", 90, lab.space().kernels(), lambda: len(compiled) == 2, side=1)
    assert len(compiled) == 2


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together, kernels = Barrier(3), [(32 * warps, 2, 1) for warps in range(6, 12)]
    monkeypatch.setattr(measuring, "compile_variant", lambda *_, **__: together.wait(60.0))
    measuring._compile_once.cache_clear()
    measuring.compile_all("bf16", 90, kernels, lambda: False, side=3)
    assert not together.broken


def test_kernels_of_quantised_matrices_are_compiled_ahead_as_programs_want_them(
    lab: Any, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload("llama3.2-1b", CATALOG["llama3.2-1b"], TARGETS["h100"], "bf16", 512, weights="int4")
    space = make_space(workload)
    program = prepare(space.to_config(space.known_good()[0]), workload).program
    assert program is not None
    formats = space.kernel_formats()
    assert formats == variant_of(program).formats != ()
    wanted: list[tuple[int, ...]] = []
    monkeypatch.setattr(measuring, "compile_variant", lambda *_, formats, **__: wanted.append(formats))
    measuring._compile_once.cache_clear()
    measuring.compile_all("bf16", 90, space.kernels(), lambda: False, formats)
    measuring.compile_ahead("bf16", program)
    assert wanted == [formats] * len(space.kernels())
    assert lab.space().kernel_formats() == ()


def test_a_kernel_that_does_not_compile_is_news_for_its_measurement_alone(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail(arch: str, *_: Any, **__: Any) -> None:
        tried.append(arch)
        raise KernelCompileError("vm_loop.cuh(12): error")

    monkeypatch.setattr(measuring, "compile_variant", fail)
    measuring._compile_once.cache_clear()
    measuring.compile_all("bf16", 90, lab.space().kernels(), lambda: False)
    measuring.compile_all("bf16", 70, lab.space().kernels(), lambda: False)
    assert tried == ["sm_90a"] * len(lab.space().kernels())


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (Device("NVIDIA H100 80GB HBM3", 132, 85_520_809_984), True),
        (Device("NVIDIA H100 80GB HBM3", 114, 85_520_809_984), False),
        (Device("NVIDIA H100 PCIe", 114, 85_520_809_984), False),
    ],
)
def test_a_station_measures_on_the_card_that_its_driver_says_is_the_target(
    device: Device, found: bool, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(environment, gpu="NVIDIA H100 80GB HBM3", driver="1")
    monkeypatch.setattr(measuring, "capture_environment", lambda: here)
    monkeypatch.setattr(measuring, "missing_modules", list)
    monkeypatch.setattr(measuring, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(measuring, "describe_gpu", lambda: (device, TARGETS["h100"]))
    if found:
        assert measuring.capture(TARGETS["h100"]).gpu == "NVIDIA H100 80GB HBM3"
        return
    with pytest.raises(NoGpuError, match=rf"^--measure cuda needs an h100: lab has {re.escape(str(device))}$"):
        measuring.capture(TARGETS["h100"])


def test_a_program_is_wrapped_as_its_packed_tables(lab: Any) -> None:
    program = prepare(lab.space().to_config(lab.space().known_good()[0]), lab.workload).program
    assert program is not None
    wrapped = measuring.wrap(program)
    assert isinstance(wrapped, Parcel)
    opened, packed = wrapped.open(), pack(program)
    assert opened.program == program
    for name in ("buffers", "instructions", "queues", "steps", "segments", "segment_buffers", "streams", "floats"):
        assert getattr(opened, name).tobytes() == getattr(packed, name).tobytes()
    assert (opened.variant, opened.arena) == (packed.variant, packed.arena)


def test_a_program_that_cannot_be_packed_goes_as_it_is_and_the_worker_says_why(lab: Any) -> None:
    program = prepare(lab.space().to_config(lab.space().known_good()[0]), lab.workload).program
    assert program is not None
    aimless = replace(program, target=None)
    assert measuring.wrap(aimless) is aimless
