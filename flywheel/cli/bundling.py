"""`flywheel export --format bundle`: lower and compile a schedule for its GPU. The files run without torch and without
flywheel's search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from flywheel.cli.files import announce_notes, load_config
from flywheel.cli.options import DEFAULTS, STDOUT, check_writable
from flywheel.cli.text import note, size, us_of
from flywheel.decode.notes import Note, notes_of_defaults, notes_of_model
from flywheel.errors import UsageError
from flywheel.installing import lacking
from flywheel.ir import ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import resolve_model
from flywheel.models.decoder import DTYPES
from flywheel.models.hf import load_scheme
from flywheel.search.provenance import stored_text
from flywheel.search.workload import Workload, default_context, make_workload, notes_of_another
from flywheel.store.schedule import Schedule, Shipped
from flywheel.store.sql import Store

SHIPPED: Final = "shipped"
"""Stands in place of a schedule's file: the schedule that comes with flywheel."""

_WORK: Final = ("model", "gpu", "dtype", "context", "batch", "weights")


def bundle_answer(store: Store, answer: TrialRecord | Shipped, output: Path | None) -> dict[str, Any]:
    """Write the bundle of a store's row or of a shipped schedule, whose model must be a checkpoint. Returns facts about
    it. Raises as `_write`."""
    if isinstance(answer, Shipped):
        said = {"words": f"shipped schedule {answer.stem}"}
        return _write(work_of(answer), answer.schedule.config, said, output)
    workload = make_workload(answer.model, answer.gpu, answer.dtype, answer.context, answer.batch, answer.weights)
    exported = json.loads(stored_text(answer, store))
    words = f"{answer.title} of campaign {answer.campaign}, {answer.kind} {us_of(answer)}"
    return _write(workload, config_from_dict(json.loads(answer.config)), {"words": words, "exported": exported}, output)


def work_of(shipped: Shipped) -> Workload:
    """The work that a shipped schedule was found for."""
    asked = shipped.schedule
    return make_workload(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, asked.weights)


def bundle_file(file: str, form: str, named: Mapping[str, Any], output: Path | None) -> dict[str, Any]:
    """Write the bundle of a schedule file, or of SHIPPED. `named` options override the file. Returns facts about the
    bundle.

    Raises UsageError for a format other than bundle, UnknownNameError where no schedule is shipped, and as `_write`.
    """
    if form != "bundle":
        raise UsageError(f"export: --config goes with --format bundle, not with {form}")
    given = None if file == SHIPPED else load_config(file)
    work: dict[str, Any] = {
        name: named[name] if named[name] is not None else getattr(given, name, DEFAULTS.get(name)) for name in _WORK
    }
    if isinstance(given, Schedule) and named["weights"] is None and given.weights == given.dtype:
        work["weights"] = None
    missing = next((name for name in ("model", "gpu") if work[name] is None), None)
    if missing is not None:
        raise UsageError(f"export: --{missing} is missing; {file} does not name it")
    if named["context"] is None and not isinstance(given, Schedule):
        work["context"] = default_context(resolve_model(work["model"]))
    workload = make_workload(**work)
    if isinstance(given, Schedule):
        notes = notes_of_another(given, workload.spec)
        return _write(workload, given.config, {"words": f"schedule {Path(file).name}"}, output, notes)
    notes = notes_of_defaults({name: work[name] for name in ("dtype", "context")}, named)
    if given is not None:
        return _write(workload, given, {"words": f"schedule {Path(file).name}"}, output, notes)
    from flywheel.search.knowledge.chosen import choose_shipped

    chosen = choose_shipped(workload)
    return _write(workload, chosen.config, {"words": chosen.words}, output, notes)


def _write(
    workload: Workload, config: ScheduleConfig, schedule: Mapping[str, Any], output: Path | None,
    notes: tuple[Note, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Lower, prove, compile and write. `notes` are those of the work; the checkpoint's are added.

    Raises UsageError where `output` is missing or not new, where the model is no checkpoint, and as `make_bundle` and
    `write_folder`.
    """
    if (missing := lacking("export --format bundle", ["torch", "safetensors"])) is not None:
        raise UsageError(missing)
    from flywheel.decode.bundling import make_bundle
    from flywheel.lowering.lower import lower
    from flywheel.models.catalog import model_path
    from flywheel.runtime.writing import check_new, write_folder

    if output is None:
        raise UsageError("export: --format bundle needs --output DIR")
    if output == STDOUT:
        raise UsageError("export: --output - is stdout, and --format bundle writes a directory; name one")
    with _writing(output):
        check_new(output)
        if not output.exists():
            check_writable(output)
    path = model_path(workload.model)
    if path is None:
        raise UsageError(f"export: {workload.model} has no weights; give a checkpoint's directory as --model")
    folder = path if path.is_dir() else path.parent
    dtype = DTYPES[workload.dtype]
    notes = (*notes_of_model(workload.spec.name, folder, load_scheme(folder), dtype, None), *notes)
    announce_notes(notes)
    note(f"flywheel: {schedule['words']}; reading the weights of {folder}")
    about = {**schedule, "config": config_to_dict(config), "config_id": config.config_id}
    files = make_bundle(lower(workload.graph, config, workload.target), workload.spec, folder, about)
    with _writing(output):
        write_folder(output, files)
    note(f"wrote {output}: {len(files)} files, {size(sum(map(len, files.values())))}")
    return {"config_id": config.config_id, "files": sorted(files), "notes": [asdict(each) for each in notes]}


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turn an OSError within the block into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror or error}") from None
