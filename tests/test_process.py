from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Event, Thread

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from flywheel.process import (
    default_environment,
    handling,
    importing,
    no_collector,
    one_blas_thread,
    one_torch_thread,
    prompt_threads,
    set_environment,
    sum_in_float32,
    sums_as_shipped,
    while_wanted,
)

MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def precision() -> Iterator[None]:
    """torch's flags, put back."""
    before = torch.get_float32_matmul_precision()
    flags = MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction
    yield
    torch.set_float32_matmul_precision(before)
    MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction = flags


def reduced() -> tuple[bool, bool]:
    """Whether products of BF16, and of F16, may sum in their own type."""
    return MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction


def blas_threads() -> set[int]:
    """Threads of every BLAS in this process."""
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_the_collector_rests_until_the_last_thread_has_left() -> None:
    entered, leave = Event(), Event()

    def other() -> None:
        with no_collector():
            entered.set()
            leave.wait()

    thread = Thread(target=other)
    assert gc.isenabled()
    with no_collector():
        thread.start()
        entered.wait()
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_setting_that_could_not_be_made_is_made_for_the_next_thread() -> None:
    held: list[str] = []

    @while_wanted
    @contextmanager
    def setting() -> Iterator[None]:
        if not fine:
            raise OSError("no descriptor is left")
        held.append("made")
        yield
        held.append("restored")

    fine = False
    for _ in range(2):
        with pytest.raises(OSError, match="no descriptor is left"), setting():
            pass
    fine = True
    for _ in range(2):
        with setting(), setting():
            assert held.pop() == "made"
        assert held.pop() == "restored"
    assert held == []


def test_an_import_finds_none_of_the_modules_that_are_hidden_from_it_and_later_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flywheel.process._UNUSED", ("this",))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with importing():
        assert not gc.isenabled()
        with pytest.raises(ImportError):
            import_module("this")
    assert gc.isenabled()
    assert import_module("this").__name__ == "this"


def test_threads_switch_soon_for_a_while() -> None:
    before = sys.getswitchinterval()
    with prompt_threads():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_blas_has_one_thread_for_a_while() -> None:
    np.linalg.cholesky(np.eye(3))
    with threadpool_limits(limits=2, user_api="blas"):
        before = blas_threads()
        with one_blas_thread():
            assert blas_threads() == {1}
        assert blas_threads() == before


def test_torch_has_one_thread_for_a_while() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("precision")
def test_sums_are_in_float32_but_where_torch_may_do_as_it_ships() -> None:
    sum_in_float32()
    assert torch.get_float32_matmul_precision() == "highest"
    assert reduced() == (False, False)
    with sums_as_shipped():
        assert reduced() == (True, True)
    assert reduced() == (False, False)


def test_signals_go_back_to_who_had_them() -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    with handling((signal.SIGUSR1,), lambda number, _: seen.append(number)):
        signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_default_of_the_environment_overrides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_TEST_ONE", "given")
    monkeypatch.setenv("FLYWHEEL_TEST_TWO", "given")
    monkeypatch.delenv("FLYWHEEL_TEST_TWO")
    default_environment({"FLYWHEEL_TEST_ONE": "default", "FLYWHEEL_TEST_TWO": "default"})
    assert (os.environ["FLYWHEEL_TEST_ONE"], os.environ["FLYWHEEL_TEST_TWO"]) == ("given", "default")
    set_environment({"FLYWHEEL_TEST_ONE": "set"})
    assert os.environ["FLYWHEEL_TEST_ONE"] == "set"


def test_a_process_that_computes_longer_than_its_limit_is_killed_and_the_limit_can_be_renewed() -> None:
    source = (
        "import time\n"
        "from flywheel.process import limit_work\n"
        "for _ in range(3):\n"
        "    limit_work(1)\n"
        "    end = time.process_time() + 0.7\n"
        "    while time.process_time() < end: pass\n"
        "print('renewed', flush=True)\n"
        "while True: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, "renewed\n")
