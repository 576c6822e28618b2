"""`flywheel verify`: compare a program's tensors with the oracle's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from flywheel.cli.decoding import (
    check_device,
    decode_options,
    integers,
    lower_model,
    notes_of_program,
    open_model,
    open_session,
)
from flywheel.cli.exits import REJECTED
from flywheel.cli.files import announce_notes, load_config, load_program
from flywheel.cli.options import batch_option, command, json_option, ranks_option
from flywheel.cli.text import pairs, show, show_json
from flywheel.cli.unquantised import cost_of_quantising, told
from flywheel.errors import UsageError
from flywheel.ir import MegakernelProgram
from flywheel.models.catalog import CATALOG
from flywheel.plan import program_id
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.source import Source
    from flywheel.judge.agreement import Agreement
    from flywheel.measure.verdict import Verdict


@command
@click.argument("program_file", required=False, metavar="[FILE|-]")
@click.option(
    "--config",
    "config_file",
    metavar="FILE|-",
    help="Exported schedule, or ScheduleConfig, to lower instead of a program.",
)
@decode_options
@batch_option
@ranks_option
@click.option(
    "--positions",
    type=integers,
    metavar="P,P...",
    help="Positions to compare at.  [default: 0, the middle and the last two of the context]",
)
@click.option(
    "--order",
    type=click.Choice(["list", "adversarial", "queues"]),
    default="list",
    show_default=True,
    help="Order in which ready tasks fire; --seed varies the last two.",
)
@click.option("--against-unquantised", "compared", is_flag=True,
              help="Also compare with the unquantised model: KL divergence, and how often the next token agrees.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE",
              help="With --against-unquantised: text to compare over, up to the context.  [default: random tokens]")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    program_file: str | None,
    config_file: str | None,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    batch: int | None,
    ranks: int | None,
    device: str,
    seed: int,
    positions: tuple[int, ...] | None,
    order: str,
    compared: bool,
    text: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Run a program with filled KV caches, and compare every tensor that it computes, of every sequence, with an
    oracle's.

    The oracle computes from the same operands and shares no code with the program. The program is a file, or the one
    that --config lowers to. Exit code 3 unless the verdict is a pass. Only positions after 0 can give a pass.
    """
    check_device(device, ranks)
    if device == "cuda" and order != "list":
        raise UsageError(f"verify: --order {order} needs --device reference; a GPU fires tasks in its own order")
    if (program_file is None) == (config_file is None):
        fault = "no program" if program_file is None else f"two programs, {program_file} and --config {config_file}"
        raise UsageError(f"verify: {fault}; give FILE or --config")
    if program_file is not None:
        program = load_program(program_file)
        _refuse_lowering_options(ctx)
        source = _open(model, next((name for name in CATALOG if name == program.meta.get("model")), None))
        notes: tuple[Note, ...] = ()
    else:
        given = load_config(config_file or "")
        source = _open(model, given.model if isinstance(given, Schedule) else None)
        lowered = lower_model(source, given, gpu, dtype, context, device, batch, weights, ranks)
        program, notes = lowered.program, lowered.notes
    notes = (*notes_of_program(program, source, seed), *notes)
    announce_notes(notes)
    verdict = _verdict(program, source, positions, device, seed, order)
    cost = cost_of_quantising(program, source, device, seed, text) if compared else None
    if as_json:
        from flywheel.measure.verdict import as_document

        show_json({**as_document(verdict), "model": source.name, "program_id": program_id(program),
                   "config_id": program.config.config_id if program.config else None, "device": device,
                   "order": order, "seed": seed, "random_weights": source.stored is None,
                   "against_unquantised": None if cost is None else asdict(cost),
                   "notes": [asdict(each) for each in notes]})  # fmt: skip
    else:
        _show(verdict, cost)
    if not verdict.passed:
        ctx.exit(REJECTED)


def _refuse_lowering_options(ctx: click.Context) -> None:
    """Raises UsageError for lowering options on the command line. Variables may set them: they serve all commands."""
    for name in ("gpu", "dtype", "weights", "context", "batch", "ranks"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"verify: --{name} goes with --config; a program file has its own")


def _open(model: str | None, fallback: str | None) -> Source:
    name = model if model is not None else fallback
    if name is None:
        raise UsageError("verify: no model; give --model")
    return open_model("verify", name)


def _verdict(
    program: MegakernelProgram,
    source: Source,
    positions: tuple[int, ...] | None,
    device: str,
    seed: int,
    order: str,
) -> Verdict:
    from flywheel.judge.verdicts import default_positions
    from flywheel.judge.verdicts import verify as compare

    session, weights = open_session(program, source, seed, device, order)
    tried = positions if positions is not None else default_positions(session.context)
    return compare(session, weights, tried, seed)


def _show(verdict: Verdict, cost: Agreement | None) -> None:
    show("PASS" if verdict.passed else f"FAIL: {verdict.reason}")
    show(
        *pairs(
            [
                ("error", f"{verdict.error:.3g} (at most {verdict.bound:.3g} for {verdict.dtype})"),
                ("where", verdict.where),
                ("positions", ", ".join(map(str, verdict.positions))),
                ("quantised", None if cost is None else told(cost)),
            ]
        )
    )
