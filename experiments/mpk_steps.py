"""Predicts the two steps of Mirage MPK that were measured.

MPK was measured on llama3.2-1b and llama3-8b, one sequence, bf16, on one H200. The script makes the graphs that MPK's
compiler emits for one GPU and one token. The graph of the 1B model equals one of tests/interop/mpk/graphs byte for
byte.

    python experiments/mpk_steps.py > results/mpk_steps.txt

`unqueued` is the prediction with a worker for every task. It bounds the gain of other orders and placements of the same
tasks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from flywheel.interop.mpk.graph import INVALID, read_graph
from flywheel.interop.mpk.timing import bounds_of, predict_step

BF16: Final = 941
INT64: Final = 965
PADDED_VOCABULARY: Final = 153600
ITEM_BYTES: Final = {BF16: 2, INT64: 8}
CONTEXT: Final = 260
"""Mean number of tokens attended to while MPK was measured."""


@dataclass(frozen=True)
class Dims:
    """What a dense Llama is for MPK's builder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


LLAMA_1B: Final = Dims(16, 2048, 32, 8, 64, 8192)
LLAMA_8B: Final = Dims(32, 4096, 32, 8, 128, 14336)
MEASURED_US: Final = {"llama3.2-1b": 1430.0, "llama3-8b": 5153.0}


class Builder:
    """Tasks and events in MPK's order; the events of a layer come after those of the layer before."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.tasks: list[dict[str, Any]] = [_task(0, 0, [], [], None), _task(10, 0, [], [], None)]
        self.tasks[1]["trigger_event"] = 1
        self.events = [_event(911, 0, 0, 1), _event(903, 2, 0, 1)]

    def layer(self, tasks: list[dict[str, Any]], earlier: range | None, groups: int) -> range:
        """Append tasks; group by group they wait for as many groups of the tasks before."""
        first = len(self.tasks)
        self.tasks += tasks
        if earlier is not None:
            for group in range(groups):
                share, ahead = len(tasks) // groups, len(earlier) // groups
                begin = first + group * share
                number = len(self.events)
                self.events.append(_event(900, begin, begin + share, ahead))
                for place in range(begin, begin + share):
                    self.tasks[place]["dependent_event"] = number
                for place in earlier[group * ahead : (group + 1) * ahead]:
                    self.tasks[place]["trigger_event"] = number
        return range(first, len(self.tasks))

    def product(
        self, x: str, weight: str, out: str, rows: int, k: int, tiles: int, variant: int, plus: str = ""
    ) -> list[Any]:
        """The tiles of a matrix product, with what is added to it where that has a name."""
        width = rows // tiles
        made = []
        for tile in range(tiles):
            inputs = [_tensor(x, 0, [1, k], [k, 1]), _tensor(weight, tile * width * k, [width, k], [k, 1])]
            if plus:
                inputs.append(_tensor(plus, tile * width, [1, width], [rows, 1]))
            output = _tensor(out, tile * width, [1, width], [rows, 1])
            made.append(_task(156 if plus else 155, variant, inputs, [output], tile))
        return made

    def norm(self, x: str, weight: str) -> list[Any]:
        """The norm of the one row."""
        n = self.dims.hidden
        inputs = [_tensor(x, 0, [1, n], [n, 1]), _tensor(weight, 0, [n], [1])]
        return [_task(154, 0, inputs, [_tensor("rmsnorm_out", 0, [1, n], [n, 1])], 0)]

    def attention(self, number: int) -> list[Any]:
        """A task for each key and value head."""
        d = self.dims
        q = d.heads // d.kv_heads * d.head_dim
        width, total = q + 2 * d.head_dim, d.heads * d.head_dim + 2 * d.kv_heads * d.head_dim
        rows = [4096 * d.kv_heads * d.head_dim, d.kv_heads * d.head_dim, d.head_dim, 1]
        made = []
        for head in range(d.kv_heads):
            caches = [
                _tensor(f"layer_{number}_{name}_cache", head * d.head_dim, [16, 4096, 1, d.head_dim], rows)
                for name in "kv"
            ]
            absent = [_tensor("nullptr", 0, [], [], 999)] * 2
            tables = [
                _tensor(f"{name}_position_embedding", 0, [4096, d.head_dim], [d.head_dim, 1]) for name in ("cos", "sin")
            ]
            inputs = [_tensor("attn_in", head * width, [1, width], [total, 1]), *caches, *absent, *tables]
            output = _tensor("attn_out", head * q, [1, q], [d.heads * d.head_dim, 1])
            made.append(_task(153, 0, inputs, [output], 0))
        return made

    def silu(self) -> list[Any]:
        """64 tiles of gate times up."""
        n = self.dims.intermediate
        width = n // 64
        return [
            _task(118, 0, [_tensor("mlp_mid", tile * 2 * width, [1, 2 * width], [2 * n, 1])],
                  [_tensor("silu_mul_out", tile * width, [1, width], [n, 1])], tile)
            for tile in range(64)
        ]  # fmt: skip


def llama_document(d: Dims) -> dict[str, Any]:
    """The task graph of a decode step for one token."""
    build, n = Builder(d), d.hidden
    embedding = [
        _tensor("input_token", 0, [1, 1], [1, 1], INT64),
        _tensor("embed_tokens", 0, [PADDED_VOCABULARY, n], [n, 1]),
    ]
    last = build.layer([_task(101, 0, embedding, [_tensor("embed_out", 0, [1, n], [n, 1])], 0)], None, 0)
    x, qkv = "embed_out", (d.heads + 2 * d.kv_heads) * d.head_dim
    for number in range(d.layers):
        name = f"layer_{number}"
        last = build.layer(build.norm(x, f"{name}_input_layernorm"), last, 1)
        last = build.layer(build.product("rmsnorm_out", f"{name}_qkv_proj", "attn_in", qkv, n, 128, 0), last, 1)
        last = build.layer(build.attention(number), last, d.kv_heads)
        o = build.product("attn_out", f"{name}_o_proj", "attn_proj_out", n, d.heads * d.head_dim, n // 64, 0, x)
        last = build.layer(o, last, 1)
        last = build.layer(build.norm("attn_proj_out", f"{name}_post_attn_layernorm"), last, 1)
        up = build.product("rmsnorm_out", f"{name}_gatedup_proj", "mlp_mid", 2 * d.intermediate, n, 128, 1)
        last = build.layer(up, last, 1)
        last = build.layer(build.silu(), last, 64)
        x = "mlp_out"
        down = build.product("silu_mul_out", f"{name}_down_proj", x, n, d.intermediate, n // 64, 1, "attn_proj_out")
        last = build.layer(down, last, 1)
    last = build.layer(build.norm(x, "model_norm_weight"), last, 1)
    last = build.layer(build.product("rmsnorm_out", "lm_head", "argmax_in", PADDED_VOCABULARY, n, 600, 2), last, 1)
    width, made = PADDED_VOCABULARY // 128, []
    for tile in range(128):
        outputs = [
            _tensor("argmax_part_value", tile, [1, 1], [128, 1]),
            _tensor("argmax_part_index", tile, [1, 1], [128, 1], INT64),
        ]
        made.append(
            _task(259, 0, [_tensor("argmax_in", tile * width, [1, width], [PADDED_VOCABULARY, 1])], outputs, tile)
        )
    last = build.layer(made, last, 8)
    parts = [
        _tensor("argmax_part_value", 0, [1, 128], [128, 1]),
        _tensor("argmax_part_index", 0, [1, 128], [128, 1], INT64),
    ]
    last = build.layer([_task(111, 0, parts, [_tensor("output_token", 0, [1, 1], [1, 1], INT64)], 0)], last, 1)
    build.tasks[-1]["trigger_event"] = len(build.events)
    build.events.append(_event(910, 0, 0, 1))
    build.events[1]["last_task_id"] = len(build.tasks)
    return {"all_events": build.events, "all_tasks": build.tasks, "first_tasks": [2]}


def _tensor(name: str, place: int, dims: list[int], strides: list[int], data_type: int = BF16) -> dict[str, Any]:
    offset = place * ITEM_BYTES.get(data_type, 0)
    return {"base_ptr": name, "data_type": data_type, "dims": dims, "offset": offset, "strides": strides}


def _task(kind: int, variant: int, inputs: list[Any], outputs: list[Any], x: int | None) -> dict[str, Any]:
    offset = -1 if x is None else x - 65536
    return {
        "dependent_event": INVALID, "expert_offset": offset, "inputs": inputs or None,
        "kv_idx": -1 if x is None else 65535, "merge_task_offset": -1, "outputs": outputs or None,
        "request_id": -1 if x is None else x, "task_offset": offset,
        "task_type": kind, "trigger_event": INVALID, "variant_id": variant,
    }  # fmt: skip


def _event(kind: int, first: int, last: int, triggers: int) -> dict[str, Any]:
    return {"event_type": kind, "first_task_id": first, "last_task_id": last, "num_triggers": triggers}


def main() -> None:
    """Print the table."""
    print(f"{'model':12}  {'measured':>8}  {'predicted':>9}  {'off':>6}  {'unqueued':>8}")
    for name, dims in (("llama3.2-1b", LLAMA_1B), ("llama3-8b", LLAMA_8B)):
        graph = read_graph(json.dumps(llama_document(dims)).encode())
        predicted, free = predict_step(graph, context=CONTEXT).latency_us, bounds_of(graph, context=CONTEXT).unqueued_us
        off = predicted / MEASURED_US[name] - 1
        print(f"{name:12}  {MEASURED_US[name]:8.0f}  {predicted:9.0f}  {off * 100:+5.1f} %  {free:8.0f}")


if __name__ == "__main__":
    main()
