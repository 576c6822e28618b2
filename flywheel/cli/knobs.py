"""`flywheel knobs`: the knobs that a search sets."""

from __future__ import annotations

from math import prod
from typing import Any

from flywheel.cli.files import settle_work
from flywheel.cli.options import batch_option, command, json_option, ranks_option, workload_options
from flywheel.cli.text import show, show_json, table


@command
@workload_options
@batch_option
@ranks_option
@json_option
def knobs(ranks: int | None, as_json: bool, **named: Any) -> None:
    """List the knobs of the search for a model on a GPU: name, default, values and meaning.

    The default is the value in the schedule that a search tries first. `search --fix NAME=VALUE` and `lower --set
    NAME=VALUE` choose another value.
    """
    from flywheel.search.knobs import knobs_of
    from flywheel.search.space import make_space
    from flywheel.search.workload import make_workload, with_ranks

    settled = settle_work("knobs", named, None)
    settled["gpu"] = with_ranks(settled["gpu"], ranks)
    workload = make_workload(**settled, any_size=True)
    space = make_space(workload)
    first, meanings = space.known_good()[0], {knob.name: knob.meaning for knob in knobs_of(workload)}
    if as_json:
        listed = [
            {"name": name, "default": first[name], "values": list(values), "meaning": meanings[name]}
            for name, values in ((each.name, each.values) for each in space.dimensions)
        ]
        work = {"model": workload.model, "gpu": workload.gpu, "dtype": workload.dtype,
                "weights": workload.stored, "context": workload.context, "batch": workload.batch}  # fmt: skip
        show_json({**work, "knobs": listed})
        return
    rows = [(each.name, str(first[each.name]), ", ".join(map(str, each.values))) for each in space.dimensions]
    head, *lines = table(("<knob", "<default", "<values"), rows)
    show(head)
    for each, line in zip(space.dimensions, lines, strict=True):
        show(line, f"    {meanings[each.name]}")
    sizes = [len(each.values) for each in space.dimensions]
    show("", f"{sum(size > 1 for size in sizes)} knobs with a choice, {prod(sizes):.2g} schedules")
