"""What holds for a whole process: its cycle collector, its threads, torch's precision, its signals and its environment.

Nothing else in flywheel sets any of it. What is set for a while is set by a context manager, which puts back what it
found.
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
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from flywheel.errors import TooLargeError

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_SHELTER: Final = threading.RLock()
_BRINGS_BLAS: Final = ("numpy", "scipy", "torch")
_UNUSED: Final = ("scipy", "cffi")
"""What numba looks for and nothing here has it use. Together they take it 0.2 s."""


def while_wanted(setting: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """A setting of the whole process that holds while any thread is in its block: the first to enter makes it, and the
    last to leave puts back what was found."""
    lock = threading.Lock()
    made: list[AbstractContextManager[None]] = []
    blocks = 0

    @contextmanager
    @wraps(setting)
    def shared() -> Iterator[None]:
        nonlocal blocks
        with lock:
            if not blocks:
                made.append(setting())
                made[0].__enter__()
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
    """Without the cycle collector, which would walk a program's tens of thousands of records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


@while_wanted
@contextmanager
def importing() -> Iterator[None]:
    """To import what stays and what it needs, without the cycle collector, which finds nothing there, and as if the
    modules of _UNUSED were not installed: numba imports them where they are."""
    hidden = {name: None for name in _UNUSED if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: not to be found
    with no_collector():
        yield
    for name in hidden:
        del sys.modules[name]


def collect_rarely() -> None:
    """The cycle collector looks at young objects some thirty times as rarely as Python has it: modules are hundreds of
    thousands, and cycles are few."""
    gc.set_threshold(20_000, 20, 20)


_ABANDONED: Final = threading.Event()


def abandon_threads() -> None:
    """Somebody else's code does not return, and would break the interpreter's end."""
    _ABANDONED.set()


def threads_abandoned() -> bool:
    """Whether this process should end by `os._exit`."""
    return _ABANDONED.is_set()


def keep_objects() -> None:
    """The cycle collector never looks at the objects of now again: those of modules, torch's above all, which stay."""
    gc.freeze()


_SWITCH_S: Final = 0.0005
"""Python's own is ten times that."""


@while_wanted
@contextmanager
def prompt_threads() -> Iterator[None]:
    """Threads that wait for others' answers go on soon after these come, whatever the main thread computes: of Python's
    threads one runs at a time, and gives way after a while only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    yield
    sys.setswitchinterval(before)


@while_wanted
@contextmanager
def one_blas_thread() -> Iterator[None]:
    """The linear algebra of numpy and scipy on one thread.

    The matrices of a sampler are too small to share out: threads of BLAS then spin and take the cores from the
    processes that evaluate. Source: results/ask_threads.txt.
    """
    import numpy as np  # noqa: F401  what is not loaded has no threads to limit

    with _thread_pools(tuple(name in sys.modules for name in _BRINGS_BLAS)).limit(limits=1, user_api="blas"):
        yield


@cache
def _thread_pools(loaded: tuple[bool, ...]) -> ThreadpoolController:
    """The thread pools of this process once the modules of _BRINGS_BLAS are `loaded`: finding them takes 3 ms."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch on one thread.

    Tiles are too small to share out, and threads that wait for each other on busy cores take many times as long. Sums
    also come out the same whatever the number of cores.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sum_in_float32() -> None:
    """Products of matrices in torch sum in float32 on a GPU, those of half types, too."""
    import torch

    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def sums_as_shipped() -> Iterator[None]:
    """Products of half types may sum in their own type on a GPU, as torch's defaults allow."""
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
    """This process and those that it starts get no more address space than that, and leave no core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def usable_cores() -> int:
    """Cores of this machine that this process may keep busy: those that it may run on, as far as its control group has
    time for them."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([able, *map(int, _cpu_shares())]))


def _cpu_shares() -> Iterator[float]:
    """Cores' worth of time that Linux gives this process's control groups, where it limits them."""
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
    """Raises TooLargeError where this machine has no memory left for so many bytes; of another device, nothing is
    known here."""
    available = available_bytes()
    if str(device).startswith("cpu") and available is not None and nbytes > available:
        raise TooLargeError(f"{what}: {nbytes / 1e9:,.1f} GB, and this machine has {available / 1e9:,.1f} GB left")


def available_bytes() -> int | None:
    """Memory that this machine has left; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def set_environment(values: Mapping[str, str]) -> None:
    """Environment variables of this process and of those that it starts."""
    os.environ.update(values)


def default_environment(values: Mapping[str, str]) -> None:
    """As `set_environment`, of the variables that have no value yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def handling(numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handle` takes these signals. To be entered in the main thread."""
    before: list[Any] = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def hear_interrupts(handle: Callable[[int, FrameType | None], None]) -> int:
    """`handle` takes SIGINT from now on, but where the shell has it ignored. Each signal that Python handles is a byte
    of the pipe whose reading end this is, written even while the main thread is in somebody else's code. To be called
    in the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def ignore_interrupts() -> None:
    """This process ends anyway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_fork_server(modules: Sequence[str]) -> None:
    """Begin a process that imports `modules` and then forks others off, of multiprocessing's "forkserver". Returns at
    once; nothing where there is one already, of whatever modules."""
    multiprocessing.set_forkserver_preload(list(modules))
    with sheltered():
        forkserver.ensure_running()


@contextmanager
def sheltered() -> Iterator[None]:
    """Python processes that start in here inherit a blocked SIGINT, so that Ctrl-C cannot kill them before they ignore
    it, and find their first modules where Python is installed, whatever lies in the working directory."""
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
    """This process's environment and `more`, for a `python -m` that imports nothing from the working directory but
    flywheel itself, where that lies there."""
    home = str(Path(__file__).resolve().parents[1])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*filter(None, given), *([] if home in (*given, *site.getsitepackages()) else [home])]
    return {**os.environ, _SAFE_PATH: "1", **({"PYTHONPATH": os.pathsep.join(path)} if path else {}), **more}


def enter_child() -> None:
    """To be called first in a spawned process: Ctrl-C is its parent's business, and it does not outlive its parent,
    whose stdout is its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    leave_stdout()


def leave_stdout() -> None:
    """Whatever prints here goes to stderr, and who reads the parent's stdout finds its end when the parent ends."""
    os.dup2(2, 1)


def _die_with_parent() -> None:
    """A parent that was killed leaves no process behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
