"""`flywheel generate`: text, or tokens, from a lowered model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.chosen import store_here
from flywheel.cli.decoding import (
    check_device,
    check_installed,
    decode_options,
    integers,
    lower_model,
    notes_of_program,
    open_model,
    open_session,
)
from flywheel.cli.files import announce_notes, load_config
from flywheel.cli.options import command, json_option, ranks_option, sampling_options, store_option
from flywheel.cli.text import duration, note, show_document, show_json
from flywheel.decode.notes import notes_of_generation, notes_of_tokenizer
from flywheel.errors import FlywheelError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.models.decoder import MAX_BATCH
from flywheel.runtime.sequences import Sampling
from flywheel.serve.text import Streamer, push_all

if TYPE_CHECKING:
    from flywheel.decode.generate import Generation
    from flywheel.decode.source import Source
    from flywheel.models.tokenizer import Tokenizer
    from flywheel.runtime.sequences import Request


@command
@decode_options
@ranks_option
@click.option("--prompt", metavar="TEXT", help="Text to continue; needs the checkpoint's tokenizer.json.")
@click.option("--prompt-ids", type=integers, metavar="ID,ID...", help="Token ids to continue.")
@click.option("--chat", is_flag=True, help="Send --prompt as a user's message in the checkpoint's chat template.")
@click.option("--max-tokens", type=int, default=32, show_default=True, metavar="N", help="Stop after N tokens.")
@click.option(
    "--config",
    "schedule_file",
    metavar="FILE|-",
    help="Exported schedule, or ScheduleConfig, as JSON.  [default: the fastest that is known of this workload, in "
    "the store or shipped, else the one that a search tries first]",
)
@click.option("--lookup", type=click.IntRange(0, MAX_BATCH - 1), default=0, show_default=True, metavar="N",
              help="Speculative decoding: draft up to N tokens from the text so far.")  # fmt: skip
@sampling_options
@click.option("--verify", is_flag=True, help="Compare every token with the eager oracle.")
@click.option("--stream", is_flag=True, help="Show the text as it is made; with --json, one object per line.")
@store_option
@json_option
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    device: str,
    seed: int,
    ranks: int | None,
    prompt: str | None,
    prompt_ids: tuple[int, ...] | None,
    chat: bool,
    max_tokens: int,
    schedule_file: str | None,
    lookup: int,
    verify: bool,
    stream: bool,
    store: str,
    as_json: bool,
    **drawn: Any,
) -> None:  # fmt: skip
    """Generate text: torch reads the prompt, then each launch of the lowered decode step makes a token.

    Decoding is greedy unless --temperature is positive. The same --seed draws the same tokens.

    An exported schedule names its GPU, dtype and context; options override them. With --verify, the first token that
    differs from the oracle's choice ends the command with exit code 3; --stream shows tokens before they are compared.
    """
    check_device(device, ranks)
    sampling = Sampling(**drawn, seed=seed)
    _check(prompt, prompt_ids, chat, verify, sampling)
    given = load_config(schedule_file) if schedule_file is not None else None
    model = model if model is not None else getattr(given, "model", None)
    if model is None:
        raise UsageError("generate: no model; give --model, or an exported schedule with --config")
    source = open_model("generate", model)
    with _tokenizer(source, required=prompt is not None) as tokenizer:
        ids = prompt_ids or () if tokenizer is None or prompt is None else _encoded(tokenizer, prompt, chat)
        lowered = lower_model(
            source, given, gpu, dtype, context, device, 1 + lookup, weights, ranks, 1 + lookup, store_here(ctx)
        )
        program = lowered.program
        request = _request(program, source, ids, max_tokens, tokenizer)
        ways = notes_of_generation(source.folder, {**drawn, "do_sample": drawn["temperature"] > 0})
        notes = (*notes_of_program(program, source, seed), *lowered.notes, *notes_of_tokenizer(tokenizer), *ways)
        announce_notes(notes)
        shown = _TokenPrinter(tokenizer, as_json) if stream else None
        generation = _run(program, source, request, device, sampling, verify, shown)
        text = None if tokenizer is None else tokenizer.decode(generation.token_ids)
    if as_json:
        document = {**_document(source, program, generation, text, device), "sampling": {**drawn, "seed": seed},
                    "notes": [asdict(each) for each in notes]}  # fmt: skip
        show_json(document, indent=None if stream else 2)
        return
    if not stream:
        show_document((",".join(map(str, generation.token_ids)) if text is None else text) + "\n")
    note(_summary(generation, device))


def _check(
    prompt: str | None, prompt_ids: tuple[int, ...] | None, chat: bool, verify: bool, sampling: Sampling
) -> None:
    """Raises UsageError for options that do not go together."""
    if (prompt is None) == (prompt_ids is None):
        raise UsageError(f"generate: {'no prompt' if prompt is None else 'two prompts'}; give --prompt or --prompt-ids")
    if chat and prompt is None:
        raise UsageError("generate: --chat needs --prompt")
    if verify and not sampling.is_argmax:
        what = "--repetition-penalty" if sampling.is_greedy else "--temperature"
        raise UsageError(f"generate: --verify compares greedy tokens; it does not go with {what}")


class _TokenPrinter:
    """Shows tokens on stdout as they are made: text, or ids without a tokenizer; with `as_json`, one object a line."""

    def __init__(self, tokenizer: Tokenizer | None, as_json: bool) -> None:
        self._tokenizer, self._text = tokenizer, Streamer()
        self._as_json = as_json
        self._gap = ""

    def push(self, token_id: int) -> None:
        """Show a token."""
        tokenizer = self._tokenizer
        text = None if tokenizer is None else push_all(tokenizer.decode_each, [(self._text, token_id)])[0]
        if isinstance(text, FlywheelError):
            raise text
        if self._as_json:
            show_json({"token_id": token_id, "text": text}, indent=None)
        else:
            show_document(f"{self._gap}{token_id}" if text is None else text)
            self._gap = ","

    def end(self) -> None:
        """Show what no token will finish, and end the line."""
        rest = self._text.end()
        if not self._as_json:
            show_document(f"{rest}\n")
        elif rest:
            show_json({"token_id": None, "text": rest}, indent=None)

    def break_off(self) -> None:
        """End the line, so that an error message begins a new one."""
        if not self._as_json:
            show_document("\n")


def _encoded(tokenizer: Tokenizer, prompt: str, chat: bool) -> Sequence[int]:
    """The prompt's token ids. Raises UsageError for a chat where the checkpoint has no template."""
    return tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)


def _document(
    source: Source, program: MegakernelProgram, generation: Generation, text: str | None, device: str
) -> dict[str, object]:
    return {
        "model": source.name,
        "token_ids": list(generation.token_ids),
        "text": text,
        "finish": generation.finish,
        "first_token_s": generation.first_s,
        "tokens_per_s": generation.tokens_per_s,
        "device": device,
        "config_id": program.config.config_id if program.config is not None else None,
        "verified": generation.ties is not None,
        "ties": None if generation.ties is None else list(generation.ties),
        "random_weights": source.stored is None,
    }


def _request(
    program: MegakernelProgram, source: Source, ids: Sequence[int], max_tokens: int, tokenizer: Tokenizer | None
) -> Request:
    """The request of a prompt, which ends at the model's own ends. Raises as `make_request`."""
    from flywheel.decode.interface import read_interface
    from flywheel.models.generation import end_ids
    from flywheel.runtime.sequences import make_request

    stop_ids = frozenset[int]() if source.folder is None else end_ids(source.folder, tokenizer)
    return make_request(ids, max_tokens, stop_ids, source.spec, read_interface(program, source.spec).context)


def _run(
    program: MegakernelProgram,
    source: Source,
    request: Request,
    device: str,
    sampling: Sampling,
    verify: bool,
    shown: _TokenPrinter | None,
) -> Generation:
    """Load the weights and generate on the device."""
    from flywheel.decode.generate import generate as run
    from flywheel.judge.verdicts import make_oracle

    session, weights = open_session(program, source, sampling.seed, device)
    oracle = make_oracle(session, weights) if verify else None
    if shown is None:
        return run(session, request, oracle, sampling=sampling)
    try:
        generation = run(session, request, oracle, shown.push, sampling)
    except (FlywheelError, KeyboardInterrupt):
        shown.break_off()
        raise
    shown.end()
    return generation


def _summary(generation: Generation, device: str) -> str:
    compared = ""
    if generation.ties is not None:
        tied = f", but for {len(generation.ties)} within rounding of it" if generation.ties else ""
        compared = f"; every token is the oracle's{tied}"
    rate = "" if generation.tokens_per_s is None else f", then {generation.tokens_per_s:.4g} a second"
    return (
        f"flywheel: {len(generation.token_ids)} tokens on {device}, ended by {generation.finish}; the first after "
        f"{duration(generation.first_s)}{rate}{compared}"
    )


def _tokenizer(source: Source, required: bool) -> AbstractContextManager[Tokenizer | None]:
    """The checkpoint's tokenizer; None where the checkpoint or the library is missing. Raises UsageError where one is
    `required`."""
    from flywheel.models.tokenizer import Tokenizer, has_tokenizer

    if source.folder is None:
        if required:
            raise UsageError(f"generate: {source.name} is a name, so no tokenizer encodes --prompt; give --prompt-ids")
        return nullcontext()
    if required:
        check_installed("--prompt", ["tokenizers"])
    elif not has_tokenizer(source.folder) or find_spec("tokenizers") is None:
        return nullcontext()
    return Tokenizer(source.folder)
