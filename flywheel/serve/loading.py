"""A model in memory for a decoder: its work, its schedule, its program on a device. Needs torch."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from flywheel.decode.opening import open_session
from flywheel.decode.session import BatchSession
from flywheel.decode.source import Source, Weights, open_source
from flywheel.errors import UsageError, WeightsError
from flywheel.ir import MAX_RANKS, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.models.catalog import model_name
from flywheel.models.weights import checkpoint_tensors
from flywheel.search.knowledge.chosen import Chosen, choose_schedule, settle_work
from flywheel.search.trials.device import gpu_of
from flywheel.search.workload import Workload, lanes_of_lookup
from flywheel.store.schedule import Schedule


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device; `schedule` says by which one it decodes."""

    source: Source
    session: BatchSession
    schedule: str


def load_model(
    model: str, given: Schedule | None, device: str, undo: ExitStack, *, weights: str | Weights | None, seed: int,
    store: str | None, batch: int | None = None, lookup: int = 0, ranks: int | None = None, **asked: Any,
) -> LoadedModel:  # fmt: skip
    """As `Decoder.load`, for `batch` sequences; `undo` gives the device's memory back. `asked` are gpu, dtype and
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
    chosen = _chosen(model, workload, given, store)
    program = lower(workload.graph_of(lanes), chosen.config, workload.target)
    session, _ = open_session(program, source, seed, device, undo)
    guesses = f", with {lookup} guesses a launch" if lookup else ""
    return LoadedModel(source, session, chosen.words + guesses)


def _of_model(source: Source, weights: Weights) -> Weights:
    """The model's tensors among them. Raises WeightsError for one that is missing."""
    keys = checkpoint_tensors(source.spec)
    missing = [key for key in keys if key not in weights]
    if missing:
        raise WeightsError(f"{source.name}: {len(missing)} of its weights are not given, {missing[0]!r} the first")
    return {key: weights[key] for key in keys}


def _chosen(model: str, workload: Workload, given: Schedule | None, store: str | None) -> Chosen:
    if given is not None:
        return Chosen(given.config, "as given")
    if store is None:
        return choose_schedule(workload)
    stored = replace(workload, model=model_name(model))  # stores have its path
    return _best_of_store(stored, store) or choose_schedule(workload)


def _best_of_store(workload: Workload, url: str) -> Chosen | None:
    """The best measured schedule of the work there; None where there is none. Raises StoreError."""
    from flywheel.search.knowledge.known import best_of_work
    from flywheel.store.sql import open_store

    with open_store(url, create=False) as store:
        row = best_of_work(store, workload, measured=True)
    if row is None:
        return None
    words = f"trial {row.trial} of campaign {row.campaign}, measured {row.latency_us:,.1f} us"
    return Chosen(config_from_dict(json.loads(row.config)), words)
