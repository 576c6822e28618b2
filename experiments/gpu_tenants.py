"""Shares this machine's GPU with others, and checks what flywheel does then. It takes under six minutes.

    python experiments/gpu_tenants.py [--model llama3.2-1b] [--only memory,compute,stopped,staging]

memory: a tenant holds all but 2 GB; search, bench, generate and serve must each end with one line that says what is
free and who holds the rest. compute: a tenant multiplies matrices in the middle of a search, which must wait, say so,
and end with a best from a quiet GPU. stopped: the search's worker is stopped while it starts; a line must say so, and
the search must end. staging: weights find no memory for their staging copy; all memory must be back, and a retry work.
Exits 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLYWHEEL = (sys.executable, "-m", "flywheel")
HERE = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
SPARED = 2 * 10**9
LIMIT_S = 120.0
COMPUTE_S, SEARCH_S = 15, 45
SLACK = 64 * 2**20
"""Bytes by which the driver's count of free memory may differ, for its own use."""

Row = tuple[str, bool, float, str]
"""What was tried, whether it went as it must, seconds, and what was seen."""

TENANT = """
import sys, time, torch
kind, amount = sys.argv[1], float(sys.argv[2])
if kind == "hold":
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(int(free - amount), dtype=torch.uint8, device="cuda")
    print("ready", flush=True)
    sys.stdin.read()
else:
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print("ready", flush=True)
    end = time.monotonic() + amount
    while time.monotonic() < end:
        for _ in range(20):
            one @ one
        torch.cuda.synchronize()
"""


@contextmanager
def tenant(kind: str, amount: float) -> Iterator[subprocess.Popen[str]]:
    """Another process on the GPU, which holds all memory but `amount` bytes or computes for `amount` seconds."""
    command = [sys.executable, "-c", TENANT, kind, str(amount)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"tenant {kind}: did not start")
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, *arguments: str) -> tuple[int, str, float]:
    """(exit code, stderr, seconds) of a command in a folder; -1 if it does not end within LIMIT_S."""
    begun, command = time.monotonic(), [*FLYWHEEL, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=HERE, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, "", LIMIT_S
    return done.returncode, done.stderr, time.monotonic() - begun


def memory(model: str, folder: Path) -> Iterator[Row]:
    """Each command beside a tenant that holds the memory."""
    commands = {
        "search": ("--trials", "3", "--measure", "cuda"),
        "bench": ("--against", "cublas", "--rounds", "1"),
        "generate": ("--device", "cuda", "--prompt-ids", "1,2,3", "--max-tokens", "2"),
        "serve": ("--device", "cuda", "--port", "0"),
    }
    with tenant("hold", SPARED):
        for name, options in commands.items():
            code, said, seconds = run(folder, name, "--model", model, *options)
            lines = [line for line in said.splitlines() if " are free" in line]
            last = lines[-1] if lines else (said.strip().splitlines() or ["nothing"])[-1]
            who = re.search(r"others hold the rest: |on it are |does not tell who holds", last)
            right = code not in (0, -1) and len(lines) == 1 and who is not None and "Traceback" not in said
            yield f"memory: {name}, exit code {code}", right, seconds, last


def compute(model: str, folder: Path) -> Iterator[Row]:
    """A search in whose middle a tenant computes."""
    begun = time.monotonic()
    options = ("--trials", "5000", "--time", f"{SEARCH_S}s", "--measure", "cuda", "--store", "compute.db", "--jsonl")
    with subprocess.Popen([*FLYWHEEL, "search", "--model", model, *options], cwd=folder, env=HERE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as search:  # fmt: skip
        assert search.stdout is not None
        assert search.stderr is not None
        said: list[str] = []
        reader = Thread(target=lambda: said.extend(search.stderr or ()), daemon=True)
        reader.start()
        trials, end, other = 0, {}, None
        for line in search.stdout:
            event: dict[str, Any] = json.loads(line)
            trials += event["event"] == "trial"
            end = event if event["event"] == "end" else end
            if trials == 3 and other is None:
                other = Thread(target=_compute_once, daemon=True)
                other.start()
        code = search.wait()
        reader.join()
    seconds = time.monotonic() - begun
    told = [line.strip() for line in said if line.startswith(("flywheel: paused", "flywheel: goes on"))]
    paused = next((line for line in told if "paused" in line), "no pause")
    went_on = next((line for line in told if "goes on" in line), "did not go on")
    best = end.get("best") or {}
    yield f"compute: search, exit code {code}", code == 0, seconds, f"{trials} trials"
    yield "compute: it says who is there", "paused" in paused, seconds, paused
    yield "compute: it goes on when the GPU is quiet", "is quiet" in went_on, seconds, went_on
    quiet = best.get("disturbed", "no best") is None and not best.get("strangers")
    fact = f"{best.get('latency_us')} us, strangers {best.get('strangers')}, disturbed {best.get('disturbed')}"
    yield "compute: its best is of a quiet GPU", quiet, seconds, fact


def _compute_once() -> None:
    with tenant("compute", COMPUTE_S) as process:
        process.wait()


def stopped(model: str, folder: Path) -> Iterator[Row]:
    """A search whose GPU worker is stopped while it starts."""
    begun = time.monotonic()
    options = ("--trials", "3", "--measure", "cuda", "--store", "stopped.db")
    with subprocess.Popen([*FLYWHEEL, "search", "--model", model, *options], cwd=folder, env=HERE, text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as search:  # fmt: skip
        worker = None
        while worker is None and search.poll() is None and time.monotonic() - begun < LIMIT_S:
            time.sleep(0.05)
            worker = next(_workers(search.pid), None)
        if worker is not None:
            os.kill(worker, signal.SIGSTOP)
        try:
            _, said = search.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            search.kill()
            _, said = search.communicate()
    seconds = time.monotonic() - begun
    lines = [line for line in said.splitlines() if "is stopped" in line]
    right = bool(lines) and search.returncode != -signal.SIGKILL and "Traceback" not in said
    yield f"stopped: search, exit code {search.returncode}", right, seconds, lines[0] if lines else said[-300:]


def _workers(pid: int) -> Iterator[int]:
    """The processes below `pid` that were spawned to own a GPU."""
    for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split():
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in words:
            yield int(child)
        yield from _workers(int(child))


def staging(model: str, folder: Path) -> Iterator[Row]:
    """Weights whose staging copy finds no memory."""
    import numpy as np

    from flywheel.errors import GpuMemoryError
    from flywheel.ir import DType
    from flywheel.vm.abi import Layout
    from flywheel.vm.gpu.driver import open_gpu
    from flywheel.vm.gpu.nvml import read_presence
    from flywheel.vm.gpu.weights import ResidentWeights

    begun, gpu = time.monotonic(), open_gpu()

    def free() -> int:
        told = read_presence(gpu.pci_bus_id).free_bytes
        return gpu.free_bytes() if told is None else told

    shape = (16384, 16384)
    matrix = np.zeros(shape, np.uint16)
    with ResidentWeights(gpu, DType.BF16) as weights:
        weights.put("first", matrix[:16], (16, shape[1]), DType.BF16, Layout.FRAGMENTS)  # loads the kernels
        filler = gpu.alloc(gpu.free_bytes() - matrix.nbytes * 3 // 2)
        before, why = free(), "no error"
        try:
            weights.put("w", matrix, shape, DType.BF16, Layout.FRAGMENTS)
        except GpuMemoryError as error:
            why = str(error)
        after = free()
        yield "staging: finds no memory", why != "no error", time.monotonic() - begun, why
        fact = f"{before:,} bytes free before, {after:,} after"
        yield "staging: all memory is back", abs(before - after) <= SLACK, time.monotonic() - begun, fact
        gpu.free(filler)
        start = free()
        weights.put("w", matrix, shape, DType.BF16, Layout.FRAGMENTS)
        taken = start - free()
        right = abs(taken - matrix.nbytes) <= SLACK
        fact = f"{taken:,} of {matrix.nbytes:,} bytes"
        yield "staging: a retry takes one block", right, time.monotonic() - begun, fact
    left = abs(free() - start)
    yield "staging: and gives it back", left <= SLACK, time.monotonic() - begun, f"{left:,} bytes differ"


PARTS: dict[str, Callable[[str, Path], Iterator[Row]]] = {
    "memory": memory, "compute": compute, "stopped": stopped, "staging": staging,
}  # fmt: skip


def main() -> int:
    """Run the parts and print a table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there is {', '.join(PARTS)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only.split(","):
            for what, right, seconds, seen in PARTS[name](arguments.model, Path(folder)):
                wrong += not right
                print(f"{'right' if right else 'WRONG':<6} {seconds:6.1f} s  {what}\n{'':18}{seen}", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
