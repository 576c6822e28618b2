"""Where the warps of a launch are, and what they wait for: Nsight Compute's samples, summed by device function.

    ncu --section SourceCounters -k regex:megakernel --launch-skip 8 --launch-count 1 -o profile \\
        python experiments/warp_samples.py launch CONFIG.json [--model llama3.2-1b] [--gpu h200] [--batch 1]
    ncu -i profile.ncu-rep --page source --csv --print-units base > profile.csv
    python experiments/warp_samples.py table CONFIG.json profile.csv [--model ...] [--gpu ...] [--batch ...]

The second step needs ncu. The last step needs nvdisasm, which lists the same kernel's functions. Neither needs the GPU.
The launches before the profiled one warm up and check nothing; `flywheel verify` does.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from bisect import bisect_right

import pandas as pd

from flywheel.cli.files import load_config
from flywheel.ir import MegakernelProgram
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.plan import variant_of
from flywheel.plan.kernels import arch_name
from flywheel.search.workload import make_workload
from flywheel.store.schedule import Schedule
from flywheel.vm.gpu.nvrtc import compile_variant

STALLS = ("long_sb", "barrier", "wait", "branch_resolving", "selected", "short_sb", "no_inst", "not_selected")
CONTEXT = 512


def main() -> None:
    """Launch, or print the table."""
    parser = argparse.ArgumentParser(description="warp samples by device function")
    parser.add_argument("what", choices=["launch", "table"])
    parser.add_argument("config")
    parser.add_argument("profile", nargs="?")
    parser.add_argument("--model", default="llama3.2-1b", help="where the config does not say")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    given = load_config(arguments.config)
    model = given.model if isinstance(given, Schedule) else arguments.model
    config = given.config if isinstance(given, Schedule) else given
    workload = make_workload(model, arguments.gpu, "bf16", CONTEXT, arguments.batch)
    program = lower(workload.graph, config, workload.target)
    if arguments.what == "launch":
        launch(program, model, arguments.batch)
    elif arguments.profile is None:
        parser.error("table: no profile.csv")
    else:
        known, instructions = functions(program)
        lines = pd.read_csv(arguments.profile, skiprows=1)
        if len(lines) != instructions:
            raise SystemExit(f"{arguments.profile}: {len(lines)} instructions, the program's kernel has {instructions}")
        print(table(lines, known).to_string())


def launch(program: MegakernelProgram, model: str, batch: int) -> None:
    """Some launches at the last position, behind an emptied L2 cache each."""
    from flywheel.decode.cuda import CudaModel, prepare_torch
    from flywheel.decode.source import open_source
    from flywheel.vm.gpu.driver import open_gpu

    gpu, source, dtype = open_gpu(), open_source(model), DTYPES["bf16"]
    prepare_torch()
    weights = source.weights(dtype, 0, "cuda")
    with (
        CudaModel(gpu, source.spec, dtype, CONTEXT, weights, batch) as resident,
        resident.load(program) as session,
    ):
        print(session.time([1] * batch, CONTEXT - 1, samples=16, warmup=2))


def functions(program: MegakernelProgram) -> tuple[list[tuple[int, str]], int]:
    """(offset in the kernel, name) of each device function of the program's kernel, ascending; its instructions."""
    variant = variant_of(program)
    compiled = compile_variant(
        arch_name(variant.sm_arch), variant.threads, DTYPES["bf16"],
        matrix_warps=variant.matrix_warps, rows=variant.rows,
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        listing = subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    found, name, count = [(0, "megakernel")], "", 0
    for line in listing[listing.index(".text.megakernel:") :].splitlines():
        if line.startswith("\t.section"):
            break
        if called := re.fullmatch(r"\$(?:megakernel\$)?(_Z\w+|__internal\S*):", line):
            name = called[1]
        elif place := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            count += 1
            if name:
                found.append((int(place[1], 16), name))
            name = ""
    return sorted(found), count


def table(lines: pd.DataFrame, known: list[tuple[int, str]]) -> pd.DataFrame:
    """Samples of each function, in all and by what the warp waited for, most first; `lines` is an instruction each."""
    addresses = lines["Address"].map(lambda text: int(text, 16))
    starts = [start for start, _ in known]
    lines["function"] = [known[bisect_right(starts, at) - 1][1] for at in addresses - addresses.iloc[0]]
    columns = ["# Samples", *(f"stall_{stall}" for stall in STALLS)]
    counts = lines[columns].apply(pd.to_numeric, errors="coerce").fillna(0)
    found = counts.groupby(lines["function"]).sum().astype(int).sort_values("# Samples", ascending=False)
    found.loc["all"] = found.sum()
    return found[found["# Samples"] > 0]


if __name__ == "__main__":
    main()
