"""The tables of a packed program, interpreted in numpy and torch the way the kernel does, byte for byte in its memory.

It knows nothing of recipes or tasks: what it computes is what the tables say. Asserts hold the protocol between the
loader, the matrix warps and the vector warps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from fragments import from_fragments, to_fragments
from torch import Tensor

from flywheel.ir import PARAM_FIELDS, DType, InstructionKind, MegakernelProgram
from flywheel.ir.operations import PRODUCTS
from flywheel.plan.scratch import SPILLED
from flywheel.plan.staging import PARTIALS_BYTES, WORK_BYTES
from flywheel.plan.step import ABSENT, RESULT_REF, Epilogue
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import InstructionFlag, Layout, SegmentFlag, StepFlag
from flywheel.vm.pack import PackedProgram
from flywheel.vm.reference.ops import OPS

K = InstructionKind
OWNED = {
    "n_off": StepFlag.OWN_N_OFF, "N_tile": StepFlag.OWN_N_TILE, "pos": StepFlag.OWN_POS,
    "kv_start": StepFlag.OWN_KV_START, "kv_len": StepFlag.OWN_KV_LEN,
}  # fmt: skip
OPTIONAL = {
    "scale": (StepFlag.HAS_SCALE, (K.EMBED, K.MUL, K.ROPE)),
    "n_heads": (StepFlag.HAS_HEADS, (K.ATTENTION_COMBINE,)),
    "head_dim": (StepFlag.HAS_HEAD_DIM, (K.ATTENTION_COMBINE,)),
    "M_tile": (StepFlag.HAS_M_TILE, (K.COPY,)),
}
NAN_BYTE = 0xFF


def bits_of(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


def is_written(tensor: Tensor) -> bool:
    """Whether no element has all bits set."""
    bits = bits_of(tensor).reshape(-1, tensor.element_size())
    return not bool((bits == NAN_BYTE).all(axis=1).any())


def refs_of(step: Any) -> list[int]:
    product = step["as"]["product"]
    adds = step["op"] in PRODUCTS and product["epilogue"] != Epilogue.NONE
    epilogue = [int(product["epilogue_arg"])] if adds else []
    return [*map(int, step["args"][: step["n_args"]]), *epilogue]


@dataclass
class Sm:
    """One block: what it has on chip, and how far it is in its queue and its stream."""

    queue: int
    queue_end: int
    stream: int
    staging: Any
    workspace: Any
    announced: Tensor | None = None
    unscaled: bool = False  # whether the staged operand is a norm's that leaves its scales


class TableVM:
    def __init__(self, packed: PackedProgram, program: MegakernelProgram, tensors: Mapping[str, Tensor]) -> None:
        self.packed, self.program = packed, program
        self.arena = np.full(packed.arena.nbytes, NAN_BYTE, np.uint8)
        self.memory: dict[int, Any] = {}
        for row, buffer in enumerate(program.buffers):
            if row in packed.arena.offsets:
                offset = packed.arena.offsets[row]
                assert offset % 256 == 0
                self.memory[row] = self.arena[offset : offset + buffer.nbytes]
                assert len(self.memory[row]) == buffer.nbytes
                if buffer.name in tensors:
                    self.memory[row][:] = bits_of(tensors[buffer.name]).reshape(-1)
            elif packed.buffers["layout"][row] == Layout.FRAGMENTS:
                element = TORCH_DTYPES[buffer.dtype].itemsize
                bits = bits_of(tensors[buffer.name]).reshape(-1).view(f"u{element}").reshape(buffer.shape)
                self.memory[row] = to_fragments(bits).view(np.uint8)
            else:
                self.memory[row] = bits_of(tensors[buffer.name]).reshape(-1).copy()

    def run(self, pos: int = -1) -> dict[str, Tensor]:
        """One launch; the program's outputs and caches by name."""
        packed = self.packed
        variant = packed.variant
        self.counters = [0] * packed.n_counters
        sms = [
            Sm(int(first), int(end), int(stream), np.full(variant.staged_bytes, NAN_BYTE, np.uint8),
               np.full(packed.workspace_stride, NAN_BYTE, np.uint8))
            for first, end, stream in zip(packed.queues, packed.queues[1:], packed.streams, strict=False)
        ]  # fmt: skip
        moved = True
        while moved:
            moved = False
            for number, sm in enumerate(sms):
                while sm.queue < sm.queue_end and self._ready(sm, packed.instructions[sm.queue]):
                    self._task(number, sm, pos)
                    moved = True
        for number, sm in enumerate(sms):
            assert sm.queue == sm.queue_end, "stuck"
            assert sm.stream == packed.streams[number + 1], "weights were streamed that nothing multiplied"
        kinds = ("IO_OUTPUT", "KV_CACHE")
        return {
            buffer.name: self._tensor(row, buffer.dtype).view(buffer.shape)
            for row, buffer in enumerate(self.program.buffers)
            if buffer.kind.name in kinds
        }

    def _ready(self, sm: Sm, instruction: Any) -> bool:
        signalled = all(
            self.counters[instruction["wait_counter"][i]] >= instruction["wait_threshold"][i]
            for i in range(instruction["n_waits"])
        )
        steps = self.packed.steps[instruction["first_step"] :][: instruction["n_steps"]]
        return signalled and all(
            is_written(self._operand(sm, instruction, steps, ref))
            for step in steps
            if not step["flags"] & StepFlag.VIEW
            for ref in refs_of(step)
            if self._is_awaited(instruction, steps, ref)
        )

    def _is_awaited(self, instruction: Any, steps: Any, ref: int) -> bool:
        while ref >= RESULT_REF and steps[ref - RESULT_REF]["flags"] & StepFlag.VIEW:
            ref = int(steps[ref - RESULT_REF]["args"][0])
        if ref >= RESULT_REF:
            return False
        return bool(self.packed.buffers["layout"][instruction["inputs"][ref]] == Layout.AWAITED)

    def _task(self, number: int, sm: Sm, pos: int) -> None:
        packed = self.packed
        instruction = packed.instructions[sm.queue]
        assert instruction["sm"] == number
        params = {name: instruction["params"][name].item() for name in PARAM_FIELDS}
        if pos >= 0 and instruction["flags"] & InstructionFlag.MOVES_POS:
            params["pos"] = pos
        if "WINDOW" in packed.variant.features and params["group"] > 0:
            params["kv_start"] += max(0, params["pos"] + 1 - params["group"])
        if pos >= 0 and instruction["flags"] & InstructionFlag.MOVES_WINDOW:
            if instruction["flags"] & InstructionFlag.WINDOW_NEW:
                params["kv_start"] = pos
            end = pos if instruction["flags"] & InstructionFlag.WINDOW_PAST else pos + 1
            params["kv_len"] = min(params["kv_len"], max(0, end - params["kv_start"]))
        steps = packed.steps[instruction["first_step"] :][: instruction["n_steps"]]
        reuses = bool(instruction["flags"] & InstructionFlag.X_STAGED)
        first = next(i for i, step in enumerate(steps) if step["op"] in PRODUCTS) if reuses else 0
        for index in range(first, len(steps)):
            if steps[index]["op"] in PRODUCTS:
                self._matrix(sm, instruction, steps, index, params)
            else:
                self._vector(sm, instruction, steps, steps[index], params)
        if instruction["out_counter"] != ABSENT:
            self.counters[instruction["out_counter"]] += 1
        sm.queue += 1

    def _tensor(self, row: int, dtype: DType) -> Tensor:
        return torch.from_numpy(self.memory[row]).view(TORCH_DTYPES[dtype])

    def _scratch(self, sm: Sm, step: Any) -> Tensor:
        dtype = TORCH_DTYPES[DType(int(step["out_dtype"]))]
        scratch, nbytes = int(step["scratch"]), int(step["out_numel"]) * dtype.itemsize
        assert scratch >= 0 and scratch % 16 == 0
        area = sm.workspace if scratch & SPILLED else sm.staging
        start = scratch & ~SPILLED
        assert start + nbytes <= len(area)
        if step["op"] == K.RMSNORM and step["as"]["norm"]["pitch_blocks"]:  # rows apart, as its matrix step has them
            assert step["flags"] & StepFlag.ANNOUNCES and start == 0
            rows, pitch = int(step["as"]["norm"]["rows"]), 16 * int(step["as"]["norm"]["pitch_blocks"])
            apart = torch.from_numpy(area[: rows * pitch * dtype.itemsize]).view(dtype).view(rows, pitch)
            return apart[:, : int(step["params"]["hidden"])]
        flat = torch.from_numpy(area[start : start + nbytes]).view(dtype)
        return flat.view(max(1, int(step["as"]["product"]["rows"])), -1) if step["op"] in PRODUCTS else flat

    def _operand(self, sm: Sm, instruction: Any, steps: Any, ref: int) -> Tensor:
        if ref >= RESULT_REF:
            made = steps[ref - RESULT_REF]
            if made["flags"] & StepFlag.VIEW:
                source = self._operand(sm, instruction, steps, int(made["args"][0])).reshape(-1)
                start = int((made if made["flags"] & StepFlag.OWN_N_OFF else instruction)["params"]["n_off"])
                return source[start : start + int(made["out_numel"])]
            return self._scratch(sm, made)
        assert 0 <= ref < instruction["n_inputs"]
        row = int(instruction["inputs"][ref])
        buffer = self.packed.buffers[row]
        shape = [int(dim) for dim in buffer["shape"][: buffer["rank"]]]
        tensor = self._tensor(row, DType(int(buffer["dtype"])))
        if buffer["layout"] == Layout.FRAGMENTS:
            bits = from_fragments(self.memory[row].view(f"u{tensor.element_size()}"), shape[0], shape[1])
            tensor = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8).reshape(-1)).view(tensor.dtype)
        return tensor.view(shape) if tensor.numel() == prod(shape) else tensor.view(*shape[:-1], -1)

    def _out(self, sm: Sm, instruction: Any, step: Any, params: Mapping[str, Any]) -> Tensor:
        """All of what a step may write, flat unless its rows are apart."""
        if step["out"] < 0:
            scratch = self._scratch(sm, step)
            return scratch.view(-1) if scratch.is_contiguous() else scratch
        row = int(instruction["outputs"][step["out"]])
        tensor = self._tensor(row, DType(int(self.packed.buffers["dtype"][row])))
        if step["out"] == 0 and instruction["op"] == K.FUSED and instruction["flags"] & InstructionFlag.TILED:
            return tensor[params["n_off"] : params["n_off"] + params["N_tile"]]
        return tensor

    def _own(self, step: Any, params: Mapping[str, Any], name: str) -> Any:
        return step["params"][name].item() if step["flags"] & OWNED[name] else params[name]

    def _vector(self, sm: Sm, instruction: Any, steps: Any, step: Any, params: Mapping[str, Any]) -> None:
        op = InstructionKind(int(step["op"]))
        if step["flags"] & StepFlag.VIEW:
            return
        inputs = [self._operand(sm, instruction, steps, int(ref)) for ref in step["args"][: step["n_args"]]]
        given = {name: step["params"][name].item() for name in PARAM_FIELDS}
        given |= {name: self._own(step, params, name) for name in OWNED}
        for name, (flag, ops) in OPTIONAL.items():
            if op in ops and not step["flags"] & flag:
                del given[name]
        if op is K.COPY and not step["flags"] & StepFlag.HAS_COLUMNS:
            del given["n_off"]
        out = self._out(sm, instruction, step, params)
        if op is K.KV_APPEND:
            assert step["as"]["append"]["row_numel"] == inputs[1].numel() // inputs[1].shape[0]
            OPS[op](inputs, out.view(inputs[1].shape), given)
            return
        assert out.numel() == step["out_numel"]
        result = torch.empty(out.numel(), dtype=TORCH_DTYPES[DType(int(step["out_dtype"]))])
        if op is K.ROPE:
            self._rope(inputs, result, step)
        elif op is K.SOFTMAX:
            shape = step["as"]["softmax"][["outer", "n", "inner"]].tolist()
            result.copy_(inputs[0].reshape(shape).float().softmax(1).reshape(-1))
        else:
            OPS[op](inputs, result, given)
        if step["flags"] & StepFlag.ANNOUNCES:
            sm.unscaled = bool(step["flags"] & StepFlag.LEAVES_SCALE)  # here scaled all the same, to be rounded alike
            assert op is K.RMSNORM or not sm.unscaled
        if op is K.ATTENTION_TILE:
            sm.staging[-WORK_BYTES:] = NAN_BYTE
        out.copy_(result.view(out.shape))

    def _rope(self, inputs: list[Tensor], result: Tensor, step: Any) -> None:
        x, positions = inputs
        head_dim = int(step["params"]["head_dim"])
        frequencies = torch.from_numpy(self.packed.floats[step["as"]["rope"]["frequencies"] :][: head_dim // 2])
        angles = positions.reshape(-1, 1, 1).float() * frequencies
        low, high = x.reshape(positions.numel(), -1, head_dim).float().chunk(2, dim=-1)
        turned = torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)
        result.copy_(turned.reshape(-1))

    def _matrix(self, sm: Sm, instruction: Any, steps: Any, index: int, params: Mapping[str, Any]) -> None:
        step = steps[index]
        flags, product = int(step["flags"]), step["as"]["product"]
        rows, each = (int(product[name]) for name in ("rows", "kblocks"))
        how = StepFlag(flags) & (StepFlag.STAGE | StepFlag.X_IN_PLACE | StepFlag.REUSE_X)
        assert how in (StepFlag.STAGE, StepFlag.X_IN_PLACE, StepFlag.REUSE_X)
        x = self._operand(sm, instruction, steps, int(step["args"][0])).reshape(rows, -1)
        depth = x.shape[1]
        assert depth == step["params"]["K"] and x.dtype is TORCH_DTYPES[self.packed.dtype]
        starts = range(0, -(-depth // 16), each)
        streams = len(starts) > 1
        fresh = not instruction["flags"] & InstructionFlag.X_STAGED and how is not StepFlag.REUSE_X
        assert fresh or not streams
        assert len(starts) == 1 or how is not StepFlag.X_IN_PLACE
        assert len(starts) == 1 or product["row_chunks"] == self.packed.variant.matrix_warps
        if how is StepFlag.X_IN_PLACE:
            assert steps[int(step["args"][0]) - RESULT_REF]["flags"] & StepFlag.ANNOUNCES
        if how is StepFlag.STAGE and not instruction["flags"] & InstructionFlag.X_STAGED:
            sm.unscaled = False
        assert bool(flags & StepFlag.TAKES_SCALE) == sm.unscaled
        if fresh:
            sm.announced = None
        n_off, n_tile = self._own(step, params, "n_off"), self._own(step, params, "N_tile")
        end = -(-(n_off + n_tile) // 16)
        passes = []
        for block in range(n_off // 16, end, self.packed.pass_blocks):
            blocks = block, min(end, block + self.packed.pass_blocks)
            new = fresh and (streams or not passes)
            if new and not streams:
                self._stage(sm, x, 0, -(-depth // 16), how is StepFlag.STAGE)
            product = torch.zeros(rows, 16 * (blocks[1] - blocks[0]))
            for start in starts:
                kblocks = min(each, -(-depth // 16) - start)
                if streams:
                    self._stage(sm, x, start, kblocks, True)
                operand = self._staged(sm, rows, kblocks)[:, : kblocks * 16]
                # Matrix warps may read it at any time since it was announced: it must be the same all along.
                assert sm.announced is not None and torch.equal(sm.announced, operand)
                mine = x[:, start * 16 :][:, : kblocks * 16]
                assert torch.equal(operand[:, : mine.shape[1]], mine) or instruction["flags"] & InstructionFlag.X_STAGED
                slices = start > 0, start < starts[-1]
                product += self._segment(sm, instruction, step, operand.float(), new, blocks, start, slices)
            passes.append(product)
        self._store(sm, instruction, steps, step, params, torch.cat(passes, dim=1)[:, n_off % 16 :][:, :n_tile], n_off)

    def _staged(self, sm: Sm, rows: int, kblocks: int) -> Tensor:
        """What lies in the staging area."""
        dtype = TORCH_DTYPES[self.packed.dtype]
        stride = 16 * (kblocks + (rows > 1))
        area = sm.staging[: rows * stride * dtype.itemsize]
        return torch.from_numpy(area).view(dtype).view(rows, stride)

    def _stage(self, sm: Sm, x: Tensor, start: int, kblocks: int, copies: bool) -> None:
        """Announce a slice of x, after a copy of it if it is not there yet."""
        staged = self._staged(sm, len(x), kblocks)
        if copies:
            copied = x[:, start * 16 :][:, : kblocks * 16].clone()
            staged[:, : kblocks * 16] = 0
            staged[:, : copied.shape[1]] = copied
        sm.announced = staged[:, : kblocks * 16].clone()

    def _segment(
        self, sm: Sm, instruction: Any, step: Any, x: Tensor, fresh: bool,
        span: tuple[int, int], start: int, slices: tuple[bool, bool],
    ) -> Tensor:  # fmt: skip
        """The next segment of the stream times a slice of x."""
        packed, made = self.packed, step["as"]["product"]
        element = TORCH_DTYPES[packed.dtype].itemsize
        fragment = 256 * element
        assert sm.stream < len(packed.segments)
        segment = packed.segments[sm.stream]
        row = int(instruction["inputs"][step["args"][1]])
        assert packed.segment_buffers[sm.stream] == row
        assert segment["rows"] == len(x) == made["rows"]
        assert segment["queue_index"] == sm.queue - packed.queues[instruction["sm"]]
        blocks, kblocks, each = int(segment["row_blocks"]), int(segment["kblocks"]), x.shape[1] // 16
        assert blocks == span[1] - span[0]
        flags = SegmentFlag.FRESH_X, SegmentFlag.CONTINUES, SegmentFlag.GOES_ON
        marked = [bool(segment["flags"] & flag) for flag in flags]
        merged = bool(segment["slice_chunks"])  # one segment for all slices, which its chunks never straddle
        if merged:
            assert packed.variant.rows == len(x) > 1 == blocks and any(slices) and marked == [fresh, False, False]
            assert segment["slice_chunks"] * segment["chunk_kblocks"] == each == made["kblocks"]
            assert segment["row_chunks"] >= packed.variant.chunk_groups and kblocks * 16 == step["params"]["K"]
        else:
            assert kblocks == each and marked == [fresh, *slices]
        assert blocks * packed.variant.matrix_warps * len(x) * 64 <= PARTIALS_BYTES // 2
        assert segment["chunk_kblocks"] * fragment <= packed.variant.chunk_bytes
        assert 0 <= segment["row_chunks"] * segment["chunk_kblocks"] - kblocks < segment["chunk_kblocks"]
        assert segment["row_chunks"] == made["row_chunks"] or any(slices)
        stride, src = int(segment["row_stride"]), int(segment["src"])
        begin = 0 if merged else start
        assert src == span[0] * stride + begin * fragment and (begin + kblocks) * fragment <= stride
        memory = self.memory[row]
        products = []
        for row_block in range(blocks):
            at = src + row_block * stride + (start - begin) * fragment
            octets = memory[at : at + each * fragment]
            assert len(octets) == each * fragment
            weights = from_fragments(octets.view(f"u{element}"), 16, each * 16)
            tensor = torch.from_numpy(np.ascontiguousarray(weights).view(np.uint8)).view(TORCH_DTYPES[packed.dtype])
            products.append(x @ tensor.view(16, -1).float().T)
        sm.stream += not (merged and slices[1])
        return torch.cat(products, dim=1)

    def _store(
        self, sm: Sm, instruction: Any, steps: Any, step: Any, params: Mapping[str, Any], product: Tensor, n_off: int
    ) -> None:
        rows, n_tile = product.shape
        if step["n_args"] > 2:
            bias = self._operand(sm, instruction, steps, int(step["args"][2])).reshape(-1)
            product = product + bias[n_off : n_off + n_tile].float()
        if step["flags"] & StepFlag.HAS_SCALE:
            product = product * step["params"]["scale"].item()
        if (cap := step["params"]["theta"].item()) > 0:
            product = cap * torch.tanh(product / cap)
        value = product.to(TORCH_DTYPES[DType(int(step["out_dtype"]))]).float()
        epilogue = step["as"]["product"]["epilogue"]
        if epilogue == Epilogue.ADD:
            other = self._operand(sm, instruction, steps, int(step["as"]["product"]["epilogue_arg"])).reshape(rows, -1)
            value = value + other[:, n_off : n_off + n_tile].float()
        elif epilogue == Epilogue.SILU_MUL:
            gate = self._operand(sm, instruction, steps, int(step["as"]["product"]["epilogue_arg"])).reshape(rows, -1)
            value = torch.nn.functional.silu(gate.float()) * value
        elif epilogue == Epilogue.GELU_MUL:
            gate = self._operand(sm, instruction, steps, int(step["as"]["product"]["epilogue_arg"])).reshape(rows, -1)
            value = torch.nn.functional.gelu(gate.float(), approximate="tanh") * value
        out = self._out(sm, instruction, step, params)
        if step["flags"] & StepFlag.INDEX_FROM_ZERO:
            assert out.numel() == rows * n_tile or (instruction["op"] != K.FUSED and out.numel() > rows * n_tile)
            out[: rows * n_tile] = value.reshape(-1)
        else:
            out.view(rows, -1)[:, n_off : n_off + n_tile] = value.to(out.dtype)
