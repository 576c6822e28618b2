"""Files under a megabyte that cost a command as much as they can, each of its kind.

`COSTLY[name](folder)` writes the files into an empty folder, and returns the words of the command that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flywheel.ir import TARGETS
from flywheel.ir.writing import target_to_dict

MOST_BYTES: Final = 10**6

CONFIG: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
_TARGET: Final = target_to_dict(TARGETS["l4"])

Command = tuple[str, ...]
_LOWER: Final = ("--gpu", "h100", "--any-size", "-o", "out.json")


def _config(**fields: int) -> Callable[[Path], Command]:
    def write(folder: Path) -> Command:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
        return "lower", "--model", "config.json", *_LOWER

    return write


def _schedule(tiling: Mapping[str, Any], *more: str, **fields: Any) -> Callable[[Path], Command]:
    def write(folder: Path) -> Command:
        sizes = {name: value for name, value in fields.items() if name in CONFIG}
        others = {name: value for name, value in fields.items() if name not in CONFIG}
        (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
        (folder / "c.json").write_text(json.dumps({"tiling": tiling, **others}))
        return "lower", "--model", "config.json", "--config", "c.json", *_LOWER, *more

    return write


def _campaign(text: Callable[[], str]) -> Callable[[Path], Command]:
    def write(folder: Path) -> Command:
        (folder / "c.toml").write_text(text())
        return "search", "--options", "c.toml", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict"

    return write


def _task(number: int, source: int, output: int, waits: Iterable[int] = (), **more: Any) -> dict[str, Any]:
    return {
        "id": number, "op": "COPY", "inputs": [source], "outputs": [output], "out_counter": number, "sm": number % 58,
        "waits": [{"counter": counter, "threshold": 1} for counter in waits], "params": {}, **more,
    }  # fmt: skip


def _program(make: Callable[[], Mapping[str, Any]], *command: str) -> Callable[[Path], Command]:
    def write(folder: Path) -> Command:
        made = {"ir_version": "0.2.0", "meta": {}, "target": _TARGET, "pages": None, "config": None, **make()}
        (folder / "p.json").write_text(json.dumps(made, separators=(",", ":")))
        return tuple("p.json" if word == "FILE" else word for word in command)

    return write


def _tables(count: int, *kinds: str) -> dict[str, Any]:
    """Buffers, the last of which are of other kinds, and counters."""
    names = [*["ACTIVATION"] * (count - len(kinds)), *kinds]
    buffers = [
        {"id": n, "name": f"b{n}", "kind": kind, "dtype": "F32", "shape": [1, 8],
         "space": "GLOBAL_SCRATCH" if kind == "ACTIVATION" else "HBM"}
        for n, kind in enumerate(names)
    ]  # fmt: skip
    return {"buffers": buffers, "counters": [{"id": n} for n in range(count)]}


def _chain(count: int, back: int) -> Mapping[str, Any]:
    """Each task reads what the one before it wrote, and waits for some before it."""
    tasks = [_task(n, n - 1 if n else count, n, range(max(0, n - back), n)) for n in range(count)]
    return {**_tables(count + 1, "IO_INPUT"), "tasks": tasks}


def _ladder(count: int) -> Mapping[str, Any]:
    """Tasks that wait for each other in pairs far apart."""
    tasks = [_task(n, count, n, {n // 2, n // 3, n * 7 // 8, n - 1} - {n} if n else ()) for n in range(count)]
    return {**_tables(count + 1, "IO_INPUT"), "tasks": tasks}


def _crowd(count: int) -> Mapping[str, Any]:
    """Tasks that nothing orders, and which all write one buffer."""
    return {**_tables(count + 1, "IO_INPUT"), "tasks": [_task(n, count, 0) for n in range(count)]}


def _readers(count: int) -> Mapping[str, Any]:
    """Two buffers that tasks write and read in turn: each writer must come after each reader."""
    tasks = [_task(n, n % 2 if n else count, (n + 1) % 2, [n - 1] if n else ()) for n in range(count)]
    return {**_tables(count + 1, "IO_INPUT"), "tasks": tasks}


def _circle(count: int) -> Mapping[str, Any]:
    tasks = [_task(n, count, n, [(n + 1) % count]) for n in range(count)]
    return {**_tables(count + 1, "IO_INPUT"), "tasks": tasks}


def _sms(count: int) -> Mapping[str, Any]:
    return {**_chain(4, 1), "target": {**_TARGET, "num_sms": count}}


_PROGRAMS: Final[Mapping[str, Callable[[], Mapping[str, Any]]]] = MappingProxyType({
    "a chain": lambda: _chain(3300, 1),
    "a chain that waits": lambda: _chain(2200, 8),
    "a ladder": lambda: _ladder(2500),
    "a crowd": lambda: _crowd(3300),
    "readers": lambda: _readers(3300),
    "a circle": lambda: _circle(3300),
    "SMs": lambda: _sms(2**31 - 1),
})  # fmt: skip

COSTLY: Final[Mapping[str, Callable[[Path], Command]]] = MappingProxyType({
    "config: heads and layers": _config(num_hidden_layers=1024, num_attention_heads=4096, num_key_value_heads=4096),
    "config: heads": _config(num_hidden_layers=4, num_attention_heads=4096, num_key_value_heads=4096),
    "config: layers": _config(
        num_hidden_layers=1024, hidden_size=4096, intermediate_size=4096, num_attention_heads=4096,
        num_key_value_heads=16,
    ),
    "config: widths": _config(
        num_hidden_layers=1024, hidden_size=2**20, intermediate_size=2**20, vocab_size=2**22, head_dim=128,
    ),
    "schedule: blocks": _schedule(
        {"attention": {"kv_block": 128}}, "--context", "131072", num_key_value_heads=1, num_hidden_layers=16,
        max_position_embeddings=131072,
    ),
    "schedule: tiles": _schedule({"gemv": {"N_tile": 16}}, vocab_size=2**22, intermediate_size=2**20),
    "schedule: tiles of many layers": _schedule(
        {"gemv": {"N_tile": 16}}, vocab_size=2**22, intermediate_size=2**14, num_hidden_layers=400,
    ),
    "schedule: sizes": _schedule({f"gemv.x{n}": {"N_tile": 16} for n in range(25_000)}),
    "schedule: SMs": _schedule({}, sm_assignment={str(n): n % 132 for n in range(80_000)}),
    "campaign: dots": _campaign(lambda: f"[fix]\n{'a.' * 20_000}b = 1\n"),
    "campaign: dots on every line": _campaign(
        lambda: "".join(f"k{n}{'.a' * 50} = 1\n" for n in range(9000))
    ),
    "campaign: knobs": _campaign(lambda: "[fix]\n" + "".join(f"k{n} = 1\n" for n in range(70_000))),
    "campaign: a long number": _campaign(lambda: f"trials = 0x{'F' * 900_000}\n"),
    "campaign: a long name": _campaign(lambda: f"name = \"{'x' * 900_000}\"\n"),
    **{
        f"{command[0]}: {name}": _program(make, *command)
        for command in (("validate", "FILE"), ("inspect", "FILE"), ("diff", "FILE", "FILE"), ("simulate", "FILE"))
        for name, make in _PROGRAMS.items()
    },
})  # fmt: skip
