"""`flywheel lower`: one program from a model, a GPU and a schedule config."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import load_config, settle_work
from flywheel.cli.options import (
    STDOUT,
    batch_option,
    command,
    json_option,
    once,
    output_option,
    ranks_option,
    setting,
    workload_options,
    write_file,
)
from flywheel.cli.text import complain, note, percent, predicted, show_json, size, us
from flywheel.cli.warming import announce_compiling
from flywheel.cost_model import Predictor, open_predictor, predict
from flywheel.errors import ConfigError, UsageError
from flywheel.ir import MegakernelProgram, ScheduleConfig, program_pieces
from flywheel.ir.validate import used_sms
from flywheel.measure.floor import floor_fraction, weight_bytes_read
from flywheel.measure.latency import band_of
from flywheel.plan import program_id
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.search.space import Space


@command
@workload_options
@batch_option
@click.option("--config", "config_file", metavar="FILE|-",
              help="ScheduleConfig or exported schedule, as JSON.  "
                   "[default: the one that a search tries first]")  # fmt: skip
@click.option("--set", "settings", type=setting, callback=once, multiple=True, metavar="NAME=VALUE",
              help="Set one knob of the search space; repeatable.")  # fmt: skip
@click.option("--machine", metavar="FILE", help="Predict with the constants that flywheel calibrate wrote to FILE.")
@ranks_option
@click.option("--any-size", is_flag=True, help="Lower a model even if it exceeds the GPU's memory.")
@output_option
@json_option
@click.pass_context
def lower(
    ctx: click.Context,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    batch: int | None,
    config_file: str | None,
    settings: tuple[tuple[str, str], ...],
    machine: str | None,
    ranks: int | None,
    any_size: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Lower a model for a GPU: write the program's JSON to stdout, and a summary to stderr.

    An exported schedule names its model, GPU, dtype, context and batch; options override them. Exit code 3 if the
    lowerer refuses the config, or the model exceeds the GPU's memory.
    """
    from flywheel.lowering.lower import lower as lower_graph
    from flywheel.search.space import make_space
    from flywheel.search.workload import make_workload, with_ranks

    given = load_config(config_file) if config_file is not None else None
    named = {"model": model, "gpu": gpu, "dtype": dtype, "context": context, "batch": batch,
             "weights": weights}  # fmt: skip
    settled = settle_work("lower", named, given if isinstance(given, Schedule) else None)
    settled["gpu"] = with_ranks(settled["gpu"], ranks)
    workload = make_workload(**settled, any_size=any_size)
    predictor = open_predictor(machine, workload.target)
    config = given.config if isinstance(given, Schedule) else given
    if config is None or settings:
        knobs = dict(settings)
        config = _choose(make_space(workload), make_space(workload, knobs), knobs, config)
    announce_compiling()
    try:
        program = lower_graph(workload.graph, config, workload.target)
    except ConfigError as error:
        complain(f"rejected: {error}")
        ctx.exit(REJECTED)
    summary = _summary(program, predictor)
    band = band_of(workload.gpu, predictor.version)
    note(
        f"{program.meta['model']} on {_gpus(program)}: {summary['tasks']:,} tasks on {summary['sms']} SMs, "
        f"{size(summary['weight_bytes'])} of weights read a step{' and GPU' if program.ranks > 1 else ''}, "
        f"floor {us(summary['floor_us'])}; "
        f"predicted {predicted(summary['predicted_us'], band)}, {percent(summary['floor_fraction'])} of the floor; "
        f"program {summary['program_id']}"
    )
    if summary["no_kernels"] is not None:
        note(f"flywheel: no kernels run it: {summary['no_kernels']}")
    write_file(output or STDOUT, chain(program_pieces(program), "\n"))
    if output is None:
        return
    if as_json:
        show_json({"path": str(output), **summary})


def _choose(space: Space, pinned: Space, names: Collection[str], config: ScheduleConfig | None) -> ScheduleConfig:
    """`config`, or the schedule that search tries first, with the knobs of `names` set as in `pinned`. Raises
    UsageError."""
    choice = space.known_good()[0] if config is None else space.to_choice(config)
    if choice is None:
        raise UsageError("--set: the config is outside the search space, so --set cannot change its knobs")
    settings = {knob.name: knob.values[0] for knob in pinned.dimensions if knob.name in names}
    return space.to_config({**choice, **settings})


def _gpus(program: MegakernelProgram) -> str:
    gpu: str = program.meta["gpu"]
    return gpu if program.ranks == 1 else f"{program.ranks} x {gpu}"


def _summary(program: MegakernelProgram, predictor: Predictor) -> dict[str, Any]:
    from flywheel.plan.program import refusal_of

    prediction = predict(program, predictor.machine)
    return {
        "program_id": program_id(program),
        "config_id": program.config.config_id if program.config else None,
        "tasks": len(program.tasks),
        "ranks": program.ranks,
        "sms": used_sms(program),
        "weight_bytes": weight_bytes_read(program),
        "floor_us": prediction.floor_us,
        "predicted_us": prediction.latency_us,
        "floor_fraction": floor_fraction(prediction.floor_us, prediction.latency_us),
        "predictor": predictor.version,
        "no_kernels": refusal_of(program),
    }
