"""`flywheel compare`: two campaigns, schedules or GPUs beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import announce
from flywheel.cli.options import (
    OutputFile,
    SharedOption,
    announce_written,
    batch_option,
    command,
    json_option,
    store_option,
    weights_option,
    write_file,
)
from flywheel.cli.text import note, pairs, show, show_json, show_table
from flywheel.errors import FlywheelError, UnknownNameError, UsageError
from flywheel.ir import TARGETS
from flywheel.ir.files import parse_json, read_json
from flywheel.ir.show import listed
from flywheel.store.campaign import work_named

if TYPE_CHECKING:
    from flywheel.report.sides import Difference, Side
    from flywheel.search.knobs import Value
    from flywheel.search.workload import Workload

_PERCENT: Final = re.compile(r"(\d+(?:\.\d+)?) ?%?")
_ORIGIN: Final = ("gpu_name", "gpu_driver", "kernels", "created_at", "campaign", "trial")
SHOWN: Final = 8
"""How many knobs that differ the text shows."""


def share(text: str) -> float:
    """`2%` or `2` as 0.02."""
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a percentage such as 2%")
    return float(found[1]) / 100


@command
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--model", cls=SharedOption, metavar="NAME|DIR|REPO", help="The model, if A and B are GPUs.")
@click.option("--dtype", cls=SharedOption, metavar="bf16|f16|f32", help="Its dtype, if A and B are GPUs.")
@weights_option
@click.option("--context", cls=SharedOption, type=int, metavar="TOKENS", help="Its context, if A and B are GPUs.")
@batch_option
@click.option("--fail-if-slower", "most", type=share, metavar="PERCENT",
              help="Exit with code 3 if a step of B takes over PERCENT longer than one of A.")
@store_option
@click.option("--picture", type=OutputFile(), metavar="FILE.svg", help="Draw the comparison to FILE.")
@json_option
@click.pass_context
def compare(
    ctx: click.Context, /, first: str, second: str, most: float | None, store: str, picture: Path | None, as_json: bool,
    **work: Any,
) -> None:  # fmt: skip
    """Compare two campaigns, schedules or GPUs.

    A and B are each the name of a campaign in the store, the file of an exported schedule, the name of a shipped one
    (flywheel schedules) or, with --model, a GPU: then the best schedule that was measured there. Measured and predicted
    times are never compared.
    """
    from flywheel.report.sides import difference, different, drawn

    given = [option for option, value in work.items() if value is not None]
    if given and not any(_is_gpu(name, work) for name in (first, second)):
        raise UsageError(f"compare: --{given[0]} goes with GPUs, and neither {first} nor {second} is one")
    sides = [_side(name, store, work) for name in (first, second)]
    found, apart = difference(*sides), different(*sides)
    if most is not None and found is None:
        raise UsageError("compare: --fail-if-slower compares two measured or two predicted schedules, not one of each")
    if most is not None and apart:
        raise UsageError(f"compare: --fail-if-slower compares schedules of one work; these differ in {listed(apart)}")
    slower = most is not None and found is not None and found.slower > most
    document = _document(sides, found, _changed(*sides)) | {"different": apart}
    if picture is not None:
        from flywheel.report.svg import standalone

        write_file(picture, standalone(drawn(sides)))
        announce_written(picture)
    if as_json:
        show_json({**document, "fail_if_slower": most, "failed": slower})
    else:
        _show(sides, found, document["changed"], apart)
    if slower:
        assert most is not None
        note(f"flywheel: B is more than {most * 100:g} % slower than A")
        ctx.exit(REJECTED)


def _side(name: str, store: str, work: dict[str, Any]) -> Side:
    """What a name stands for. Raises UnknownNameError where it stands for nothing."""
    from flywheel.cli.schedules import find_shipped_named
    from flywheel.report.sides import read_side
    from flywheel.store.schedule import shipped_schedules

    if _is_gpu(name, work):
        return _on_gpu(name.lower(), store, work)
    if Path(name).is_file():
        return read_side(name, read_json(Path(name)))
    tried: list[Callable[[], Side]] = [
        lambda: _campaign(name, store),
        lambda: read_side(name, parse_json(find_shipped_named(name).text())),
    ]
    if name in {each.stem for each in shipped_schedules()} and not _is_campaign(name, store):
        tried.reverse()  # a whole name goes before the beginning of another
    for resolve in tried:
        try:
            side = resolve()
        except UnknownNameError:
            continue
        return side
    raise UnknownNameError(
        f"compare: {name!r} is no file, no GPU, no campaign of {store} and no shipped schedule; flywheel campaigns "
        "and flywheel schedules list them"
    )


def _is_gpu(name: str, work: dict[str, Any]) -> bool:
    """Whether a name stands for a GPU; a file of that name goes first unless a model is given."""
    from flywheel.search.workload import gpus_of

    return gpus_of(name.lower())[1] in TARGETS and (work["model"] is not None or not Path(name).is_file())


def _is_campaign(name: str, store: str) -> bool:
    """Whether a campaign has exactly that name."""
    from flywheel.store.sql import open_store

    if "://" not in store and not Path(store).exists():
        return False
    with open_store(store, create=False) as opened:
        return opened.campaign(name) is not None


def _campaign(name: str, store: str) -> Side:
    from flywheel.measure.standing import best_of
    from flywheel.report.sides import read_side
    from flywheel.search.provenance import find_campaign, lower_command
    from flywheel.store.schedule import schedule_document
    from flywheel.store.sql import open_store

    if "://" not in store and not Path(store).exists():
        raise UnknownNameError(f"store {store}: does not exist")
    with open_store(store, create=False) as opened:
        campaign = find_campaign(opened, name)
        best = best_of(opened.trials(campaign.name))
    if best is None:
        raise UsageError(f"compare: campaign {campaign.name} has no trial with a latency")
    return read_side(campaign.name, schedule_document(best, command=lower_command(best)))


def _on_gpu(name: str, store: str, work: dict[str, Any]) -> Side:
    """The best that was measured of a work on a GPU. Raises UnknownNameError where nothing was."""
    from flywheel.measure.record import TrialRecord
    from flywheel.report.sides import read_side
    from flywheel.search.knowledge.known import best_known
    from flywheel.search.provenance import lower_command
    from flywheel.store.schedule import schedule_document
    from flywheel.store.sql import open_store

    if work["model"] is None:
        raise UsageError(f"compare: {name} is a GPU; --model says of which model")
    workload = _workload(name, work)
    if "://" not in store and not Path(store).exists():
        known = best_known(workload, None, tell=announce)
    else:
        with open_store(store, create=False) as opened:
            known = best_known(workload, opened, tell=announce)
    if known is None:
        asked = (getattr(workload, field) for field in ("model", "gpu", "dtype", "context", "batch", "stored"))
        raise UnknownNameError(f"compare: nothing was measured of {work_named(*asked)}; flywheel search predicts")
    if isinstance(known.origin, TrialRecord):
        return read_side(name, schedule_document(known.origin, command=lower_command(known.origin)))
    return read_side(name, parse_json(known.origin.text()))


def _workload(gpu: str, work: dict[str, Any]) -> Workload:
    from flywheel.cli.options import DEFAULTS
    from flywheel.models.catalog import resolve_model
    from flywheel.search.workload import default_context, make_workload

    usual = {"dtype": DEFAULTS["dtype"], "batch": 1, "context": default_context(resolve_model(work["model"]))}
    settled = {**usual, **{option: value for option, value in work.items() if value is not None}}
    return make_workload(gpu=gpu, **settled)


def _changed(first: Side, second: Side) -> dict[str, tuple[Value, Value]] | None:
    """The knobs that differ; None where the works have different spaces, or one has none here."""
    from flywheel.report.sides import different
    from flywheel.search.appraise import changes
    from flywheel.search.space import make_space
    from flywheel.search.workload import make_workload

    asked = first.schedule
    if different(first, second):
        return None
    try:
        work = make_workload(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, asked.weights)
    except FlywheelError:  # its checkpoint or its GPU is not on this machine
        return None
    return changes(make_space(work), first.config, second.config)


def _document(
    sides: list[Side], found: Difference | None, changed: dict[str, tuple[Value, Value]] | None
) -> dict[str, Any]:
    described = [
        {
            "name": side.name,
            **{key: getattr(side.schedule, key) for key in ("model", "gpu", "dtype", "weights", "context", "batch")},
            "config_id": side.schedule.config_id,
            "kind": "measured" if side.measured else "predicted",
            "latency_us": side.latency_us,
            "p10_us": side.low_us if side.measured else None,
            "p90_us": side.high_us if side.measured else None,
            "predicted_range_us": None if side.measured else [side.low_us, side.high_us],
            "tokens_per_s": side.tokens_per_s,
            **{key: side.origin.get(key) for key in _ORIGIN},
        }
        for side in sides
    ]
    compared = None if found is None else {"slower": found.slower, "low": found.low, "high": found.high,
                                           "sure": found.sure}  # fmt: skip
    return {"a": described[0], "b": described[1], "difference": compared, "changed": changed}


def _show(
    sides: list[Side], found: Difference | None, changed: dict[str, tuple[Value, Value]] | None, apart: list[str]
) -> None:
    headers = ("<", "<!schedule", "<work", "us a step", "p10", "p90", "tokens/s", "<", "?<GPU", "?<kernels", "?<date")
    rows = []
    for letter, side in zip("AB", sides, strict=True):
        times = [f"{time:,.1f}" for time in (side.low_us, side.high_us)] if side.measured else ["-", "-"]
        said = [str(side.origin.get(key) or "-") for key in ("gpu_name", "kernels", "created_at")]
        rows.append(
            (letter, side.name, side.work, side.took, *times, side.rate,
             "measured" if side.measured else "predicted", said[0], said[1], said[2][:10])
        )  # fmt: skip
    show_table(headers, rows)
    differing = [f"{name} {before} -> {after}" for name, (before, after) in (changed or {}).items()]
    more = f", and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    show(
        *pairs(
            [
                *((f"{letter} is", _range(side)) for letter, side in zip("AB", sides, strict=True)),
                ("works", f"not the same: they differ in {listed(apart)}" if apart else None),
                ("difference", _words(sides, found)),
                ("changed", None if changed is None else ", ".join(differing[:SHOWN]) + more or "nothing"),
            ]
        )
    )


def _range(side: Side) -> str | None:
    """How far a prediction may be off, and why; None for a measurement."""
    return None if side.band is None else f"predicted, {side.band.words(side.latency_us)}; {side.band.why}"


def _words(sides: list[Side], found: Difference | None) -> str:
    if found is None:
        return "none is said: one is measured, the other predicted"
    way = "longer" if found.slower > 0 else "less time"
    digits = 2 if sides[0].measured else 1
    share_in_words = f"{abs(found.slower) * 100:.{digits}f}"
    said = f"a step of B takes {share_in_words} % {way} than one of A"
    if float(share_in_words) == 0.0:
        said = "a step of B takes as long as one of A"
    if not sides[0].measured:
        sure = "more" if found.sure else "no more"
        return f"{said}, by predictions; that is {sure} than their errors may make"
    spread = f"{found.low * 100:+.2f} to {found.high * 100:+.2f} % from p10 to p90"
    noise = "beyond the spread of the samples" if found.sure else "within the spread of the samples"
    return f"{said} ({spread}), {noise}; two days or machines may differ by a few percent besides"
