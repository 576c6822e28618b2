"""`flywheel bench --serve`: how long a server takes to answer, as its clients see it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from flywheel.children import start_program
from flywheel.cli.bench_engines import ENGINES, NONE, EngineLoad, end, rows_of, time_engines
from flywheel.cli.text import note, show_document
from flywheel.errors import UsageError
from flywheel.ir.files import is_bundle

if TYPE_CHECKING:
    from flywheel.serve.load import Server

FORMAT: Final = "flywheel-bench-serve"
START: Final = "start"
"""Stands in place of an address: the command starts a server, and ends it."""
DTYPES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def bench_served(where: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The document: for each number of clients, how long answers to texts of random lengths take.

    `params` are the command's. A server that is started here takes the model and the schedule from them.

    Raises UsageError when there is no model to start a server of, and when the server does not answer a first request.
    """
    from flywheel.serve.load import draw_prompts, put_load

    if where == START and params["model"] is None:
        raise UsageError("bench: --serve without a URL starts a server, which needs --model")
    clients, requests, max_tokens = params["clients"], params["requests"], params["max_tokens"]
    words, seed = params["prompt_words"], params["seed"]
    _engines(params)  # before anything that takes minutes
    with _served(where, _options(params)) as server:
        prompts = _fitting(draw_prompts(seed, requests, words), server, params)
        # A first request warms the server up, so that no timed request does.
        first = put_load(server, prompts[:1], 1, min(max_tokens, 2))
        if first.failed:
            raise UsageError(f"bench: {server.url} does not answer a first request: {first.failed[0]}")
        loads = []
        for count in clients:
            note(f"flywheel: {count} client{'s' if count > 1 else ''}, {requests} requests")
            load = put_load(server, prompts, count, max_tokens)
            if load.failed:
                note(f"flywheel: {len(load.failed)} of them failed, the first one with {load.failed[0]}")
            loads.append(load.document())
    return {
        "format": FORMAT, "version": 2, "url": server.url, "model": server.model, "seed": seed,
        "max_tokens": max_tokens, "longest_prompt_words": words, "loads": loads,
        "beside": time_engines(_engines(params), _same_load(where, params, prompts)),
    }  # fmt: skip


def _fitting(prompts: list[str], server: Server, params: Mapping[str, Any]) -> list[str]:
    """The prompts, cut where they do not fit the server's context before an answer. They stay whole if the context or
    the model's tokenizer is not known here. Raises UsageError if there is no room for a prompt."""
    from flywheel.models.catalog import model_name, model_path
    from flywheel.models.tokenizer import Tokenizer, has_tokenizer
    from flywheel.serve.load import fit_prompts

    path = None if params["model"] is None else model_path(model_name(params["model"]))
    folder = path if path is None or path.is_dir() else path.parent
    if server.context is None or folder is None or not has_tokenizer(folder) or find_spec("tokenizers") is None:
        return prompts
    room = server.context - params["max_tokens"] + 1
    if room < 1:
        raise UsageError(f"bench: --max-tokens {params['max_tokens']} is more than the context of {server.context}")
    with Tokenizer(folder) as tokenizer:
        fitting = fit_prompts(prompts, lambda text: len(tokenizer.encode(text)), room)
    cut = sum(fit != prompt for fit, prompt in zip(fitting, prompts, strict=True))
    if cut:
        note(f"flywheel: {cut} of {len(prompts)} prompts are cut to {room} tokens, to fit the context {server.context}")
    return fitting


def _engines(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises UsageError for a name that is none."""
    given = params["engines"]
    if given is None or given == NONE:
        return ENGINES if given is None else ()
    names = tuple(given.split(","))
    unknown = next((name for name in names if name not in ENGINES), None)
    if unknown is not None:
        raise UsageError(f"--engines: {unknown!r} is none of {', '.join((*ENGINES, NONE))}")
    return names


def _same_load(where: str, params: Mapping[str, Any], prompts: list[str]) -> EngineLoad | str:
    """The load for engines that this command starts behind its own server; why there is none."""
    from flywheel.decode.source import open_source
    from flywheel.models.catalog import model_name, model_path

    if where != START:
        return "not timed beside a server that this command has not started; give its own address to --serve"
    if params["device"] == "reference":
        return "not timed: needs a GPU"
    if params["weights"] not in (None, *DTYPES):
        return f"not timed: it has no weights of {params['weights']} here"
    path = model_path(model_name(params["model"]))
    if path is None:
        return "not timed: the model has no directory"
    return EngineLoad(
        path if path.is_dir() else path.parent, DTYPES[params["dtype"] or open_source(params["model"]).dtype or "bf16"],
        "cuda", params["contexts"][0] if params["contexts"] else None, params["batches"][0] if params["batches"] else 1,
        params["clients"], prompts, params["max_tokens"],
    )  # fmt: skip


def _options(params: Mapping[str, Any]) -> dict[str, object]:
    """The options for `flywheel serve`, from those of `flywheel bench`."""
    first = {name: params[name][0] if params[name] else None for name in ("contexts", "batches")}
    same = {name: params[name] for name in ("model", "gpu", "dtype", "weights", "device")}
    if params["model"] is not None and not is_bundle(params["model"]):  # a bundle is a schedule itself
        same["store"] = params["store"]
    return {
        **same, "schedule": params["config_file"], "context": first["contexts"], "max-sequences": first["batches"],
    }  # fmt: skip


def show_served(document: Mapping[str, Any]) -> None:
    """The document as a table."""
    from flywheel.serve.load import PERCENTILES

    heads = [f"{what} p{rank}" for what in ("first", "token") for rank in PERCENTILES]
    rows = [["", "clients", "tokens/s", *heads, "failed"], *rows_of("flywheel", document["loads"], PERCENTILES)]
    beside = []
    for name, found in document["beside"].items():
        rows += rows_of(name, found.get("loads", ()), PERCENTILES)
        beside += [f"{name}: {found['why']}"] if "why" in found else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    show_document("\n".join([f"{document['model']} at {document['url']}, times in ms", *lines, *beside]) + "\n")


@contextmanager
def _served(where: str, options: Mapping[str, object]) -> Iterator[Server]:
    from flywheel.serve.load import find_server

    if where != START:
        yield find_server(where)
        return
    words = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    process = start_program(
        [sys.executable, "-m", "flywheel", "serve", "--port", "0", *words], stderr=subprocess.PIPE, text=True
    )
    ending = threading.Event()
    hearing = threading.Thread(target=_hear, args=(process, ending), daemon=True)
    try:
        address = _address(process)
        hearing.start()
        yield find_server(address)
    finally:
        ending.set()
        end(process)
        if hearing.ident is not None:
            hearing.join()


def _address(process: subprocess.Popen[str]) -> str:
    """The server's address, once it serves. Raises UsageError with its last line where it ends before."""
    assert process.stderr is not None
    line = ""
    for line in process.stderr:
        found = re.search(r"at (http://\S+/v1);", line)
        if found:
            return found[1]
    raise UsageError(f"bench: the server ended: {line.strip() or 'it wrote nothing'}")


def _hear(process: subprocess.Popen[str], ending: threading.Event) -> None:
    """Show the server's further lines until `ending` is set. It reads all: a server stops once the pipe is full."""
    assert process.stderr is not None
    for line in process.stderr:
        if not ending.is_set():
            note(line.rstrip())
