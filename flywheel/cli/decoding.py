"""What `generate` and `verify` share: their options, and a model's program in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.options import DEFAULTS, SharedOption, weights_option
from flywheel.cli.text import complain, note, size
from flywheel.errors import ConfigError, UsageError
from flywheel.installing import lacking
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.models.families import count_params
from flywheel.search.trials.device import DEFAULT_GPU, gpu_of
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.session import DecodeSession
    from flywheel.decode.source import Source, Weights

_F = TypeVar("_F", bound=Callable[..., Any])

_SOON_LOADED: Final = 10**9
"""Bytes of weights that load within about 2 s. Loading more is announced."""


def integers(text: str) -> tuple[int, ...]:
    """The numbers of `0,7,512`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of integers such as 0,7,512") from None


def decode_options(function: _F) -> _F:
    """`--model`, `--gpu`, `--dtype`, `--weights`, `--context`, `--device` and `--seed`."""
    for option in (
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, metavar="N",
                     help="Seed of drawn tokens and, without a checkpoint, of the weights."),
        click.option("--device", cls=SharedOption, type=click.Choice(["cuda", "reference"]), default="reference",
                     show_default=True, help="Run the program on the CPU (reference) or on this machine's GPU (cuda)."),
        click.option("--context", cls=SharedOption, type=int, metavar="TOKENS",
                     help=f"Positions of the KV cache.  [default: the schedule's, else {DEFAULTS['context']}]"),
        weights_option,
        click.option("--dtype", cls=SharedOption, metavar="bf16|f16|f32",
                     help="Type of weights and activations.  [default: the schedule's, else the checkpoint's, else "
                          f"{DEFAULTS['dtype']}]"),
        click.option("--gpu", cls=SharedOption, metavar="NAME",
                     help=f"GPU to lower for.  [default: the schedule's, else the device's, else {DEFAULT_GPU}]"),
        click.option("--model", cls=SharedOption, metavar="NAME|DIR|REPO",
                     help="Directory of a Hugging Face checkpoint, a repository of its Hub, or a model by name, with "
                          "random weights."),
    ):  # fmt: skip
        function = option(function)
    return function


def check_device(device: str, ranks: int | None = None) -> None:
    """Check that `cuda` has what a command needs. Raises NoGpuError where this machine has no GPU, lacks the packages
    to use one, or has no `ranks` GPUs that can share a program."""
    if device == "cuda":
        from flywheel.vm.gpu.driver import open_gpus

        open_gpus(ranks or 1)


def check_installed(what: str, modules: Sequence[str]) -> None:
    """Raises UsageError, with the command that installs them, where modules are missing."""
    said = lacking(what, modules)
    if said is not None:
        raise UsageError(said)


def open_model(command: str, model: str) -> Source:
    """Open a model, and its checkpoint if it has one. A repository's comes from the Hub.

    Raises UsageError where a library is missing, UnknownNameError as `fetch_model`, and as `open_source`.
    """
    from flywheel.models.catalog import fetch_model, modules_of

    check_installed(command, modules_of(model))
    fetch_model(model, True, lambda line: note(f"flywheel: {line}"))
    from flywheel.decode.source import open_source

    return open_source(model)


def open_session(
    program: MegakernelProgram, source: Source, seed: int, device: str = "reference", order: str = "list"
) -> tuple[DecodeSession, Weights]:
    """Load a program and the model's weights, in the program's dtype, on a device. Announces long loading.

    Raises as ReferenceSession, or as CudaModel and its `load`.
    """
    from flywheel.decode import opening
    from flywheel.decode.interface import read_interface

    dtype = read_interface(program, source.spec).dtype
    if source.stored is not None and dtype.nbytes(count_params(source.spec)) > _SOON_LOADED:
        note(f"flywheel: loading the weights of {source.name}, {size(dtype.nbytes(count_params(source.spec)))}")
    return opening.open_session(program, source, seed, device, ExitStack(), order)  # until the process ends


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program, and the notes of how it was chosen."""

    program: MegakernelProgram
    notes: tuple[Note, ...]


def notes_of_program(program: MegakernelProgram, source: Source, seed: int) -> tuple[Note, ...]:
    """The notes of a model's weights as a program computes with them. Raises as `read_interface`."""
    from flywheel.decode.interface import read_interface
    from flywheel.decode.notes import notes_of_source

    return notes_of_source(source, read_interface(program, source.spec).dtype, seed)


def lower_model(
    source: Source,
    given: Schedule | ScheduleConfig | None,
    gpu: str | None,
    dtype: str | None,
    context: int | None,
    device: str = "reference",
    batch: int | None = None,
    weights: str | None = None,
    ranks: int | None = None,
    lanes: int = 1,
    store: str | None = None,
) -> Lowered:
    """Lower a model. An option decides, else the schedule, else the default. `lanes` consecutive rows of the batch are
    consecutive tokens of one sequence.

    Without a GPU's name, `cuda` takes this machine's GPU. Without a config, it takes the best measured one in `store`,
    else the shipped one, else the one that a search tries first. A config that the lowerer refuses ends the command.

    Raises UnknownNameError and ConfigError where a name or the context is wrong, and StoreError.
    """
    from flywheel.decode.notes import Note
    from flywheel.lowering.lower import lower
    from flywheel.search.knowledge.chosen import choose_schedule, notes_of_work, settle_work
    from flywheel.search.workload import notes_of_another

    schedule = given if isinstance(given, Schedule) else None
    config = schedule.config if schedule is not None else given
    workload = settle_work(
        source, schedule, gpu_of(device), gpu=gpu, dtype=dtype, context=context, batch=batch, weights=weights,
        ranks=ranks,
    )
    notes = notes_of_work(workload, schedule, gpu=gpu, dtype=dtype, context=context)
    graph = workload.graph_of(lanes)
    try:
        if not isinstance(config, ScheduleConfig):
            chosen = choose_schedule(workload, store)
            notes += (Note("schedule", f"decoding by {chosen.words}"),)
            config = chosen.config
        program = lower(graph, config, workload.target)
    except ConfigError as error:
        complain(f"rejected: {error}")
        raise click.exceptions.Exit(REJECTED) from error
    return Lowered(program, notes + notes_of_another(schedule, source.spec))
