"""`flywheel search`: run or resume a campaign."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.events import JsonLines, show_event
from flywheel.cli.exits import ABORTED, REJECTED
from flywheel.cli.files import announce_notes
from flywheel.cli.interrupt import Drain
from flywheel.cli.mlflow import CHILDREN, Beside, announce_mirror, tracking_option
from flywheel.cli.options import (
    DEFAULTS,
    NameOf,
    OutputFile,
    SharedOption,
    batch_option,
    check_writable,
    command,
    json_option,
    once,
    ranks_option,
    seconds,
    setting,
    store_option,
    workload_options,
    write_file,
)
from flywheel.cli.progress import make_reporter
from flywheel.cli.text import amount, note, show_json, us_a_token
from flywheel.cli.warming import announce_compiling
from flywheel.errors import UsageError
from flywheel.installing import install_line
from flywheel.measure.environment import list_gpus
from flywheel.models.catalog import fetch_model, resolve_model
from flywheel.process import keep_objects
from flywheel.search.spec import CampaignSpec, check_name, read_options_file
from flywheel.search.trials.device import default_gpu
from flywheel.search.trials.forks import expect_forks, jobs_of
from flywheel.search.workload import default_context, make_workload, with_ranks
from flywheel.store.campaign import work_named

if TYPE_CHECKING:
    from flywheel.measure.record import TrialRecord
    from flywheel.search.campaign import CampaignResult
    from flywheel.search.run import Start
    from flywheel.store.schedule import Shipped

SAMPLERS = ("descent", "local", "tpe", "gp", "cmaes", "random", "grid")

def _default(name: str, text: str) -> str:
    return f"{text}  [default: {DEFAULTS[name]}]"


@command
@workload_options
@batch_option
@ranks_option
@click.option(
    "--measure",
    cls=SharedOption,
    type=click.Choice(["auto", "predict", "cuda"]),
    help=_default("measure", "cuda measures on this machine's GPU; predict uses the cost model; auto takes cuda if "
                             "that is the GPU to schedule for, else predict."),
)
@click.option("--sampler", type=NameOf(SAMPLERS), help=_default("sampler", "What proposes a new campaign's schedules."))
@click.option("--seed", type=int, metavar="N", help=_default("seed", "Seed of a new campaign's sampler."))
@click.option("--trials", type=int, metavar="N",
              help=_default("trials", "Stop after N trials, those of earlier runs included."))
@click.option("--time", "time_s", type=seconds, metavar="DURATION", help="Stop this run after 90, 90s, 5m or 1h.")
@click.option("--until", type=float, metavar="FRACTION", help="Stop at this fraction of the weight floor: 0.95.")
@click.option("--patience", type=int, metavar="N", help="Stop after N trials without a new best.  "
              "[default: 60 for predictions without a budget]")  # fmt: skip
@click.option("--jobs", type=int, metavar="N",
              help="Local processes that predict.  [default: one per usable core, up to 16]")
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), help=_default("engine", "This machine, or a Ray cluster.")
)
@click.option("--ray-address", metavar="HOST:PORT", help="The cluster's head.  [default: a cluster on this machine]")
@click.option("--workers", type=int, metavar="N",
              help="GPUs that measure, or Ray processes that predict.  [default: all]")
@click.option("--seeds/--no-seeds", default=None, help="Try known good schedules first.  [default: seeds]")
@click.option(
    "--warm/--cold", default=None,
    help="Before those, try the store's best schedules for similar models and GPUs.  [default: warm]",
)
@click.option("--machine", metavar="FILE", help="Predict with the constants that flywheel calibrate wrote to FILE.")
@click.option("--prefilter", type=float, metavar="FACTOR",
              help="Do not measure a schedule whose predicted latency is over FACTOR times that of the best.")
@click.option("--fix", type=setting, callback=once, metavar="NAME=VALUE", multiple=True,
              help="Fix the value of a knob (see flywheel knobs); repeatable.")
@click.option("--name", metavar="NAME", help="Name of the campaign.  [default: derived from the workload]")
@click.option(
    "--options",
    "options_file",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Options from a file; the command line and the environment override it.",
)
@store_option
@click.option("--fresh", is_flag=True, help="Start a new campaign instead of resuming the one with this name.")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="Also write the best schedule, as flywheel export does; - is stdout.",
)
@click.option("--mlflow", "children", type=click.Choice(CHILDREN),
              help="Mirror the campaign in MLflow from a separate process. Trials that get a run of their own: all, "
                   "each new best (kept), or none.")
@tracking_option
@json_option
@click.option("--jsonl", is_flag=True, help="Print every event as a line of JSON on stdout, as it happens.")
@click.pass_context
def search(
    ctx: click.Context,
    /,
    ranks: int | None,
    options_file: Path | None,
    store: str,
    fresh: bool,
    output: Path | None,
    children: str | None,
    tracking_uri: str | None,
    as_json: bool,
    jsonl: bool,
    fix: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:  # fmt: skip
    """Search for the fastest schedule of a model's decode step on a GPU.

    Every trial goes to the store. Ctrl-C finishes the running trials and ends with exit code 130; the same command
    resumes. If the GPU is in this machine, each schedule is run, checked against an oracle and timed, one at a time. If
    not, a cost model predicts latencies.
    """
    file = read_options_file(options_file) if options_file is not None else {}
    if jobs_of(options["jobs"] or file.get("jobs")) > 1:
        expect_forks()
    spec = make_spec(file, _settle(file, options), dict(fix))
    spec = replace(spec, gpu=with_ranks(spec.gpu, ranks))
    from flywheel.search.run import run_search

    if output is not None:
        check_writable(output)
    announce_compiling(spec.engine)
    if children is not None:
        note(announce_mirror(store, tracking_uri))
    started: list[Start] = []
    mirrors: list[Beside] = []

    def announce(start: Start) -> None:
        started.append(start)
        note(*_beginning(start, asked=spec.measure))
        announce_notes(start.notes)
        if children is not None:
            mirrors.append(Beside(store, start.name, children, tracking_uri))
        reporter.start(start)

    chosen = JsonLines(make_reporter()) if jsonl else make_reporter()
    with chosen as reporter, Drain(reporter.drain, reporter.abort) as drain:
        result = run_search(
            spec, store, fresh=fresh, given=_given(file, options).keys(), announce=announce, watch=reporter.watch,
            interrupted=lambda: drain.requested,
        )  # fmt: skip
    for link, trouble in (mirror.said() for mirror in mirrors):
        if link is not None:
            note(f"In MLflow: {link}")
        if trouble is not None:
            note(f"flywheel: the mirror lags: {trouble}; flywheel mlflow sync adds what is missing")
    _present(started[0], result, store, output, "jsonl" if jsonl else "json" if as_json else "text")
    keep_objects()  # else the process spends 0.1 s at its end on looking at each
    ctx.exit(_exit_code(result, fresh))


def _present(start: Start, result: CampaignResult, store: str, output: Path | None, form: str) -> None:
    """Show how the search ended, on stdout, and write its answer where a file is asked for."""
    from flywheel.cli.searched import document, show_found

    match form:
        case "jsonl":
            show_event("end", document(start, result, store))
        case "json":
            show_json(document(start, result, store))
        case _:
            show_found(start, result, store, output)
    origin = result.best if result.answer is None else result.answer.origin
    if output is not None and origin is not None:
        write_file(output, _schedule(store, origin))


def _exit_code(result: CampaignResult, fresh: bool) -> int:
    """The exit code. Writes advice to stderr where there is some."""
    if result.stopped == "interrupted":
        command_line = "the same command without --fresh" if fresh else "the same command"
        note(f"flywheel: stopped cleanly after {amount(result.trials, 'trial')}; {command_line} resumes {result.name}")
        return ABORTED
    if result.stopped == "trials" and not result.new_trials:
        known = amount(result.trials, "trial")
        note(f"flywheel: the store has all {known}; a larger --trials continues, --fresh starts over")
    return 0 if result.best is not None else REJECTED


def _given(file: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What an options file, the environment and the command line say."""
    return {**file, **{name: value for name, value in options.items() if value is not None}}


def _settle(file: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, completed: the model by the name that stores use, downloaded if need be; else this machine's GPU,
    and a context that the model has.

    Raises as `fetch_model`, `resolve_model` and `default_gpu`.
    """
    given = _given(file, options)
    if "model" not in given:
        return options
    weights = given.get("measure") != "predict" and bool(list_gpus())
    model = fetch_model(given["model"], weights, lambda line: note(f"flywheel: {line}"))
    spec = resolve_model(model)
    gpu, context = given.get("gpu"), given.get("context")
    if gpu is None:
        gpu = default_gpu("search")
    if context is None:
        context = default_context(spec)
    return {**options, "model": model, "gpu": gpu, "context": context}


def make_spec(file: dict[str, Any], options: dict[str, Any], fix: dict[str, str]) -> CampaignSpec:
    """The campaign of the given options and, below them, an options file's. Pinned knobs are merged by name. Raises
    UsageError."""
    settings = _given(file, options)
    settings["fix"] = {**file.get("fix", {}), **fix}
    for name, where in (("model", "models"), ("gpu", "targets")):
        if name not in settings:
            raise UsageError(f"search: --{name} is missing, here and in an options file; see flywheel {where}")
    if settings.get("name") is not None:
        check_name("search", settings["name"])
    return CampaignSpec(**settings)


def _latency_source(start: Start, asked: str) -> str:
    """The line that says where this search's latencies come from, and why."""
    wanted, environment = start.spec.gpu, start.environment
    present = environment.gpu
    if start.spec.measure != "predict":
        return f"Latencies are measured on {present}, driver {environment.driver}, NVRTC {environment.nvrtc}."
    if asked == "predict":
        why = "--measure predict"
    elif present is None:
        why = f"no {wanted} here"
    else:
        why = f"{install_line('cuda', 'torch')} to measure on this machine's {present}"
    return f"Latencies are predicted by the cost model (version {start.predictor}): {why}."


def _beginning(start: Start, asked: str) -> Iterator[str]:
    """The lines that say where latencies come from, what was measured of this work before, and what this search
    learns from or whose schedules it tries first."""
    yield _latency_source(start, asked)
    yield _known(start)
    if start.lessons:
        yield f"Learns from {start.lessons:,} measurements of other works; --cold goes without."
    elif start.starts and not start.known:
        works = [work_named(warm.model, warm.gpu, warm.dtype, warm.context, 1, warm.weights) for warm in start.starts]
        yield f"Begins with the best schedules of {'; '.join(works)}, tried again here; --cold goes without."


def _known(start: Start) -> str:
    """What was measured of this work before; if nothing, the shipped schedule of the most similar work."""
    from flywheel.search.knowledge.shipped import nearest_shipped

    spec, known = start.spec, start.best_known
    if known is not None:
        took = us_a_token(known.latency_us, spec.batch)
        return f"Known: {took} by {known.words}, measured on {known.measured_on}."
    near = nearest_shipped(make_workload(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch, spec.weights))
    if near is None:
        return "Known: nothing was measured of this work, and nothing is shipped for this GPU."
    took = us_a_token(near.median_us, near.schedule.batch)
    return f"Known: nothing was measured of this work. The most similar shipped schedule: {near.stem}, {took}."


def _schedule(store: str, origin: TrialRecord | Shipped) -> str:
    from flywheel.search.provenance import origin_text
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        return origin_text(origin, opened)
