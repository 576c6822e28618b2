"""Times the loading of a found schedule: `python experiments/load_speed.py llama3-8b`, and on a GPU with `--gpu-too`.

The script lowers, proves, packs and compiles the schedule that comes with flywheel. It prints the CPU seconds of each
part, and writes a bundle. Other processes read the bundle. They must import neither torch nor Optuna nor SQLAlchemy.
With `--gpu-too`, the script draws random weights onto this machine's GPU. It then times loading until the first token
is there, and fails if loading compiles a kernel.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flywheel.errors import KernelCompileError
from flywheel.ir import BufferKind, DType, MegakernelProgram, ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.plan.kernels import arch_name
from flywheel.runtime.reading import read_bundle
from flywheel.runtime.sequences import GREEDY
from flywheel.runtime.session import BundleSession
from flywheel.runtime.weights import sample_digest
from flywheel.runtime.writing import bundle_files, write_folder
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.workload import Workload, make_workload
from flywheel.vm.gpu.nvrtc import compile_variant, nvrtc_version
from flywheel.vm.pack import pack

BAR_S = 0.5
NEVER = ("torch", "optuna", "sqlalchemy", "alembic", "numba", "scipy", "click")

READ = """
import json, sys, time
from pathlib import Path
import flywheel.runtime.session
from flywheel.runtime.reading import read_bundle
imported = time.process_time()
read_bundle(Path(sys.argv[1]))
print(json.dumps([imported, time.process_time() - imported, sorted(sys.modules)]))
"""


def make(
    workload: Workload, config: ScheduleConfig, tensors: Mapping[str, Any], compiling: Callable[..., Any]
) -> dict[str, bytes]:
    """Files of a bundle of a schedule, for weights of which `tensors` says what is known."""
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        parts[name] = time.process_time() - start
        return made

    program = timed("lower", lambda: lower(workload.graph, config, workload.target))
    assert timed("prove", lambda: validate(program, strict=True)).ok
    packed = timed("pack", lambda: pack(program))
    variant, dtype = packed.variant, DTYPES[workload.dtype]

    def build() -> Any:
        return compiling(
            arch_name(workload.target.sm_arch), variant.threads, dtype, matrix_warps=variant.matrix_warps,
            rows=variant.rows, formats=variant.formats,
        )  # fmt: skip

    build()
    kernel = timed("kernel from the cache", build)
    model = {
        "name": workload.model, "spec": asdict(workload.spec), "dtype": dtype.name, "context": workload.context,
        "batch": workload.batch,
    }  # fmt: skip
    described = dict(tensors) or undigested(program)
    about = {"model": model, "schedule": {"words": "shipped"}, "weights": {"tensors": described}}
    shown = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    print(f"{workload.model} on {workload.target.name}, {len(program.tasks):,} tasks, CPU s: {shown}")
    return bundle_files(packed, kernel, nvrtc_version(), about, {}, {name: name for name in described})


def undigested(program: MegakernelProgram) -> dict[str, Any]:
    """What a bundle says of a program's weights where there are none: no digests."""
    kinds = (BufferKind.WEIGHT, BufferKind.CONST)
    return {
        buffer.source or buffer.name: {"dtype": buffer.dtype.name, "shape": list(buffer.shape), "samples": ""}
        for buffer in program.buffers
        if buffer.kind in kinds
    }


def read(folder: Path, repeats: int) -> None:
    """CPU seconds of reading it in processes of their own."""
    done = [
        json.loads(subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, check=True).stdout)
        for _ in range(repeats)
    ]
    found = sorted({name for _, _, modules in done for name in NEVER if name in modules})
    imports, reads = (statistics.median(each[place] for each in done) for place in (0, 1))
    print(f"a bundle of it, CPU s: read {reads:.3f}, Python and imports before {imports:.3f}")
    print(f"imported of {', '.join(NEVER)}: {', '.join(found) or 'none'}")


def known(tensors: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """What a bundle says of tensors, but for the digest of all their bytes."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        flat = tensor.view(-1).view(torch.uint8)
        digest = sample_digest(
            dtype, tuple(tensor.shape), lambda at, size, flat=flat: flat[at : at + size].cpu().numpy().tobytes()
        )
        found[name] = {"dtype": dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes, "samples": digest}
    return found


def load(gpu: Any, folder: Path, tensors: Mapping[str, Any], repeats: int) -> None:
    """Seconds until the first token, beside weights that are on the GPU."""
    rows = []
    with patch("flywheel.vm.gpu.weights.compile_variant", side_effect=KernelCompileError("nothing may be compiled")):
        for _ in range(repeats):
            start = time.perf_counter()
            bundle = read_bundle(folder)
            was_read = time.perf_counter()
            session = BundleSession(gpu, bundle, tensors)
            was_loaded = time.perf_counter()
            sequences = session.sequences()
            sequences.join(0, [1], 2, GREEDY)
            sequences.advance()
            rows.append((was_read - start, was_loaded - was_read, time.perf_counter() - start))
            sequences.close()
            session.close()
    reads, loads, whole = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{gpu.name}, s: read {reads:.3f}, load {loads:.3f}, first token after {whole:.3f} (medians of {repeats})")
    print(f"bar: {BAR_S} s {'holds' if whole <= BAR_S else 'is missed'}")


def weights_on(workload: Workload, device: str) -> dict[str, Any]:
    """Random weights on a device of torch."""
    import torch

    from flywheel.models.weights import random_weights
    from flywheel.tensors import TORCH_DTYPES

    found = random_weights(workload.spec, 0, TORCH_DTYPES[DTYPES[workload.dtype]], device)
    if device == "cuda":
        torch.cuda.synchronize()
    return dict(found)


def main() -> None:
    """Print what takes how long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama3-8b")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu-too", action="store_true")
    arguments = parser.parse_args()
    workload = make_workload(arguments.model, arguments.gpu, "bf16", arguments.context)
    print(f"Python {platform.python_version()}, bf16, context {arguments.context}, medians of {arguments.repeats}")
    shipped = find_shipped(workload)
    if shipped is None:
        raise SystemExit(f"no schedule of {arguments.model} on {arguments.gpu} comes with flywheel")
    tensors = weights_on(workload, "cuda") if arguments.gpu_too else {}
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held) / "bundle"
        seen = known(tensors, DTYPES[workload.dtype]) if tensors else {}
        write_folder(folder, make(workload, shipped.config, seen, compile_variant))
        read(folder, arguments.repeats)
        if arguments.gpu_too:
            from flywheel.vm.gpu.driver import open_gpu

            load(open_gpu(), folder, tensors, arguments.repeats)


if __name__ == "__main__":
    main()
