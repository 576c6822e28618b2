"""Runs a bundle without flywheel's loader, as another engine would: `run_bundle.py BUNDLE CHECKPOINT ID,ID... TOKENS`.

Decodes one sequence greedily, of a bundle whose weights are stored in its own type. Source: docs/bundle.md.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flywheel.decode.stored import open_stored  # where a tensor's bytes are in a checkpoint
from flywheel.vm.gpu.driver import open_gpu  # CUDA's driver: memory, copies, launches
from flywheel.vm.gpu.nvrtc import CompiledUnit, EntryUsage

SIZES = {"F32": 4, "F16": 2, "BF16": 2}


def struct(bundle: dict, name: str) -> np.dtype:
    offsets, formats = zip(*bundle["structs"][name]["members"].values(), strict=True)
    names, size = list(bundle["structs"][name]["members"]), bundle["structs"][name]["bytes"]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def put(gpu: Any, array: np.ndarray) -> int:
    memory = gpu.alloc(array.nbytes)
    gpu.upload(memory, array)
    return memory.address


def region(gpu: Any, nbytes: int, fill: int) -> int:
    memory = gpu.alloc(nbytes)
    gpu.fill(memory, fill)
    return memory.address


def place(gpu: Any, bundle: dict, buffer: dict, stored: dict, kernels: dict, memory: dict) -> int:
    """The address of a buffer; a matrix that is multiplied is packed."""
    if "offset" in buffer:
        return memory["arena"] + buffer["offset"]
    nbytes = SIZES[buffer["dtype"]]
    if buffer["kind"] == "KV_CACHE":
        return region(gpu, nbytes * int(np.prod(buffer["shape"])), 0xFF)
    key = buffer["tensor"], buffer["layout"]
    if key not in memory:
        memory[key] = put(gpu, stored[buffer["tensor"]].data)
        if buffer["layout"] == 1:
            rows, columns = buffer["shape"]
            packed = region(gpu, -(-rows // 16) * -(-columns // 16) * 256 * nbytes, 0)
            args = (memory[key], packed, ctypes.c_int32(rows), ctypes.c_int32(columns))
            gpu.launch(kernels["pack_matrix"], bundle["launch"]["grid"], bundle["launch"]["threads"], args)
            memory[key] = packed
    return memory[key]


def load(gpu: Any, folder: Path, checkpoint: Path) -> tuple[dict, dict, dict, int]:
    """(bundle, kernels, address of each region of memory, address of the program)."""
    bundle, data = json.loads((folder / "bundle.json").read_text()), (folder / "tables.bin").read_bytes()
    entries = {name: EntryUsage(**each) for name, each in bundle["kernel"]["entries"].items()}
    cubin = (folder / "kernel.cubin").read_bytes()
    kernels = gpu.load(CompiledUnit(bundle["kernel"]["arch"], "", cubin, "", entries))
    memory = {name: region(gpu, each["bytes"], each["fill"]) for name, each in bundle["memory"].items()}
    memory["abort_flag"] = gpu.abort_flag.address  # in the host's memory
    stored = open_stored(checkpoint, bundle["weights"]["tensors"])
    tables = {}
    for name, each in bundle["tables"].items():
        kind = struct(bundle, each["element"]) if each["element"] in bundle["structs"] else np.dtype("<i4")
        tables[name] = np.frombuffer(data, kind, each["bytes"] // kind.itemsize, each["offset"]).copy()
    tables["buffers"]["ptr"] = [place(gpu, bundle, each, stored, kernels, memory) for each in bundle["buffers"]]
    tables["segments"]["src"] += tables["buffers"]["ptr"][tables["segment_buffers"]]
    program, about = np.zeros(1, struct(bundle, "amk_program_t")), bundle["program"]
    for name, number in about["numbers"].items():
        program[name] = number
    for name, table in about["tables"].items():
        program[name] = put(gpu, tables[table])
    for name, where in about["memory"].items():
        program[name] = memory[where]
    return bundle, kernels, memory, put(gpu, program)


def run(gpu: Any, folder: Path, checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens behind a prompt."""
    bundle, kernels, memory, program = load(gpu, folder, checkpoint)
    at = {each["name"]: memory["arena"] + each["offset"] for each in bundle["buffers"] if "offset" in each}
    launch, words, tokens = bundle["launch"], gpu.alloc_host(2), list(prompt)
    for position in range(len(prompt) + count - 1):
        words.array[:] = tokens[position], position
        gpu.send(at["token_id"], words, 0, 1)
        gpu.send(at["position"], words, 1, 1)
        args = (program, ctypes.c_int32(position), 0)
        shared = {"smem_bytes": launch["smem_bytes"], "cooperative": launch["cooperative"]}
        gpu.launch(kernels["megakernel"], launch["grid"], launch["threads"], args, **shared)
        gpu.fetch(words, 0, at["next_token"], 1)
        gpu.sync()
        if position >= len(prompt) - 1:
            tokens.append(int(words.array[0]))
    return tokens[len(prompt) :]


if __name__ == "__main__":
    ids = [int(each) for each in sys.argv[3].split(",")]
    print(run(open_gpu(), Path(sys.argv[1]), Path(sys.argv[2]), ids, int(sys.argv[4])))
