"""Settings of a whole process: its cycle collector, threads, torch's precision, signals and environment.

No other module of flywheel sets any of them. A context manager makes a temporary setting, and restores what it found.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import site
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, wraps
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from flywheel.errors import TooLargeError
from flywheel.lifetime import set_death_signal

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from threadpoolctl import ThreadpoolController

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_SHELTER: Final = threading.RLock()
_BRINGS_BLAS: Final = ("numpy", "scipy", "torch")
_UNUSED: Final = ("scipy", "cffi")
"""Packages that numba imports if it finds them, and that flywheel never needs. Together they take 0.2 s."""


def while_wanted(setting: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """A setting of the whole process that holds while any thread is in its block.

    The first thread to enter makes the setting. The last one to leave restores what was found.
    """
    lock = threading.Lock()
    made: list[AbstractContextManager[None]] = []
    blocks = 0

    @contextmanager
    @wraps(setting)
    def shared() -> Iterator[None]:
        nonlocal blocks
        with lock:
            if not blocks:
                entering = setting()
                entering.__enter__()
                made.append(entering)  # a setting that cannot be made is tried again by the next thread
            blocks += 1
        try:
            yield
        finally:
            with lock:
                blocks -= 1
                if not blocks:
                    made.pop().__exit__(None, None, None)

    return shared


@while_wanted
@contextmanager
def no_collector() -> Iterator[None]:
    """Turn the cycle collector off. It would walk a program's tens of thousands of records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


@while_wanted
@contextmanager
def importing() -> Iterator[None]:
    """Import modules faster: without the cycle collector, and as if the packages of _UNUSED were not installed."""
    hidden = {name: None for name in _UNUSED if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: not to be found
    with no_collector():
        yield
    for name in hidden:
        del sys.modules[name]


def collect_rarely() -> None:
    """Let the cycle collector look at young objects about thirty times less often than by default. Modules are hundreds
    of thousands of objects, with few cycles."""
    gc.set_threshold(20_000, 20, 20)


_ABANDONED: Final = threading.Event()


def abandon_threads() -> None:
    """Note that a thread of foreign code does not return, or a child does not end. The interpreter's end would break,
    or wait for ever."""
    _ABANDONED.set()


def threads_abandoned() -> bool:
    """Whether this process should end by `os._exit`."""
    return _ABANDONED.is_set()


def keep_objects() -> None:
    """Exempt all present objects from the cycle collector. Most belong to modules, above all torch's, and stay
    anyway."""
    gc.freeze()


_SWITCH_S: Final = 0.0005
"""Python's default is ten times as long."""


@while_wanted
@contextmanager
def prompt_threads() -> Iterator[None]:
    """Let waiting threads continue soon after their answer arrives, even while the main thread computes.

    Only one Python thread runs at a time, and by default it gives way late.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    yield
    sys.setswitchinterval(before)


@while_wanted
@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit the linear algebra of numpy and scipy to one thread.

    The matrices of a sampler are too small to share out. BLAS threads would spin, and take the cores from the processes
    that evaluate. Source: results/ask_threads.txt.
    """
    import numpy as np  # noqa: F401  if it is not loaded, it has no threads to limit

    with _thread_pools(tuple(name in sys.modules for name in _BRINGS_BLAS)).limit(limits=1, user_api="blas"):
        yield


@cache
def _thread_pools(loaded: tuple[bool, ...]) -> ThreadpoolController:
    """The thread pools of this process, kept for the modules of _BRINGS_BLAS that are `loaded`. Finding them takes 3
    ms."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread.

    Tiles are too small to share out. Threads that wait for each other on busy cores take many times as long. With one
    thread, sums also do not depend on the number of cores.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sum_in_float32() -> None:
    """Make torch's matrix products on a GPU sum in float32, for half types, too."""
    import torch

    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def sums_as_shipped() -> Iterator[None]:
    """Let products of half types sum in their own type on a GPU, as by torch's defaults."""
    import torch

    matmul = torch.backends.cuda.matmul
    bf16, fp16 = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = bf16
        matmul.allow_fp16_reduced_precision_reduction = fp16


def limit_memory(nbytes: int) -> None:
    """Limit the address space of this process and its children, and forbid core dumps."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_work(seconds: int) -> None:
    """Let the kernel kill this process once it has computed for so many more seconds, on all of its threads together.

    A later call sets the limit anew. Whole seconds, rounded up.
    """
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    until = ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until if most == resource.RLIM_INFINITY else min(until, most), most))


def most_descriptors() -> int:
    """How many descriptors this process may open."""
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def usable_cores() -> int:
    """The number of cores that this process may keep busy, by its affinity and its control group's time."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([able, *map(int, _cpu_shares())]))


def _cpu_shares() -> Iterator[float]:
    """The limits that this process's control groups set, in cores' worth of time."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 2)[2].strip("/") for line in own if line.startswith("0::")]
        for folder in (root, *(root / name for name in names)):
            with suppress(OSError):
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
                if quota != "max":
                    yield int(quota) / int(period)


def check_memory(what: str, nbytes: int, device: object = "cpu") -> None:
    """Raises TooLargeError where this machine has no `nbytes` of memory left. Devices other than the CPU are not
    checked."""
    available = available_bytes()
    if str(device).startswith("cpu") and available is not None and nbytes > available:
        raise TooLargeError(f"{what}: {nbytes / 1e9:,.1f} GB, and this machine has {available / 1e9:,.1f} GB left")


def available_bytes() -> int | None:
    """Bytes of memory that this machine has left; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def set_environment(values: Mapping[str, str]) -> None:
    """Set environment variables of this process and its children."""
    os.environ.update(values)


def default_environment(values: Mapping[str, str]) -> None:
    """As `set_environment`, for variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def handling(numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handle` take these signals within the block. Enter it in the main thread."""
    before: list[Any] = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def hear_interrupts(handle: Callable[[int, FrameType | None], None]) -> int:
    """Let `handle` take SIGINT from now on, unless the shell has it ignored. Call this in the main thread.

    Returns the reading end of a pipe. Each signal that Python handles writes a byte to it, even while the main thread
    runs foreign code.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def ignore_interrupts() -> None:
    """Ignore interrupts, since this process is ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def sheltered() -> Iterator[None]:
    """Shelter Python processes that start within the block.

    They inherit a blocked SIGINT, so that Ctrl-C cannot kill them before they ignore it. They find their first modules
    where Python is installed, whatever is in the working directory.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with _SHELTER:
        added = _SAFE_PATH not in os.environ
        os.environ.setdefault(_SAFE_PATH, "1")
        try:
            yield
        finally:
            if added:
                os.environ.pop(_SAFE_PATH, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, for a `python -m`.

    That process imports nothing from the working directory, except flywheel where it is there.
    """
    home = str(Path(__file__).resolve().parents[1])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*filter(None, given), *([] if home in (*given, *site.getsitepackages()) else [home])]
    return {**os.environ, _SAFE_PATH: "1", **({"PYTHONPATH": os.pathsep.join(path)} if path else {}), **more}


def enter_child() -> None:
    """Prepare a spawned process. Call this first.

    Its parent handles Ctrl-C. The process ends with its parent, whose stdout is the result, and does not write to it.
    The kernel kills it with the process that forked it, and a thread ends it with the one that asked for it, which is
    another one if there is a fork server. That server ends with the one that asked, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_death_signal()
    parent = multiprocessing.parent_process()
    if parent is not None:
        if not parent.is_alive():  # it ended before the kernel knew
            os._exit(1)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    leave_stdout()


def leave_stdout() -> None:
    """Send this process's prints to stderr. So the reader of the parent's stdout sees its end when the parent ends."""
    os.dup2(2, 1)


def _end_with(parent: BaseProcess) -> None:
    """End this process when its parent has ended."""
    parent.join()
    os._exit(1)
