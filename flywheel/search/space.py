"""The search space: the knobs of a workload, and the config that a choice of their values means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError, FlywheelError, InvalidProgramError, UsageError
from flywheel.ir import DType, InstructionKind, ScheduleConfig, config_from_dict
from flywheel.ir.compressed import Use
from flywheel.ir.show import did_you_mean
from flywheel.lowering.fusion import patterns_of
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.plan import kernel_variant, variant_of
from flywheel.plan.features import features_of
from flywheel.plan.variant import COPIES
from flywheel.search.knobs import (
    GOOD_ON_H200,
    KNOBS,
    QKV,
    REMOVED,
    REMOVED_VALUES,
    Choice,
    Knob,
    Value,
    distance,
    rows_of,
)
from flywheel.search.workload import Workload, make_workload
from flywheel.store.campaign import Campaign

Fixed = Mapping[str, str]
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Dimension:
    """A knob with its values for one workload."""

    name: str
    values: tuple[Value, ...]
    ordered: bool


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
        ("fuse.attention", 1): "k_norm k_rope v_norm k_append v_append",
        ("fuse.attention", 2): "q_norm q_rope attention",
        ("fuse.attention", 3): "k_norm k_rope v_norm k_append v_append; q_norm q_rope attention",
        ("fuse.attention", 4): "k_norm k_rope v_norm k_append v_append q_norm q_rope attention",
        ("fuse.out", 1): "o_proj attn_add",
        ("fuse.out", 2): "attn_combine o_proj attn_add",
        ("fuse.mlp_in", 1): "gate_proj up_proj silu_mul gelu_mul",
        ("fuse.mlp_in", 2): "mlp_norm gate_proj up_proj silu_mul gelu_mul",
        ("fuse.down", 1): "down_proj mlp_add",
        ("fuse.head", 1): "final_norm lm_head",
    }
)


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions of one workload, in the order of KNOBS; a pinned one has a single value. Use `make_space`.

    What no knob decides follows from the workload: tiles of k and v are as high as those of q, buffers share no memory,
    and GPUs send each other summands in the step's type where that is a half type. Source: results/knob_gains.txt.
    """

    workload: Workload
    dimensions: tuple[Dimension, ...]
    groups: Mapping[tuple[str, int], Groups] = field(init=False, repr=False, compare=False)
    """Knob and level -> the operations that are fused."""
    rows: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """Knob -> the model's projections whose tiles it cuts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", groups_of(self.workload))
        own = {op.name for block in self.workload.graph.blocks for op in block.ops}
        rows = {knob: tuple([name for name in names if name in own]) for knob, names in _ROWS.items()}
        object.__setattr__(self, "rows", rows)

    def to_config(self, choice: Choice) -> ScheduleConfig:
        """The config that `choice` stands for. `choice` has one value for each dimension."""
        tiling: dict[str, dict[str, int]] = {
            f"gemv.{projection}": {"N_tile": int(choice[knob])}
            for knob, projections in self.rows.items()
            for projection in projections
        }
        tiling["attention"] = {"kv_block": int(choice["kv_block"])}
        tiling["stream"] = {"chunk_bytes": int(choice["chunk"]), "inflight_bytes": int(choice["inflight"]),
                            "copies": int(choice["copies"])}
        if choice.get("past"):  # which choices of older versions do not have
            tiling["stream"]["past"] = 1
        tiling["warps"] = {"matrix": int(choice["matrix"]), "chunk": int(choice["share"])}
        if choice["hand_off"] != "counter":
            tiling["hand_off"] = {"data": 1}
        if self.workload.ranks > 1 and self.workload.graph.dtype is not DType.F32:
            tiling["exchange"] = {"bits": 16}
        return ScheduleConfig(
            tiling=tiling,
            fusion_grouping=self._grouping(choice),
            sm_assignment=str(choice["placement"]),
            pipelining_depth=int(choice["depth"]),
            page_allocation="none",
            threads_per_block=int(choice["threads"]),
            smem_bytes_per_block=int(choice["smem"]),
        )

    def to_choice(self, config: ScheduleConfig) -> dict[str, Value] | None:
        """The choice that stands for `config`; None where `config` lies outside this space."""
        choice = self.reading(config)
        inside = choice is not None and all(choice[each.name] in each.values for each in self.dimensions)
        return choice if inside else None

    def reading(self, config: ScheduleConfig) -> dict[str, Value] | None:
        """As `to_choice`, of values that this space need not have. A knob that `config` does not set is read as 0 or
        "", which makes it no choice."""
        choice = self._read(config)
        sets = all(choice[each.name] or 0 in each.values for each in self.dimensions)
        return choice if sets and self.to_config(choice) == config else None

    def nearest(self, config: ScheduleConfig) -> dict[str, Value]:
        """The choice that stands for `config`; where `config` lies outside this space, a choice near it.

        Each knob gets the value nearest to the config's. A knob that the config does not set, or whose fused run of
        operations the model does not fuse, keeps the value of the first choice of `known_good`.
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
                choice[name] = min(dimension.values, key=partial(distance, value))
        return choice

    def _read(self, config: ScheduleConfig) -> dict[str, Value]:
        """The config's value of each knob, which the space need not have; 0 or "" for a knob that it does not set."""
        groups = {frozenset(group) for group in config.fusion_grouping}
        tiling = config.tiling
        by_data = tiling.get("hand_off", {}).get("data", 0)
        choice: dict[str, Value] = {
            "placement": config.sm_assignment if isinstance(config.sm_assignment, str) else "",
            "depth": config.pipelining_depth,
            "hand_off": "data" if by_data else "counter",
            "threads": config.threads_per_block,
            "smem": config.smem_bytes_per_block,
            "chunk": tiling.get("stream", {}).get("chunk_bytes", 0),
            "inflight": tiling.get("stream", {}).get("inflight_bytes", 0),
            "copies": tiling.get("stream", {}).get("copies", COPIES),
            "past": tiling.get("stream", {}).get("past", 0),
            "matrix": tiling.get("warps", {}).get("matrix", 0),
            "share": tiling.get("warps", {}).get("chunk", 1),
            "kv_block": tiling.get("attention", {}).get("kv_block", 0),
        }
        for knob, projections in self.rows.items():
            own = tiling.get(f"gemv.{projections[0]}", {})
            choice[knob] = own.get("N_tile", tiling.get("gemv", {}).get("N_tile", 0))
        for (knob, level), fused in self.groups.items():
            if {frozenset(group) for group in fused} <= groups:
                choice[knob] = level
            choice.setdefault(knob, 0)
        return choice

    def known_good(self) -> list[dict[str, Value]]:
        """Three choices worth trying first. All fuse everything and give each SM one tile.

        The first two prefetch as deep as the space allows, and differ in how they split the KV cache. The third
        prefetches one instruction ahead with two weight copies at once, and gives fewer SMs larger tiles of QKV.
        Source of the third: the best schedules that were measured, results/gpu/*.schedule.json.
        """
        last = {dimension.name: dimension.values[-1] for dimension in self.dimensions}
        last |= {**self._near(GOOD_ON_H200), "past": 0}
        one_tile = {name: self._nearest(name, projections) for name, projections in self.rows.items()}
        blocks = self._dimension("kv_block").values
        base = {**last, **one_tile}
        whole, split = ({**base, "kv_block": blocks[max(0, len(blocks) - back)]} for back in (1, 3))
        qkv = self._dimension("rows.qkv").values
        larger = qkv[min(qkv.index(split["rows.qkv"]) + 1, len(qkv) - 1)]
        ahead = {"depth": self._nearest_value("depth", 1), "copies": self._nearest_value("copies", 2)}
        return [whole, split, {**split, **ahead, "rows.qkv": larger}]

    def _near(self, choice: Choice) -> dict[str, Value]:
        return {name: self._nearest_value(name, value) for name, value in choice.items()}

    def kernels(self) -> list[tuple[int, int, int]]:
        """(threads, warps that multiply, rows) of each kernel that runs a config of this space.

        The kernel of the first known good choice leads. The others follow by their steps from it, fewest first, since
        searches ask for near kernels first.
        """
        good = self.known_good()[0]
        threads, matrix = (self._dimension(name).values for name in ("threads", "matrix"))
        sizes = [(place, turn) for place in range(len(threads)) for turn in range(len(matrix))]
        start, first = threads.index(good["threads"]), matrix.index(good["matrix"])
        sizes.sort(key=lambda each: abs(each[0] - start) + abs(each[1] - first))
        choices = [{**good, "threads": threads[place], "matrix": matrix[turn]} for place, turn in sizes]
        variants = [kernel_variant(self.to_config(choice), self.workload.target, 0) for choice in choices]
        rows = self.workload.batch
        return list(dict.fromkeys((variant.threads, variant.matrix_warps, rows) for variant in variants))

    def kernel_formats(self) -> tuple[int, ...]:
        """The formats of the quantised matrices that these kernels multiply, by their numbers in KernelVariant.

        Raises InvalidProgramError for a format without a kernel.
        """
        if self.workload.weights is None:
            return ()
        config = self.to_config(self.known_good()[0])
        return variant_of(lower(self.workload.graph, config, self.workload.target)).formats

    def kernel_features(self) -> tuple[str, ...]:
        """What these kernels need that most do not, as KernelVariant has it."""
        blocks = self.workload.graph.blocks
        return features_of(Use(op.kind, range(len(op.inputs)), op.params) for block in blocks for op in block.ops)

    def _nearest(self, name: str, projections: Sequence[str]) -> Value:
        wanted = int(rows_of(projections[:1] if name == "rows.gate_up" else projections, 1)(self.workload)[0])
        return self._nearest_value(name, wanted)

    def _nearest_value(self, name: str, wanted: Value) -> Value:
        values = self._dimension(name).values
        if wanted in values or not isinstance(wanted, int):
            return wanted if wanted in values else values[0]
        return min(values, key=partial(distance, wanted))

    def _dimension(self, name: str) -> Dimension:
        return next(dimension for dimension in self.dimensions if dimension.name == name)

    def _grouping(self, choice: Choice) -> Groups:
        return tuple([group for (knob, level), own in self.groups.items() if choice[knob] == level for group in own])


def groups_of(workload: Workload) -> dict[tuple[str, int], Groups]:
    """_FUSED without the operations that the model lacks or that fuse with none, and without the levels of a knob that
    fuse what a lower one does."""
    graph = workload.graph
    runs = {name for block in graph.blocks for pattern in patterns_of(graph, block) for name in pattern.names}
    found: dict[tuple[str, Groups], int] = {}
    for (knob, level), names in _FUSED.items():
        groups = tuple([tuple([name for name in group.split() if name in runs]) for group in names.split(";")])
        found.setdefault((knob, groups), level)
    return {(knob, level): groups for (knob, groups), level in found.items()}


def _levels(workload: Workload, knob: Knob) -> tuple[Value, ...]:
    """The values of a knob that fuse what no lower one does."""
    groups = groups_of(workload)
    kinds = {op.name: op.kind for block in workload.graph.blocks for op in block.ops}
    found: dict[tuple[tuple[str, ...], ...], Value] = {}
    for value in knob.values(workload):
        own = groups.get((knob.name, int(value)), ())
        fused = [names for names in own if {kinds.get(name) for name in names} != {InstructionKind.GEMV_TILE}]
        found.setdefault(tuple([names for names in fused if len(names) > 1]), value)
    return tuple(found.values())


def pins_of(campaign: Campaign) -> dict[str, str]:
    """The knobs that a campaign pins, without those and those values that no search sets any more."""
    pinned = json.loads(campaign.spec).get("fix", {})
    return dict(pin for pin in pinned.items() if pin[0] not in REMOVED and pin not in REMOVED_VALUES)


def lost_pin(campaign: Campaign) -> str | None:
    """Why no search can go on with a campaign that pins what none sets any more, to what none does; None where it
    can."""
    for name, value in json.loads(campaign.spec).get("fix", {}).items():
        if name in REMOVED and value != REMOVED[name].value:
            return f"--fix {name}={value}, which no search sets any more: {REMOVED[name].now}"
        if (name, value) in REMOVED_VALUES:
            return f"--fix {name}={value}, which the knob has no more: {REMOVED_VALUES[name, value]}"
    return None


def make_space(workload: Workload, fixed: Fixed = MappingProxyType({})) -> Space:
    """The space of a workload, with some knobs pinned. Raises UsageError for an unknown knob or value."""
    names = [knob.name for knob in KNOBS]
    for name in fixed:
        if name in REMOVED:
            raise UsageError(f"knob {name!r}: no search sets it any more, since {REMOVED[name].now}; leave it out")
        if name not in names:
            raise UsageError(f"knob {name!r}{did_you_mean(name, names)} is not one of {', '.join(names)}")
    dimensions = []
    for knob in KNOBS:
        values = _levels(workload, knob) if knob.name.startswith("fuse.") else tuple(knob.values(workload))
        if knob.name in fixed:
            pinned = tuple(value for value in values if str(value) == fixed[knob.name])
            if not pinned:
                raise UsageError(f"knob {knob.name}={fixed[knob.name]!r} is not one of {', '.join(map(str, values))}")
            values = pinned
        dimensions.append(Dimension(knob.name, values, knob.ordered))
    return Space(workload, tuple(dimensions))


def check_runnable(space: Space) -> None:
    """Raises InvalidProgramError, with the first refusal, if the kernels run neither a known good schedule nor one that
    differs from it in one knob: then they would run none of the space."""
    from flywheel.plan.program import check_program

    good = space.known_good()
    near = [{**good[0], each.name: value} for each in space.dimensions for value in each.values]
    first: InvalidProgramError | None = None
    for choice in (*good, *near):
        config = replace(space.to_config(choice), sm_assignment="round_robin")  # the fastest, and kernels are alike
        try:
            check_program(lower(space.workload.graph, config, space.workload.target))
        except ConfigError:
            continue  # says nothing of other schedules
        except InvalidProgramError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise InvalidProgramError(f"{space.workload.model}: no schedule has kernels: {first}")


def choices_of(records: Iterable[TrialRecord]) -> list[dict[str, Value] | None]:
    """The value of each knob in the config of each row, by name in the order of the space; None where the row's model
    is not on this machine, or its config lies outside the search space of its work."""
    spaces: dict[tuple[object, ...], Space | None] = {}
    found = []
    for record in records:
        work = record.model, record.gpu, record.dtype, record.context, record.batch, record.weights
        if work not in spaces:
            spaces[work] = _space_of(record)
        space = spaces[work]
        choice = None if space is None else space.to_choice(config_from_dict(json.loads(record.config)))
        found.append(choice if space is None or choice is None else
                     {each.name: choice[each.name] for each in space.dimensions})  # fmt: skip
    return found


def _space_of(record: TrialRecord) -> Space | None:
    try:
        return make_space(
            make_workload(record.model, record.gpu, record.dtype, record.context, record.batch, record.weights)
        )
    except FlywheelError:
        return None
