"""The search space: a table of knobs, and the config that a choice of their values means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import ConfigError, UsageError
from flywheel.ir import KernelVariant, ScheduleConfig, kernel_variant
from flywheel.ir.variant import (
    COPIES,
    MAX_INPUT_ROWS_BYTES,
    SLICES_BESIDE,
    WARP,
    Slices,
    operand_bytes,
    slices_of,
    usual_rows_area,
)
from flywheel.lowering.fusion import PATTERNS, can_merge
from flywheel.lowering.tiling import even_rows
from flywheel.search.workload import Workload

Value = int | str
Choice = Mapping[str, Value]
Fixed = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Knob:
    """One dimension: its values for a workload, in order where `ordered`, and what it decides."""

    name: str
    values: Callable[[Workload], Sequence[Value]]
    ordered: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Dimension:
    """A knob with its values for one workload."""

    name: str
    values: tuple[Value, ...]
    ordered: bool


def _rows(projections: Sequence[str], *waves: float) -> Callable[[Workload], list[Value]]:
    """Tile heights that give each SM about `waves` tiles of the projections together, none above the tallest one."""

    def values(workload: Workload) -> list[Value]:
        shapes = {op.name: op.inputs[1] for block in _blocks(workload) for op in block.ops if len(op.inputs) > 1}
        tensors = {name: tensor for block in _blocks(workload) for name, tensor in block.tensors.items()}
        heights = [tensors[shapes[name]].shape[0] for name in projections]
        parts = [max(1, round(workload.target.num_sms * wave)) for wave in waves]
        return sorted({min(even_rows(sum(heights), count), even_rows(max(heights), 1)) for count in parts})

    return values


def _blocks(workload: Workload) -> tuple[Any, ...]:
    graph = workload.graph
    return graph.prologue, graph.layer, graph.epilogue


def _kv_blocks(workload: Workload) -> list[Value]:
    """The context in 1, 2, 4 .. 32 blocks, of at least 32 positions each."""
    context = workload.context
    sizes = {-(-context // (parts * 16)) * 16 for parts in (1, 2, 4, 8, 16, 32)}
    return sorted(size for size in sizes if size >= min(32, -(-context // 16) * 16))


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
    least = int(_smem(workload)[0])
    return [chunk for chunk in (4096, 8192, 16384, 32768) if _fits(workload, least, chunk)]


def _inflight(workload: Workload) -> list[Value]:
    """What keeps memory busy, and what fills more and more of the ring that known_good has, as far as it lets copies be
    under way."""
    limit, chunks = workload.target.smem_bytes_per_block_optin, _chunks(workload)
    chunk = int(min(chunks, key=partial(_distance, int(_GOOD_ON_H200["chunk"]))))
    staged = _variant(workload, limit, chunk).staged_bytes

    def under_way(size: int) -> int:
        tiling = {
            "stream": {"chunk_bytes": chunk, "inflight_bytes": size},
            "warps": {"matrix": int(_GOOD_ON_H200["matrix"]), "chunk": int(_GOOD_ON_H200["share"])},
        }
        config = ScheduleConfig(tiling, threads_per_block=int(_GOOD_ON_H200["threads"]), smem_bytes_per_block=limit)
        return kernel_variant(config, workload.target, staged).inflight_chunks

    least = {under_way(size * 1024): size * 1024 for size in (128, 96, 64, 32)}  # of sizes that mean the same
    return sorted(least.values())


def _fits(workload: Workload, smem: int, chunk: int) -> bool:
    try:
        _variant(workload, smem, chunk)
    except ConfigError:
        return False
    return True


def _variant(workload: Workload, smem: int, chunk: int) -> KernelVariant:
    """The variant with so much shared memory and chunks of that size, and the hand-off that takes most of it. Raises
    ConfigError where no ring fits."""
    graph = workload.graph
    staged = max(operand_bytes(graph.dtype, graph.batch, depth) for depth in _depths(workload))
    tiling = {"stream": {"chunk_bytes": chunk}, "hand_off": _HALVES}
    return kernel_variant(ScheduleConfig(tiling, smem_bytes_per_block=smem), workload.target, staged)


def _operand_bytes(workload: Workload) -> list[Value]:
    """What several rows of an input take where the config does not say, or less, down to what holds those of a norm.

    Of sizes that slice all operands alike the smallest, or the usual one.
    """
    graph, usual = workload.graph, usual_rows_area()
    depths = _depths(workload)
    least = operand_bytes(graph.dtype, graph.batch, depths[0])
    sliced: dict[tuple[Slices, ...], int] = {}
    for size in (20 * 1024, 40 * 1024, usual.nbytes):
        if size >= least:
            area = usual._replace(nbytes=size)
            sliced.setdefault(tuple(slices_of(graph.dtype, graph.batch, depth, area) for depth in depths), size)
    alike = sliced[tuple(slices_of(graph.dtype, graph.batch, depth, usual) for depth in depths)]
    return [usual.nbytes if size == alike else size for size in sliced.values()] if graph.batch > 1 else [usual.nbytes]


def _operand_slices(workload: Workload) -> list[Value]:
    """Slices that lie side by side, where there are any."""
    graph, usual = workload.graph, usual_rows_area()
    area = usual._replace(nbytes=int(_operand_bytes(workload)[0]))
    sliced = any(slices_of(graph.dtype, graph.batch, depth, area).depth < depth for depth in _depths(workload))
    return [2, 3, 4] if graph.batch > 1 and sliced else [usual.beside]


def _depths(workload: Workload) -> list[int]:
    """K of the products, ascending."""
    return sorted({op.params["K"] for block in _blocks(workload) for op in block.ops if "K" in op.params})


def _attentions(workload: Workload) -> list[Value]:
    """The last one where such a task has not too many operands."""
    names = PATTERNS["append+attention"].before + PATTERNS["append+attention"].anchors
    ops = [op for op in workload.graph.layer.ops if op.name in names]
    return [0, 1, 2, 3, 4, 5] if can_merge(ops) else [0, 1, 2, 3, 4]


def _just(*values: Value) -> Callable[[Workload], Sequence[Value]]:
    return lambda _: values


QKV: Final = ("q_proj", "k_proj", "v_proj")

KNOBS: Final = (
    Knob("rows.qkv", _rows(QKV, 0.5, 0.75, 1, 2, 3), True, "rows a tile of q, k and v"),
    Knob("rows.o", _rows(("o_proj",), 0.5, 1, 2), True, "rows a tile of the output projection"),
    Knob("rows.gate_up", _rows(("gate_proj",), 0.5, 1, 2, 3), True, "rows a tile of gate, and of up"),
    Knob("rows.down", _rows(("down_proj",), 0.5, 1, 2), True, "rows a tile of the down projection"),
    Knob("rows.lm_head", _rows(("lm_head",), 1, 2, 4, 8), True, "rows a tile of the head"),
    Knob("kv_block", _kv_blocks, True, "positions an attention tile"),
    Knob("fuse.qkv", _just(0, 1), True, "1: the input norm in each q, k, v tile"),
    Knob("fuse.attention", _attentions, True, "1: rope and both appends in one task a KV head; 2: rope in "
         "the attention tile; 3: both; 4: all in one, which with several KV blocks attends to the new row alone; 5: or "
         "to the last block, and merges the others' partials"),
    Knob("fuse.out", _just(0, 1, 2), True, "1: the residual in o_proj; 2: the merge of partials too"),
    Knob("fuse.mlp_in", _just(0, 1, 2), True, "1: SwiGLU in the gate/up tile; 2: the norm too"),
    Knob("fuse.down", _just(0, 1), True, "1: the residual in down_proj"),
    Knob("fuse.head", _just(0, 1), True, "1: the final norm in each head tile"),
    Knob("placement", _just("idle_first", "round_robin"), False, "sm_assignment"),
    Knob("depth", _just(0, 1, 2, 3, 4, 6, 8), True, "pipelining_depth"),
    Knob("hand_off", _just("counter", "data", "halves"), False, "how tasks learn that what they read is there; halves: "
         "by the data too, and half of what is multiplied is enough to begin"),
    Knob("pages", _just("graph_color", "linear", "none"), False, "page_allocation"),
    Knob("threads", _just(*(WARP * warps for warps in (6, 10, 14, 16))), True, "threads_per_block"),
    Knob("matrix", _just(2, 4, 8), True, "warps that multiply, as far as they leave one for the rest"),
    Knob("share", _just(1, 2), True, "warps that share a chunk"),
    Knob("smem", _smem, True, "smem_bytes_per_block"),
    Knob("chunk", _chunks, True, "bytes of one weight copy"),
    Knob("copies", _just(1, 2, 4), True, "weight copies that the loader starts at once"),
    Knob("inflight", _inflight, True, "bytes of weight copies under way"),
    Knob("operand.bytes", _operand_bytes, True, "bytes of the staging area that several rows of an input take"),
    Knob("operand.slices", _operand_slices, True, "slices of longer ones that lie there side by side"),
)
"""Every searched knob. Each value of each changes the program or the kernel variant."""

_HALVES: Final = {"data": 1, "slices": 2}

_GOOD_ON_H200: Final[Choice] = MappingProxyType(
    {
        "threads": 448,
        "matrix": 4,
        "share": 1,
        "chunk": 16384,
        "inflight": 65536,
        "hand_off": "data",
        "pages": "none",
        "placement": "idle_first",
        "copies": 4,
        "operand.bytes": MAX_INPUT_ROWS_BYTES,
        "operand.slices": SLICES_BESIDE,
        "fuse.attention": 4,
    }
)
"""Block and ring that were the fastest of a few with llama3.2-1b and llama3-8b on an H200."""

_ROWS: Final = MappingProxyType(
    {
        "rows.qkv": QKV,
        "rows.o": ("o_proj",),
        "rows.gate_up": ("gate_proj", "up_proj"),
        "rows.down": ("down_proj",),
        "rows.lm_head": ("lm_head",),
    }
)

_FUSED: Final = MappingProxyType(
    {
        ("fuse.qkv", 1): "attn_norm q_proj k_proj v_proj",
        ("fuse.attention", 1): "k_norm k_rope k_append v_append",
        ("fuse.attention", 2): "q_norm q_rope attention",
        ("fuse.attention", 3): "k_norm k_rope k_append v_append; q_norm q_rope attention",
        ("fuse.attention", 4): "k_norm k_rope k_append v_append q_norm q_rope attention",
        ("fuse.attention", 5): "k_norm k_rope k_append v_append q_norm q_rope attention attn_combine",
        ("fuse.out", 1): "o_proj attn_add",
        ("fuse.out", 2): "attn_combine o_proj attn_add",
        ("fuse.mlp_in", 1): "gate_proj up_proj silu_mul",
        ("fuse.mlp_in", 2): "mlp_norm gate_proj up_proj silu_mul",
        ("fuse.down", 1): "down_proj mlp_add",
        ("fuse.head", 1): "final_norm lm_head",
    }
)


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions of one workload, in the order of KNOBS; a pinned one has a single value. Use `make_space`."""

    workload: Workload
    dimensions: tuple[Dimension, ...]

    def to_config(self, choice: Choice) -> ScheduleConfig:
        """The config that `choice`, one value a dimension, means."""
        tiling: dict[str, dict[str, int]] = {
            f"gemv.{projection}": {"N_tile": int(choice[knob])}
            for knob, projections in _ROWS.items()
            for projection in projections
        }
        tiling["attention"] = {"kv_block": int(choice["kv_block"])}
        tiling["stream"] = {"chunk_bytes": int(choice["chunk"]), "inflight_bytes": int(choice["inflight"]),
                            "copies": int(choice["copies"])}
        tiling["warps"] = {"matrix": int(choice["matrix"]), "chunk": int(choice["share"])}
        if choice["hand_off"] != "counter":
            tiling["hand_off"] = dict(_HALVES) if choice["hand_off"] == "halves" else {"data": 1}
        area = {"bytes": int(choice["operand.bytes"]), "slices": int(choice["operand.slices"])}
        unusual = {name: area[name] for name, usual in _usual_operand().items() if area[name] != usual}
        if unusual:
            tiling["operand"] = unusual
        return ScheduleConfig(
            tiling=tiling,
            fusion_grouping=self._grouping(choice),
            sm_assignment=str(choice["placement"]),
            pipelining_depth=int(choice["depth"]),
            page_allocation=str(choice["pages"]),
            threads_per_block=int(choice["threads"]),
            smem_bytes_per_block=int(choice["smem"]),
        )

    def to_choice(self, config: ScheduleConfig) -> dict[str, Value] | None:
        """The choice that means `config`, or None where it lies outside this space."""
        choice = self._read(config)
        inside = all(choice[dimension.name] in dimension.values for dimension in self.dimensions)
        return choice if inside and self.to_config(choice) == config else None

    def nearest(self, config: ScheduleConfig) -> dict[str, Value]:
        """The choice that means `config`, or where it lies outside this space, one near it.

        Of each knob the value nearest to the config's; where the config says nothing of it, or names a run of
        operations that is none of PATTERNS, what `known_good` has first.
        """
        exact = self.to_choice(config)
        if exact is not None:
            return exact
        read, choice = self._read(config), self.known_good()[0]
        fuses = any(value for name, value in read.items() if name.startswith("fuse."))
        for dimension in self.dimensions:
            name, value = dimension.name, read[dimension.name]
            if name.startswith("fuse.") and not fuses:
                continue
            if value in dimension.values:
                choice[name] = value
            elif isinstance(value, int) and value > 0:
                choice[name] = min(dimension.values, key=partial(_distance, value))
        return choice

    def _read(self, config: ScheduleConfig) -> dict[str, Value]:
        """What a config says of each knob, be it one of its values or not; 0 or "" where it says nothing."""
        groups = {frozenset(group) for group in config.fusion_grouping}
        tiling = config.tiling
        by_data = tiling.get("hand_off", {}).get("data", 0)
        halves = by_data and tiling["hand_off"].get("slices", 1) > 1
        choice: dict[str, Value] = {
            "placement": config.sm_assignment if isinstance(config.sm_assignment, str) else "",
            "depth": config.pipelining_depth,
            "pages": config.page_allocation,
            "hand_off": "halves" if halves else "data" if by_data else "counter",
            "threads": config.threads_per_block,
            "smem": config.smem_bytes_per_block,
            "chunk": tiling.get("stream", {}).get("chunk_bytes", 0),
            "inflight": tiling.get("stream", {}).get("inflight_bytes", 0),
            "copies": tiling.get("stream", {}).get("copies", COPIES),
            "matrix": tiling.get("warps", {}).get("matrix", 0),
            "share": tiling.get("warps", {}).get("chunk", 1),
            "kv_block": tiling.get("attention", {}).get("kv_block", 0),
        }
        for name, usual in _usual_operand().items():
            choice[f"operand.{name}"] = tiling.get("operand", {}).get(name, usual)
        for knob, projections in _ROWS.items():
            own = tiling.get(f"gemv.{projections[0]}", {})
            choice[knob] = own.get("N_tile", tiling.get("gemv", {}).get("N_tile", 0))
        for (knob, level), names in _FUSED.items():
            if {frozenset(group) for group in self._groups(names)} <= groups:
                choice[knob] = level
            choice.setdefault(knob, 0)
        return choice

    def known_good(self) -> list[dict[str, Value]]:
        """Choices worth trying first: everything fused, one tile a SM, the deepest prefetch, by two KV splits."""
        last = {dimension.name: dimension.values[-1] for dimension in self.dimensions}
        last |= self._near(_GOOD_ON_H200)
        one_tile = {name: self._nearest(name, projections) for name, projections in _ROWS.items()}
        blocks = self._dimension("kv_block").values
        base = {**last, **one_tile}
        whole, split = ({**base, "kv_block": blocks[max(0, len(blocks) - back)]} for back in (1, 3))
        return [whole, split]

    def _near(self, choice: Choice) -> dict[str, Value]:
        return {name: self._nearest_value(name, value) for name, value in choice.items()}

    def kernels(self) -> list[tuple[int, int]]:
        """(threads, warps that multiply) of each kernel that the space's configs are run by, first what is known to be
        good."""
        good = self.known_good()[0]
        threads, matrix = (self._dimension(name).values for name in ("threads", "matrix"))
        choices = [good, *({**good, "threads": each, "matrix": warps} for each in threads for warps in matrix)]
        variants = [kernel_variant(self.to_config(choice), self.workload.target, 0) for choice in choices]
        return list(dict.fromkeys((variant.threads, variant.matrix_warps) for variant in variants))

    def _nearest(self, name: str, projections: Sequence[str]) -> Value:
        wanted = int(_rows(projections[:1] if name == "rows.gate_up" else projections, 1)(self.workload)[0])
        return self._nearest_value(name, wanted)

    def _nearest_value(self, name: str, wanted: Value) -> Value:
        values = self._dimension(name).values
        if wanted in values or not isinstance(wanted, int):
            return wanted if wanted in values else values[0]
        return min(values, key=partial(_distance, wanted))

    def _dimension(self, name: str) -> Dimension:
        return next(dimension for dimension in self.dimensions if dimension.name == name)

    def _grouping(self, choice: Choice) -> tuple[tuple[str, ...], ...]:
        return tuple(
            group for (knob, level), names in _FUSED.items() if choice[knob] == level for group in self._groups(names)
        )

    def _groups(self, names: str) -> list[tuple[str, ...]]:
        """Groups of _FUSED, without the operations that the model lacks."""
        ops = {op.name for block in _blocks(self.workload) for op in block.ops} | set(PATTERNS["out"].before)
        return [tuple(name for name in group.split() if name in ops) for group in names.split(";")]


def _usual_operand() -> dict[str, int]:
    """What a config means that has no `tiling.operand`."""
    area = usual_rows_area()
    return {"bytes": area.nbytes, "slices": area.beside}


def _distance(wanted: int, value: Value) -> int:
    return abs(int(value) - wanted)


def make_space(workload: Workload, fixed: Fixed = MappingProxyType({})) -> Space:
    """The space of a workload, with some knobs pinned. Raises UsageError for an unknown knob or value."""
    names = [knob.name for knob in KNOBS]
    for name in fixed:
        if name not in names:
            raise UsageError(f"knob {name!r} is not one of {', '.join(names)}")
    dimensions = []
    for knob in KNOBS:
        values = tuple(knob.values(workload))
        if knob.name in fixed:
            pinned = tuple(value for value in values if str(value) == fixed[knob.name])
            if not pinned:
                raise UsageError(f"knob {knob.name}={fixed[knob.name]!r} is not one of {', '.join(map(str, values))}")
            values = pinned
        dimensions.append(Dimension(knob.name, values, knob.ordered))
    return Space(workload, tuple(dimensions))
