from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from time import sleep
from typing import Any

import pytest

from flywheel.errors import KernelCompileError
from flywheel.search import measuring
from flywheel.search.evaluate import prepare

Variant = tuple[str, int, int, int]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """What a slow compiler was asked for."""
    asked: list[Variant] = []

    def compile_slowly(arch: str, threads: int, dtype: Any, *, matrix_warps: int, rows: int) -> None:
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
    thread = Thread(target=measuring.compile_all, args=("bf16", 90, kernels, lambda: False))
    thread.start()
    measuring.compile_ahead("bf16", program)  # first in line, so at work on it now
    thread.join()
    assert compiled == [("sm_90a", *kernel) for kernel in kernels]


def test_nothing_is_compiled_for_nobody(lab: Any, compiled: list[Variant]) -> None:
    measuring.compile_all("bf16", 90, lab.space().kernels(), lambda: len(compiled) == 2)
    assert len(compiled) == 2


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
