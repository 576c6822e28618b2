"""`flywheel serve`: OpenAI's API over one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from flywheel.cli.chosen import store_here
from flywheel.cli.decoding import check_device, check_installed
from flywheel.cli.files import announce_notes
from flywheel.cli.interrupt import draining
from flywheel.cli.options import SharedOption, command, json_option, ranks_option, store_option
from flywheel.cli.text import complain, note, show_json
from flywheel.errors import UsageError
from flywheel.ir.files import is_bundle
from flywheel.models.decoder import MAX_BATCH

if TYPE_CHECKING:
    from socket import socket

    from flywheel.serve.decoder import Device
    from flywheel.serve.worker import DecoderReady

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:\d+)?|[a-z]+://\[[0-9a-f:.]+\](:\d+)?")
_LOCAL = ("127.0.0.1", "::1", "localhost")


@command
@click.option("--model", required=True, metavar="NAME|DIR", help="Directory of a checkpoint or bundle, or a name.")
@click.option("--config", "schedule", metavar="FILE",
              help="Exported schedule.  [default: the fastest that is known, else the shipped one that fits best]")
@click.option("--gpu", metavar="NAME", help="GPU to lower for.  [default: this machine's]")
@click.option("--dtype", metavar="bf16|f16|f32",
              help="Type of activations and unquantised weights.  [default: the schedule's or the checkpoint's]")
@click.option("--weights", cls=SharedOption, metavar="FORMAT|DIR",
              help="Format of matrices; with a bundle, its checkpoint's directory.  [default: as stored]")  # fmt: skip
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS",
              help="Most tokens of prompt and answer together.")
@click.option("--max-sequences", type=click.IntRange(1, MAX_BATCH), metavar="N",
              help=f"Requests decoded together, up to {MAX_BATCH}.  [default: the schedule's, else 1]")  # fmt: skip
@click.option("--lookup", type=click.IntRange(0, MAX_BATCH - 1), default=0, show_default=True, metavar="N",
              help="Speculative decoding: draft up to N tokens of greedy answers from their text.")  # fmt: skip
@click.option("--device", type=click.Choice(["cuda", "reference"]), help="[default: cuda if there is a GPU]")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of random weights.")
@click.option("--name", metavar="NAME", help="Name of the model in requests.  [default: its own name]")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, metavar="PORT",
              help="Port to listen on; 0 picks a free one.")
@click.option("--queue", type=click.IntRange(1, 100_000), default=64, show_default=True, metavar="N",
              help="Maximum number of running and waiting requests; further ones get status 429.")  # fmt: skip
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE",
              help="File whose first line is the key of /v1 requests.")
@click.option("--allow-origin", "origins", multiple=True, metavar="ORIGIN",
              help="Origin whose pages may use the server from a browser; repeat it for several; * for all.")
@click.option("--log-level", type=click.Choice(["warning", "info"]), default="warning", show_default=True,
              help="info writes a line about each request to stderr, without its text.")  # fmt: skip
@ranks_option
@store_option
@json_option
@click.pass_context
def serve(
    ctx: click.Context,
    model: str,
    schedule: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    max_sequences: int | None,
    lookup: int,
    device: Device | None,
    seed: int,
    name: str | None,
    host: str,
    port: int,
    queue: int,
    api_key_file: Path | None,
    origins: tuple[str, ...],
    log_level: str,
    ranks: int | None,
    store: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Serve OpenAI's completions and chat completions until Ctrl-C.

    Paths: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. A separate process decodes. If it dies,
    its requests fail and a new process replaces it. With --json, the command prints the address to stdout once it
    serves.
    """
    check_installed("serve", [*_loads(model), "fastapi", "uvicorn", "prometheus_client"])
    if device is not None:
        check_device(device, ranks)
    _check_origins(origins)
    key = None if api_key_file is None else _key(api_key_file)
    if key is None and host not in _LOCAL:
        note(f"flywheel: {host} is no loopback address and there is no --api-key-file: whoever reaches it may use it")
    from flywheel.serve.decoder import Decoder
    from flywheel.serve.engine import Engine
    from flywheel.serve.server import bound, run

    with bound(host, port) as listener:
        note(f"flywheel: loading {model}")
        make = partial(
            Decoder.load, model, schedule=schedule, device=device, gpu=gpu, dtype=dtype, context=context,
            weights=weights, max_sequences=max_sequences, lookup=lookup, ranks=ranks, seed=seed,
            store=_store(ctx, model),
        )
        engine = Engine(make, queue, complain)
        try:
            loaded = engine.start()
            served = name or loaded.model
            _announce(loaded, served, listener, as_json)
            with draining(_nothing):  # answers under way may end
                run(engine, served, key, listener, complain, origins, complain if log_level == "info" else None)
        finally:
            engine.close()


def _announce(loaded: DecoderReady, served: str, listener: socket, as_json: bool) -> None:
    """Say what is served, and where."""
    announce_notes([each for each in loaded.notes if each.code != "schedule"])  # the next line names it
    where = listener.getsockname()
    together = "" if loaded.max_sequences == 1 else f", up to {loaded.max_sequences} requests together"
    note(f"flywheel: {loaded.model} by {loaded.schedule}, context {loaded.context}{together}")
    url = f"http://{_shown(where[0])}:{where[1]}/v1"
    note(f"flywheel: serving {served} at {url}; Ctrl-C ends it")
    if as_json:
        notes = [asdict(each) for each in loaded.notes]
        show_json({"url": url, "model": served, "schedule": loaded.schedule, "context": loaded.context,
                   "notes": notes})  # fmt: skip


def _store(ctx: click.Context, model: str) -> str | None:
    """A bundle is a schedule itself: of a store, it is told only what the command line says, and refuses that."""
    said = ctx.get_parameter_source("store") is ParameterSource.COMMANDLINE
    return None if is_bundle(model) and not said else store_here(ctx)


def _check_origins(given: Sequence[str]) -> None:
    """Raises UsageError for what no browser sends as its origin, since it would allow nothing."""
    for origin in given:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise UsageError(f"--allow-origin {origin!r}: is neither * nor SCHEME://HOST[:PORT] in small letters")


def _nothing() -> None:
    """The terminal is as it was."""


def _key(file: Path) -> str:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file {str(file)!r} cannot be read: {type(error).__name__}") from None
    key = lines[0].strip() if lines else ""
    if not key or not key.isascii() or len(key) > 1000:
        raise UsageError(f"--api-key-file {str(file)!r}: its first line is no key of 1 to 1000 ASCII characters")
    return key


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _loads(model: str) -> list[str]:
    """The modules that loading the model imports; of a bundle, none of flywheel's extras."""
    from flywheel.models.catalog import modules_of

    return [] if is_bundle(model) else modules_of(model, texts=True)
