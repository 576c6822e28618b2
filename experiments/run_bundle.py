"""Runs a bundle as another engine would: `run_bundle.py BUNDLE CHECKPOINT ID,ID... TOKENS`. Decodes one sequence
greedily, by weights of the bundle's own type. The numbers are those of the steps in docs/bundle.md."""

import json
import sys
from ctypes import c_int32
from pathlib import Path

import numpy as np

from flywheel.runtime.weights import open_stored  # where a tensor's bytes are in a checkpoint
from flywheel.vm.gpu.driver import Gpu, Memory, open_gpu  # CUDA's driver: memory, copies, launches
from flywheel.vm.gpu.nvrtc import CompiledUnit, EntryUsage


def run(gpu: Gpu, folder: Path, checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens after a prompt."""
    bundle, data = json.loads((folder / "bundle.json").read_text()), bytearray((folder / "tables.bin").read_bytes())
    kernel, launch, tables, about = (bundle[name] for name in ("kernel", "launch", "tables", "program"))
    grid, how = (launch["grid"], launch["threads"]), {name: launch[name] for name in ("smem_bytes", "cooperative")}

    def put(array: np.ndarray) -> int:  # the address of a copy on the GPU
        gpu.upload(memory := gpu.alloc(array.nbytes), array)
        return memory.address

    def member(struct: str, name: str, data: bytearray, begin: int = 0, rows: int = 1) -> np.ndarray:  # in place
        offset, kind = bundle["structs"][struct]["members"][name]
        return np.ndarray(rows, kind, data, begin + offset, bundle["structs"][struct]["bytes"])

    entries = {name: EntryUsage(**each) for name, each in kernel["entries"].items()}  # 1
    kernels = gpu.load(CompiledUnit(kernel["arch"], "", (folder / "kernel.cubin").read_bytes(), "", entries))
    regions = {name: put(np.full(of["bytes"], of["fill"], np.uint8)) for name, of in bundle["memory"].items()}  # 2
    regions["abort_flag"] = gpu.abort_flag.address
    at, stored = {}, open_stored(checkpoint, bundle["weights"]["tensors"])  # 3
    for each in bundle["buffers"]:
        name, word = each["name"], np.int16 if "16" in each["dtype"] else np.int32
        held = stored[each["tensor"]].data if "tensor" in each else np.full(each["shape"], -1, word)
        at[name] = plain = regions["arena"] + each["offset"] if "offset" in each else put(held)
        if each.get("layout") == 1:
            at[name] = put(np.zeros(np.prod([-(-size // 16) * 16 for size in each["shape"]]), word))
            gpu.launch(kernels["pack_matrix"], *grid, (plain, at[name], *map(c_int32, each["shape"])))
    (ptr := member("amk_buffer_t", "ptr", data, tables["buffers"]["offset"], len(at)))[:] = list(at.values())  # 4
    owners = np.frombuffer(data, "<i4", tables["segment_buffers"]["count"], tables["segment_buffers"]["offset"])
    member("amk_segment_t", "src", data, tables["segments"]["offset"], len(owners))[:] += ptr[owners]
    begin, program = put(np.frombuffer(data, np.uint8)), bytearray(bundle["structs"]["amk_program_t"]["bytes"])  # 5
    values = about["numbers"] | {name: begin + tables[table]["offset"] for name, table in about["tables"].items()}
    for name, value in (values | {name: regions[region] for name, region in about["memory"].items()}).items():
        member("amk_program_t", name, program)[:] = value
    where, tokens = put(np.frombuffer(program, np.uint8)), list(prompt)  # 6
    for position in range(len(prompt) + count - 1):
        gpu.upload(Memory(at["token_id"], 4), np.int32([tokens[position]]))
        gpu.upload(Memory(at["position"], 4), np.int32([position]))
        gpu.launch(kernels["megakernel"], *grid, (where, c_int32(position), 0), **how)
        made = gpu.download(Memory(at["next_token"], 4), np.int32, (1,)).tolist()
        tokens += made if position >= len(prompt) - 1 else []
    return tokens[len(prompt) :]


if __name__ == "__main__":
    print(run(open_gpu(), *map(Path, sys.argv[1:3]), json.loads(f"[{sys.argv[3]}]"), int(sys.argv[4])))
