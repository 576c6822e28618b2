"""`flywheel knobs`: the knobs that a search sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from flywheel.cli.files import settle_work
from flywheel.cli.options import (
    batch_option,
    command,
    document_option,
    give,
    json_option,
    ranks_option,
    workload_options,
)
from flywheel.cli.text import show, table, wrapped


@command
@workload_options
@batch_option
@ranks_option
@document_option
@json_option
def knobs(ranks: int | None, output: Path | None, as_json: bool, **named: Any) -> None:
    """List the knobs of the search for a model on a GPU: name, default, values and meaning.

    The default is the value in the schedule that a search tries first. `search --fix NAME=VALUE` and `lower --set
    NAME=VALUE` choose another value.
    """
    from flywheel.search.knobs import KNOBS
    from flywheel.search.space import make_space
    from flywheel.search.workload import make_workload, with_ranks

    settled = settle_work("knobs", named, None)
    settled["gpu"] = with_ranks(settled["gpu"], ranks)
    workload = make_workload(**settled, any_size=True)
    space = make_space(workload)
    first, meanings = space.known_good()[0], {knob.name: knob.meaning for knob in KNOBS}
    listed = [
        {"name": each.name, "default": first[each.name], "values": list(each.values), "meaning": meanings[each.name]}
        for each in space.dimensions
    ]
    work = {"model": workload.model, "gpu": workload.gpu, "dtype": workload.dtype,
            "weights": workload.stored, "context": workload.context, "batch": workload.batch}  # fmt: skip
    give({**work, "knobs": listed}, output, as_json, lambda: _show(listed))


def _show(listed: Sequence[Mapping[str, Any]]) -> None:
    head, *lines = table(("<knob", "<default"), [(each["name"], str(each["default"])) for each in listed])
    margin = max(map(len, [head, *lines])) + 2
    show(f"{head.ljust(margin)}values")
    for each, line in zip(listed, lines, strict=True):
        first, *more = wrapped(", ".join(map(str, each["values"])), margin)
        show(f"{line.ljust(margin)}{first}", *(" " * margin + rest for rest in more))
        show(*(f"    {part}" for part in wrapped(each["meaning"], 4)))
    sizes = [len(each["values"]) for each in listed]
    show("", f"{sum(size > 1 for size in sizes)} knobs with a choice, {prod(sizes):.2g} schedules")
