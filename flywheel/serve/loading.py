"""Loads a model for a decoder: finds the workload and its schedule, and puts the program on a device. Needs torch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from flywheel.decode.interface import read_interface
from flywheel.decode.notes import Note, notes_of_source
from flywheel.decode.opening import open_session
from flywheel.decode.session import DecodeSession
from flywheel.decode.source import Source, Weights, open_source
from flywheel.errors import UsageError, WeightsError
from flywheel.ir import MAX_RANKS
from flywheel.lowering.lower import lower
from flywheel.models.stored import canonical, stored_tensors
from flywheel.search.knowledge.chosen import ChosenConfig, choose_schedule, notes_of_work, settle_work
from flywheel.search.trials.device import gpu_of
from flywheel.search.workload import found_for_another, lanes_of_lookup, notes_of_another
from flywheel.store.schedule import Schedule


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device. `schedule` describes the schedule in use, and `notes` what else is computed."""

    source: Source
    session: DecodeSession
    schedule: str
    notes: tuple[Note, ...]


def load_model(
    model: str, given: Schedule | None, device: str, undo: ExitStack, *, weights: str | Weights | None, seed: int,
    store: str | None, batch: int | None = None, lookup: int = 0, ranks: int | None = None, **asked: Any,
) -> LoadedModel:  # fmt: skip
    """See `Decoder.load`, for `batch` sequences. `undo` frees the device's memory. `asked` are gpu, dtype and
    context."""
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"ranks: {ranks} is not in 1..{MAX_RANKS}")
    source = open_source(model)
    named = weights if isinstance(weights, str) else None
    if weights is not None and not isinstance(weights, str):
        source = replace(source, stored=_of_model(source, weights), scheme=None)
    if lookup and batch is None:
        batch = 1 if given is None else max(1, given.batch // (lookup + 1))
    lanes = lanes_of_lookup(lookup, batch or 1)
    rows = None if batch is None else batch * lanes
    workload = settle_work(source, given, gpu_of(device), weights=named, batch=rows, ranks=ranks, **asked)
    chosen = choose_schedule(workload, store) if given is None else _as_given(given, source)
    program = lower(workload.graph_of(lanes), chosen.config, workload.target)
    session, _ = open_session(program, source, seed, device, undo)
    taken = (Note("schedule", f"decoding by {chosen.words}"),) if given is None else ()
    notes = (
        *notes_of_source(source, read_interface(program, source.spec).dtype, seed),
        *notes_of_work(workload, given, **asked),
        *taken,
        *notes_of_another(given, source.spec),
    )
    guesses = f", with {lookup} guesses a launch" if lookup else ""
    return LoadedModel(source, session, chosen.words + guesses, notes)


def _as_given(schedule: Schedule, source: Source) -> ChosenConfig:
    found = found_for_another(schedule, source.spec)
    return ChosenConfig(schedule.config, "as given" + (f", found for {found}" if found is not None else ""))


def _of_model(source: Source, weights: Weights) -> Weights:
    """The given tensors that belong to the model. Raises WeightsError if one is missing."""
    missing = [key for key in stored_tensors(source.spec).shapes if key not in weights]
    if missing:
        raise WeightsError(f"{source.name}: {len(missing)} of its weights are not given, {missing[0]!r} the first")
    return canonical(source.spec, weights)
