"""The knobs of the search: their meanings, and their values for a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import DType, ScheduleConfig
from flywheel.lowering.tiling import even_rows
from flywheel.models.graph import Tensor
from flywheel.plan import KernelVariant, kernel_variant
from flywheel.plan.formats import Coding, coding_of, in_order
from flywheel.plan.kernels import MAX_STREAMED_HEADS, USUAL_HEAD_DIMS
from flywheel.plan.staging import operand_bytes
from flywheel.plan.variant import WARP
from flywheel.search.workload import Workload

Value = int | str
Choice = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Knob:
    """One dimension: its values for a workload, in order where `ordered`, and what it decides."""

    name: str
    values: Callable[[Workload], Sequence[Value]]
    ordered: bool
    meaning: str


def heights_of(workload: Workload, projections: Sequence[str]) -> list[int]:
    """Rows of each of these matrices that there are, of several GPUs those of the first, and of layers' most common
    kind."""
    graph = workload.graph.ranks[0] if workload.graph.ranks else workload.graph
    kinds = sorted(range(len(graph.kinds)), key=graph.order.count)
    found: dict[str, tuple[int, int]] = {}
    for block in (*[graph.kinds[kind] for kind in kinds], graph.epilogue):
        for op in [op for op in block.ops if op.name in projections]:
            matrix = block.tensors.get(op.inputs[1]) or graph.prologue.tensors[op.inputs[1]]
            found[op.name] = op.rows or (0, matrix.shape[0])
    return [stop - start for start, stop in (found[name] for name in projections if name in found)]


def rows_of(projections: Sequence[str], *waves: float) -> Callable[[Workload], list[Value]]:
    """Tile heights, in rows, that give each SM about `waves` tiles of the projections together; at most the tallest."""

    def values(workload: Workload) -> list[Value]:
        heights = heights_of(workload, projections)
        parts = [max(1, round(workload.target.num_sms * wave)) for wave in waves]
        return sorted({min(even_rows(sum(heights), count), even_rows(max(heights), 1)) for count in parts})

    return values


def blocks_of(workload: Workload) -> tuple[Any, ...]:
    """The blocks of a workload's graph, in order; of several GPUs, those of the first, which does all that any does."""
    graph = workload.graph
    return graph.ranks[0].blocks if graph.ranks else graph.blocks


def _kv_blocks(workload: Workload) -> list[Value]:
    """Sizes of KV blocks, in positions: what a layer attends to in 1, 2, 4 .. 32 blocks, of at least 32 positions
    each."""
    rows = workload.graph.most_attended
    sizes = {-(-rows // (parts * 16)) * 16 for parts in (1, 2, 4, 8, 16, 32)}
    return sorted(size for size in sizes if size >= min(32, -(-rows // 16) * 16))


def _past(workload: Workload) -> list[Value]:
    """Whether earlier rows of KV caches may be streamed: where a layer attends to them in several blocks, on tensor
    cores, and there are no lanes."""
    graph = workload.graph
    fits = graph.head_dim in USUAL_HEAD_DIMS and graph.group <= MAX_STREAMED_HEADS
    streams = fits and graph.lanes == 1 and graph.dtype is not DType.F32 and len(_kv_blocks(workload)) > 1
    return [0, 1] if streams else [0]


def _smem(workload: Workload) -> list[Value]:
    """Five eighths, six, seven and all of what a block may opt into, as far as a weight ring fits. Raises ConfigError
    where none does."""
    limit = workload.target.smem_bytes_per_block_optin
    sizes = [limit * part // 8 // 1024 * 1024 for part in (5, 6, 7)] + [limit]
    _variant(workload, limit, 4096)  # raises where there is none
    # Several rows take so much that what is left would be a ring of chunks that are too small to be streamed well.
    chunk = 4096 if workload.batch == 1 else max(size for size in (4096, 8192, 16384) if _fits(workload, limit, size))
    return [size for size in sizes if _fits(workload, size, chunk)]


def _chunks(workload: Workload) -> list[Value]:
    """Sizes that fit; of those that mean the same, since a chunk of a quantised matrix is whole units, the largest."""
    least = int(_smem(workload)[0])
    fitting = [chunk for chunk in (4096, 8192, 16384, 32768) if _fits(workload, least, chunk)]
    return list({_variant(workload, least, chunk): chunk for chunk in fitting}.values())


def _inflight(workload: Workload) -> list[Value]:
    """What keeps an H200's memory busy (64 KiB), less for slower memories, and what fills more and more of the ring
    that known_good has, as far as it lets copies be under way."""
    limit, chunks = workload.target.smem_bytes_per_block_optin, _chunks(workload)
    chunk = int(min(chunks, key=partial(distance, int(GOOD_ON_H200["chunk"]))))
    staged, codings = _variant(workload, limit, chunk).staged_bytes, _codings(workload)

    def under_way(size: int) -> int:
        tiling = {
            "stream": {"chunk_bytes": chunk, "inflight_bytes": size},
            "warps": {"matrix": int(GOOD_ON_H200["matrix"]), "chunk": int(GOOD_ON_H200["share"])},
        }
        config = ScheduleConfig(tiling, threads_per_block=int(GOOD_ON_H200["threads"]), smem_bytes_per_block=limit)
        return kernel_variant(config, workload.target, staged, codings).inflight_chunks

    least = {under_way(size * 1024): size * 1024 for size in (128, 96, 64, 48, 32)}  # of sizes that mean the same
    return sorted(least.values())


def _fits(workload: Workload, smem: int, chunk: int) -> bool:
    try:
        _variant(workload, smem, chunk)
    except ConfigError:
        return False
    return True


def _variant(workload: Workload, smem: int, chunk: int) -> KernelVariant:
    """The variant with so much shared memory and chunks of that size. Raises ConfigError where no ring fits."""
    graph, spec = workload.graph, workload.spec
    attended = [own.n_heads // workload.ranks * own.head_dim for own in spec.layer_kinds]
    made = spec.hidden, *attended  # of norms, and of attention
    codings = _codings(workload)
    staged = max(
        operand_bytes(graph.dtype, graph.batch, depth, depth in made, bool(codings)) for depth in _depths(workload)
    )
    config = ScheduleConfig({"stream": {"chunk_bytes": chunk}}, smem_bytes_per_block=smem)
    return kernel_variant(config, workload.target, staged, codings)


def check_kernels(workload: Workload) -> None:
    """Raises ConfigError if the CUDA VM has no kernel for a format of the work's matrices: no schedule would run."""
    for block in blocks_of(workload):
        for tensor in block.tensors.values():
            if tensor.format is None:
                continue
            matrix = f"weights {workload.weights}: {tensor.name.removesuffix('.w')}"
            if workload.graph.dtype is DType.F32:
                raise ConfigError(f"{matrix}: a product of a quantised matrix and an F32 vector has no kernel")
            try:
                _coding(workload, tensor)
            except InvalidProgramError as error:
                raise ConfigError(f"{matrix}: {error}") from error


def _coding(workload: Workload, tensor: Tensor) -> Coding:
    """How a quantised matrix is streamed. Raises InvalidProgramError where there is no kernel for it."""
    assert tensor.format is not None
    shape, its = tensor.shape, tensor.format
    scales = its.scale_dtype(workload.graph.dtype), its.scale_shape(shape)
    params = {"group": its.group_of(shape), "rows_per_scale": its.rows_per_scale(shape)}
    return coding_of(its.codes, scales, DType.I8 if its.zeros else None, params, shape[1])


def _codings(workload: Workload) -> tuple[Coding, ...]:
    """Formats of its quantised matrices that there are kernels for, without repeats."""
    found = set()
    for block in blocks_of(workload):
        for tensor in block.tensors.values():
            if tensor.format is not None:
                with suppress(InvalidProgramError):
                    found.add(_coding(workload, tensor))
    return in_order(found)


def _depths(workload: Workload) -> list[int]:
    """K of the products, ascending."""
    return sorted({op.params["K"] for block in blocks_of(workload) for op in block.ops if "K" in op.params})


def distance(wanted: int, value: Value) -> int:
    """The distance of a value from the wanted one."""
    return abs(int(value) - wanted)


def _just(*values: Value) -> Callable[[Workload], Sequence[Value]]:
    return lambda _: values


QKV: Final = ("q_proj", "k_proj", "v_proj")

KNOBS: Final = (
    Knob("rows.qkv", rows_of(QKV, 0.5, 0.75, 1, 2, 3), True, "rows a tile of q, k and v"),
    Knob("rows.o", rows_of(("o_proj",), 0.5, 1, 2), True, "rows a tile of the output projection"),
    Knob("rows.gate_up", rows_of(("up_proj",), 0.5, 1, 2, 3), True, "rows a tile of gate, and of up"),
    Knob("rows.down", rows_of(("down_proj",), 0.5, 1, 2), True, "rows a tile of the down projection"),
    Knob("rows.lm_head", rows_of(("lm_head",), 1, 2, 4, 8), True, "rows a tile of the head"),
    Knob("kv_block", _kv_blocks, True, "positions an attention tile"),
    Knob("fuse.qkv", _just(0, 1), True, "1: the input norm in each q, k, v tile"),
    Knob("fuse.attention", _just(0, 1, 2, 3, 4), True, "1: rope and both appends in one task a KV head; 2: rope in the "
         "attention tile; 3: both; 4: all in one, which with several KV blocks attends to the new row alone"),
    Knob("fuse.out", _just(0, 1, 2), True, "1: the residual in o_proj; 2: the merge of partials too"),
    Knob("fuse.mlp_in", _just(0, 1, 2), True, "1: SwiGLU in the gate/up tile; 2: the norm too"),
    Knob("fuse.down", _just(0, 1), True, "1: the residual in down_proj"),
    Knob("fuse.head", _just(0, 1), True, "1: the final norm in each head tile"),
    Knob("placement", _just("idle_first", "round_robin"), False, "which SM a task goes to (sm_assignment)"),
    Knob("depth", _just(0, 1, 2, 3, 4, 6, 8), True, "instructions that the loader runs ahead (pipelining_depth)"),
    Knob("hand_off", _just("counter", "data"), False, "how a task learns that its input is ready: by counters, or "
         "by polling the data"),
    Knob("threads", _just(*(WARP * warps for warps in (6, 10, 14, 16))), True, "threads a block (threads_per_block)"),
    Knob("matrix", _just(2, 4, 8), True, "warps that multiply, as far as they leave one for the rest"),
    Knob("share", _just(1, 2), True, "warps that share a chunk"),
    Knob("smem", _smem, True, "shared memory a block, in bytes (smem_bytes_per_block)"),
    Knob("chunk", _chunks, True, "bytes of one weight copy"),
    Knob("copies", _just(1, 2, 4), True, "weight copies that the loader starts at once"),
    Knob("inflight", _inflight, True, "bytes of weight copies under way"),
    Knob("past", _past, True, "1: the loader streams earlier rows of the KV caches, too, ahead of the queries"),
)
"""Every searched knob. Each value of each changes the program or the kernel variant."""

@dataclass(frozen=True, slots=True)
class Removed:
    """A knob of older versions: its only value that means what searches do `now`."""

    value: str
    now: str


REMOVED: Final[Mapping[str, Removed]] = MappingProxyType(
    {
        "pages": Removed("none", "buffers share no memory"),
        "rows.kv": Removed("1", "tiles of k and v are as high as those of q, which rows.qkv sets"),
        "exchange.bits": Removed("16", "GPUs send each other summands of 16 bits, in f32 of 32"),
        "pause": Removed("0", "loaders do not pause"),
    }
)
"""Knobs that no search sets any more, and what decides in their place. Source: results/knob_gains.txt."""

REMOVED_VALUES: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {("hand_off", "halves"): "a product begins when all of its input has arrived"}
)
"""Values that knobs have no more, and what is so now. Source: results/knob_gains.txt."""

GOOD_ON_H200: Final[Choice] = MappingProxyType(
    {
        "threads": 448,
        "matrix": 4,
        "share": 1,
        "chunk": 16384,
        "inflight": 65536,
        "hand_off": "data",
        "placement": "idle_first",
        "copies": 4,
    }
)
"""Knobs of the schedules that are known to be good. Source: results/gpu/versions.md."""
