"""Small task graphs of dense decoders in MPK's schema of 2026, as its compiler emits them."""

from __future__ import annotations

import json
from typing import Any

from flywheel.interop.mpk.graph import INVALID, MpkGraph, read_graph
from flywheel.models.spec import DecoderSpec

TILE = 16
"""Rows of a tile of a matrix, and columns of one of SILU_MUL."""


class Builder:
    """Tasks layer by layer; each of them waits for all of the layer before."""

    def __init__(self, spec: DecoderSpec, requests: int) -> None:
        self.spec, self.requests = spec, requests
        self.tasks: list[dict[str, Any]] = [task(0, [], []), task(10, [], [])]
        self.tasks[1]["trigger_event"] = 1
        self.events = [event(911, 0, 0, 1), event(903, 2, 0, 1)]
        self.last: list[dict[str, Any]] = []

    def layer(self, tasks: list[dict[str, Any]]) -> None:
        if self.last:
            number = len(self.events)
            first = len(self.tasks)
            self.events.append(event(900, first, first + len(tasks), len(self.last)))
            for each in self.last:
                each["trigger_event"] = number
            for each in tasks:
                each["dependent_event"] = number
        self.tasks += tasks
        self.last = tasks

    def norm(self, x: str, weight: str) -> None:
        n = self.spec.hidden
        self.layer(
            [
                task(154, [piece(x, row * n, (1, n), n), vector(weight, n)], [piece("normed", row * n, (1, n), n)])
                for row in range(self.requests)
            ]
        )

    def product(self, x: str, weight: str, out: str, rows: int, k: int, plus: str | None = None) -> None:
        made = []
        for start in range(0, rows, TILE):
            inputs = [piece(x, 0, (self.requests, k), k), piece(weight, start * k, (TILE, k), k)]
            if plus is not None:
                inputs.append(piece(plus, start, (self.requests, TILE), rows))
            made.append(task(155 if plus is None else 156, inputs, [piece(out, start, (self.requests, TILE), rows)]))
        self.layer(made)

    def attention(self, number: int) -> None:
        d, heads = self.spec.head_dim, self.spec.n_kv_heads
        q = self.spec.n_heads // heads * d
        made = []
        for request in range(self.requests):
            for head in range(heads):
                caches = [
                    {**piece(f"layer_{number}_{side}_cache", head * d, (4, 64, 1, d), 1),
                     "strides": [64 * heads * d, heads * d, d, 1]}
                    for side in "kv"
                ]  # fmt: skip
                norms = [vector(f"layer_{number}_{side}_norm", d) for side in "qk"]
                if not self.spec.qk_norm:
                    norms = [{**each, "base_ptr": "nullptr", "dims": [], "strides": []} for each in norms]
                tables = [piece(f"{name}_position_embedding", 0, (64, d), d) for name in ("cos", "sin")]
                width, total = q + 2 * d, (q + 2 * d) * heads
                inputs = [piece("qkv", head * width, (self.requests, width), total), *caches, *norms, *tables]
                output = piece("attended", head * q, (self.requests, q), q * heads)
                made.append({**task(153, inputs, [output]), "request_id": request})
        self.layer(made)

    def silu(self) -> None:
        n = self.spec.intermediate
        self.layer(
            [
                task(118, [piece("mlp_mid", 2 * start, (self.requests, 2 * TILE), 2 * n)],
                     [piece("gated", start, (self.requests, TILE), n)])
                for start in range(0, n, TILE)
            ]
        )  # fmt: skip


def llama_graph(spec: DecoderSpec, requests: int = 1) -> MpkGraph:
    """The graph of a decode step; all sizes are multiples of TILE."""
    build, n = Builder(spec, requests), spec.hidden
    table = [piece("input_token", 0, (requests, 1), 1, 965), piece("embed_tokens", 0, (spec.vocab, n), n)]
    build.layer([task(101, table, [piece("embedded", 0, (requests, n), n)])])
    x = "embedded"
    for number in range(spec.n_layers):
        name = f"layer_{number}"
        build.norm(x, f"{name}_input_layernorm")
        build.product("normed", f"{name}_qkv_proj", "qkv", spec.q_width + 2 * spec.kv_width, n)
        build.attention(number)
        build.product("attended", f"{name}_o_proj", "mid", n, spec.q_width, x)
        build.norm("mid", f"{name}_post_attn_layernorm")
        build.product("normed", f"{name}_gatedup_proj", "mlp_mid", 2 * spec.intermediate, n)
        build.silu()
        x = "stream"
        build.product("gated", f"{name}_down_proj", x, n, spec.intermediate, "mid")
    build.norm(x, "model_norm_weight")
    build.product("normed", "lm_head", "logits", spec.vocab, n)
    parts = [piece("value", 0, (requests, 1), 1), piece("index", 0, (requests, 1), 1, 965)]
    build.layer([task(259, [piece("logits", 0, (requests, spec.vocab), spec.vocab)], parts)])
    build.layer([task(111, parts, [piece("output_token", 0, (requests, 1), 1, 965)])])
    build.tasks[-1]["trigger_event"] = len(build.events)
    build.events.append(event(910, 0, 0, 1))
    build.events[1]["last_task_id"] = len(build.tasks)
    document = {"all_events": build.events, "all_tasks": build.tasks, "first_tasks": [2]}
    return read_graph(json.dumps(document).encode())


def piece(name: str, place: int, dims: tuple[int, ...], pitch: int, data_type: int = 941) -> dict[str, Any]:
    """Rows `pitch` elements apart, from the element `place` on."""
    item = 8 if data_type == 965 else 2
    strides = [pitch, 1] if len(dims) == 2 else [0] * len(dims)
    return {"base_ptr": name, "data_type": data_type, "dims": [*dims], "offset": place * item, "strides": strides}


def vector(name: str, n: int) -> dict[str, Any]:
    """A whole vector."""
    return {"base_ptr": name, "data_type": 941, "dims": [n], "offset": 0, "strides": [1]}


def task(kind: int, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """A task that waits for nothing and signals nothing yet."""
    return {
        "dependent_event": INVALID, "expert_offset": -65536, "inputs": inputs or None, "kv_idx": 65535,
        "merge_task_offset": -1, "outputs": outputs or None, "request_id": 0, "task_offset": -65536,
        "task_type": kind, "trigger_event": INVALID, "variant_id": 0,
    }  # fmt: skip


def event(kind: int, first: int, last: int, triggers: int) -> dict[str, Any]:
    """An entry of all_events."""
    return {"event_type": kind, "first_task_id": first, "last_task_id": last, "num_triggers": triggers}
