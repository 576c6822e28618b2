"""`flywheel bench`: time the best known schedule and PyTorch's versions of the same step on this GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.bench_serve import START, bench_served, show_served
from flywheel.cli.chosen import Chosen, campaign_named, from_file, known, notes_of_works, store_here
from flywheel.cli.decoding import check_device, integers, open_model
from flywheel.cli.exits import REJECTED
from flywheel.cli.files import announce_notes, load_config
from flywheel.cli.options import (
    DEFAULTS,
    OutputFile,
    SharedOption,
    check_writable,
    command,
    json_option,
    ranks_option,
    store_option,
    weights_option,
    write_file,
)
from flywheel.cli.standings import bench_environment, draw, show_bench
from flywheel.cli.text import note, show_json
from flywheel.errors import (
    ConfigError,
    FlywheelError,
    GpuMemoryError,
    InvalidProgramError,
    UsageError,
)
from flywheel.ir import GpuTarget, MegakernelProgram
from flywheel.models.decoder import DTYPES
from flywheel.models.formats import WeightFormats, parse_formats, weights_name
from flywheel.rivals.lineup import Rival, TimingPlan, check_rivals, usual_rivals
from flywheel.store.schedule import Schedule
from flywheel.vm.gpu.nvml import attendant_of

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.source import Source
    from flywheel.measure.comparison import Comparison
    from flywheel.rivals.contestants import Contests
    from flywheel.rivals.ranked_contests import RankedContests
    from flywheel.search.workload import Workload
    from flywheel.store.campaign import Campaign
    from flywheel.vm.gpu.driver import Gpu
import shlex

from click.core import ParameterSource

from flywheel.rivals.lineup import RANK_RIVALS, RIVALS

KNOWN_RIVALS: Final = {**RIVALS, **RANK_RIVALS}
"""Rivals of single-GPU and of multi-GPU programs, by name."""


def rival_names(text: str) -> tuple[Rival, ...]:
    """The rivals that a text such as `cublas,compile` names, without repeats. Raises click.BadParameter for an unknown
    name."""
    names = list(dict.fromkeys(text.split(",")))
    unknown = next((name for name in names if name not in KNOWN_RIVALS), None)
    if unknown is not None:
        raise click.BadParameter(f"{unknown!r} is not one of {', '.join(KNOWN_RIVALS)}")
    return tuple(KNOWN_RIVALS[name] for name in names)


def spoken(ctx: click.Context) -> str:
    """The command line, with every option that was set on the command line or by the environment."""
    words = [ctx.command_path]
    for option in ctx.command.params:
        told = ctx.get_parameter_source(option.name or "")
        if told not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        value = ctx.params[option.name or ""]
        flag = next(flag for flag in option.opts if flag.startswith("--"))
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            parts = value if isinstance(value, tuple) else (value,)
            words += [flag, ",".join(part.name if isinstance(part, Rival) else str(part) for part in parts)]
    return shlex.join(words[0].split() + words[1:])


FORMAT: Final = "flywheel-bench"
FORMAT_VERSION: Final = 2
"""The number rises when an older reader would misread the document. An added field leaves it."""
SAMPLES: Final = 20
"""Samples of each contestant in a round."""


@dataclass(frozen=True, slots=True)
class BenchWork:
    """The workloads to compare: a model on a GPU, at contexts of at least 2, for batches. `name` is the model as the
    user gave it."""

    source: Source
    name: str
    target: GpuTarget
    dtype: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    weights: str | None = None
    ranks: int = 1

    def workloads(self) -> list[Workload]:
        """One workload for each batch at each context. Raises as `make_workload`."""
        from flywheel.search.workload import make_workload

        return [
            make_workload(self.name, self.target.name, self.dtype, context, batch, self.weights,
                          ranks=self.ranks)
            for context in self.contexts
            for batch in self.batches
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoweredWorkload:
    """A workload, and the program that its schedule lowers to."""

    workload: Workload
    program: MegakernelProgram
    origin: Mapping[str, Any]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class UnfitWorkload:
    """A workload that its schedule does not fit, and the reason."""

    context: int
    batch: int
    reason: str


@command
@click.option("--model", cls=SharedOption, metavar="NAME|DIR|REPO",
              help="Directory of a Hugging Face checkpoint, a repository of its Hub, or a model by name, with random "
                   "weights.")
@click.option("--against", type=rival_names, metavar="NAME,...",
              help=f"Rivals to time: {', '.join(KNOWN_RIVALS)}.  [default: cublas,compile; for quantised weights, "
                   "the rivals that multiply them; on several GPUs, the rivals that use NCCL]")
@click.option("--context", "contexts", cls=SharedOption, type=integers, metavar="TOKENS,...",
              help=f"Tokens that the step attends to.  [default: the schedule's, else {DEFAULTS['context']}]")
@click.option("--batch", "batches", type=integers, metavar="N,...",
              help="Sequences that one launch decodes; each number is timed.  [default: the schedule's, else 1]")
@click.option("--dtype", cls=SharedOption, metavar="bf16|f16|f32",
              help="Type of weights and activations.  [default: the schedule's, else the checkpoint's, else bf16]")
@weights_option
@ranks_option
@click.option("--gpu", cls=SharedOption, metavar="NAME", help="GPU to lower for.  [default: this machine's]")
@click.option("--config", "config_file", metavar="FILE|-",
              help="Exported schedule, or ScheduleConfig, lowered for every context and batch.  "
                   "[default: the store's best for each, else the shipped schedule]")
@click.option("--campaign", metavar="NAME",
              help="Time this campaign's best schedule and its model.  [default: without --model, the newest]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, metavar="N",
              help=f"Rounds of {SAMPLES} samples each; each round loads the schedule again.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, metavar="N",
              help="Seed of the tokens and, without a checkpoint, of the weights.")
@click.option("--serve", "served", is_flag=False, flag_value=START, metavar="[URL]",
              help="Time a server with OpenAI's API instead of the decode step; without a URL, start one.")
@click.option("--clients", type=integers, default="1,8", show_default=True, metavar="N,...",
              help="With --serve: clients that send requests at the same time.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, metavar="N",
              help="With --serve: requests for each number of clients.")
@click.option("--prompt-words", type=click.IntRange(1), default=64, show_default=True, metavar="N",
              help="With --serve: words of the longest prompt; --seed draws the lengths.")
@click.option("--max-tokens", type=click.IntRange(2), default=64, show_default=True, metavar="N",
              help="With --serve: tokens of each answer.")
@click.option("--device", type=click.Choice(["cuda", "reference"]), help="With --serve, no URL: the server's device.")
@click.option("--engines", metavar="NAME,...",
              help="With --serve and no URL: engines to time after flywheel's server: transformers (generate, static "
                   "cache, torch.compile), vllm (its server), or none.  [default: the installed ones]")
@click.option("--picture", type=OutputFile(), metavar="FILE.svg", help="Draw the times as bars.")
@click.option("-o", "--output", type=OutputFile(), metavar="FILE.json",
              help="Write the JSON document, with all samples.")
@store_option
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    model: str | None,
    against: tuple[Rival, ...] | None,
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...] | None,
    dtype: str | None,
    weights: str | None,
    ranks: int | None,
    gpu: str | None,
    config_file: str | None,
    campaign: str | None,
    rounds: int,
    seed: int,
    served: str | None,
    clients: tuple[int, ...],
    requests: int,
    prompt_words: int,
    max_tokens: int,
    device: str | None,
    engines: str | None,
    picture: Path | None,
    store: str,
    output: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Time the best known schedule alternately with CUDA-graphed PyTorch and torch.compile, on this machine's GPU.

    The command first measures how fast this GPU reads. It then compares the program's tensors, and the rivals' logits,
    with the eager oracle's. It times every contestant that passes, in rounds, and empties the L2 cache before each
    sample. Exit code 3 if any contestant has no time, or a schedule does not fit a context or batch.
    """
    _check(config_file, campaign, (output, picture))
    if served is not None:
        loads = bench_served(served, {**ctx.params, "store": store_here(ctx)})
        _give(ctx, loads, output, as_json, lambda: show_served(loads))
        ctx.exit(REJECTED if any(load["failed"] for load in loads["loads"]) else 0)
    check_device("cuda", ranks)
    given = None if config_file is None else load_config(config_file)
    asked: Schedule | Campaign | None = given if isinstance(given, Schedule) else None
    here = store_here(ctx)
    if campaign is not None or (model is None and given is None and here is not None):
        asked = campaign_named(store, campaign)
        campaign = asked.name
    work = _settle(asked, model, gpu, dtype, contexts, batches, weights, ranks)
    check_rivals(against or (), work.ranks)
    if given is not None:
        chosen = [from_file(workload, given, str(config_file)) for workload in work.workloads()]
    else:
        chosen = known(work.workloads(), here if campaign is None else store, campaign)
    notes = notes_of_works(work.workloads(), work.source, asked, seed, gpu=gpu, dtype=dtype, context=contexts)
    document, comparisons = _compete(work, chosen, against, TimingPlan(rounds, SAMPLES), seed, notes)
    _give(ctx, document, output, as_json, lambda: show_bench(document, comparisons))
    if picture is not None:
        write_file(picture, draw(document, comparisons))
    untimed = any(entry.latency is None for comparison in comparisons for entry in comparison.entries)
    if untimed or document["refused"]:
        ctx.exit(REJECTED)


def _give(
    ctx: click.Context, document: dict[str, Any], output: Path | None, as_json: bool, show: Callable[[], None]
) -> None:
    """Add the command line to the document, write it to `output` if given, and show it."""
    document["command"] = spoken(ctx)
    if output is not None:
        write_file(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if as_json:
        show_json(document)
    else:
        show()


def _check(config_file: str | None, campaign: str | None, files: Sequence[Path | None]) -> None:
    """Raises UsageError for options that no GPU can satisfy."""
    if config_file is not None and campaign is not None:
        raise UsageError("bench: --config and --campaign both name a schedule; give one")
    for path in files:
        if path is not None:
            check_writable(path)


def _settle(
    given: Schedule | Campaign | None,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...] | None,
    weights: str | None = None,
    ranks: int | None = None,
) -> BenchWork:
    """The work to compare. An option decides, else the schedule or campaign, else the default.

    Raises UsageError, NoGpuError, and what looking up the names raises.
    """
    from flywheel.search.workload import default_context, gpus_of

    name = model if model is not None or given is None else given.model
    if name is None:
        raise UsageError("bench: no model; give --model, or an exported schedule with --config")
    asked = contexts or ((DEFAULTS["context"] if given is None else given.context),)
    sequences = batches or ((DEFAULTS["batch"] if given is None else given.batch),)
    short = next((context for context in asked if context < 2), None)
    if short is not None:
        raise UsageError(f"bench: --context {short} is not at least 2: a token must attend to another one")
    source = open_model("bench", name)
    if contexts is None and given is None:
        asked = (default_context(source.spec),)
    settled = dtype or (None if given is None else given.dtype) or source.dtype or DEFAULTS["dtype"]
    if weights is None and given is not None and given.weights != given.dtype:
        weights = given.weights
    if weights is None and source.scheme is not None and settled in DTYPES:
        weights = source.formats(DTYPES[settled]).name(settled)
    sizes = tuple(dict.fromkeys(asked)), tuple(dict.fromkeys(sequences))
    asked_gpu = gpu or (None if given is None else given.gpu)
    count = ranks or (1 if asked_gpu is None else gpus_of(asked_gpu)[0])
    return BenchWork(source, name, _target(gpu), settled, *sizes, weights_name(weights, settled), count)


def _target(gpu: str | None) -> GpuTarget:
    """The target named `gpu`; for None, this machine's GPU. Raises UnknownNameError, NoGpuError."""
    from flywheel.measure.device import Device
    from flywheel.search.trials.device import target_here
    from flywheel.search.workload import find_target, gpus_of
    from flywheel.vm.gpu.driver import open_gpu

    if gpu is not None:
        return find_target(gpus_of(gpu)[1])
    here = open_gpu()
    return target_here(Device(here.name, here.num_sms, here.total_bytes))


def _lower(chosen: Sequence[Chosen]) -> tuple[list[LoweredWorkload], list[UnfitWorkload]]:
    """(programs of the schedules that fit their workloads, schedules that do not fit, as far as that is known without a
    GPU)."""
    from flywheel.decode.notes import Note
    from flywheel.lowering.lower import lower
    from flywheel.plan import is_another, program_id
    from flywheel.vm.pack import pack_any

    lowered, refused = [], []
    for each in chosen:
        workload, origin = each.workload, each.origin
        try:
            program = lower(workload.graph, each.config, workload.target)
            pack_any(program)
        except (ConfigError, InvalidProgramError) as error:
            refused.append(_refuse(workload, error))
            continue
        made = program_id(program)
        notes = each.notes
        if is_another(origin.get("program_id"), made):
            told = "this version lowers the config to a program that was not measured"
            notes += (Note("another-program", f"{_work(workload)}: {told}"),)
        lowered.append(LoweredWorkload(workload, program, {**origin, "program_id": made}, notes))
    return lowered, refused


def _refuse(workload: Workload, error: FlywheelError) -> UnfitWorkload:
    """A refusal for the table, which is also shown at once."""
    note(f"flywheel: rejected: {_work(workload)}: {error}")
    return UnfitWorkload(workload.context, workload.batch, str(error))


def _work(workload: Workload) -> str:
    return f"context {workload.context}, batch {workload.batch}"


def _compete(
    work: BenchWork, chosen: Sequence[Chosen], rivals: Sequence[Rival] | None, plan: TimingPlan, seed: int,
    notes: tuple[Note, ...],
) -> tuple[dict[str, Any], list[Comparison]]:  # fmt: skip
    """The document, without the command line, and its comparisons. Ends the command with REJECTED if there are none.
    `rivals` None means the usual rivals of the weights. Raises as `probe` and `Contests`, except where a program does
    not fit."""
    from flywheel.decode.cuda import prepare_torch
    from flywheel.measure.comparison import comparison_document, single_of
    from flywheel.search.workload import with_ranks
    from flywheel.vm.gpu.driver import open_gpus
    from flywheel.vm.gpu.probes import probe

    lowered, refused = _lower(chosen)
    announce_notes(notes := (*notes, *(told for each in lowered for told in each.notes)))
    if not lowered:
        raise click.exceptions.Exit(REJECTED)
    prepare_torch()
    gpu, *peers = open_gpus(work.ranks)
    (quiet := attendant_of([each.pci_bus_id for each in (gpu, *peers)])).attend()
    _say(f"probing {gpu.name}")
    probed = probe(gpu)
    formats = parse_formats(work.weights or work.dtype, work.dtype)
    rivals = usual_rivals(formats, work.ranks) if rivals is None else rivals
    contests = _contests([gpu, *peers], work, seed, formats)
    comparisons, origins = [], []
    for each in lowered:
        of = each.workload
        quiet.attend()
        try:
            held = contests.hold(each.program, of.context, rivals, probed.read_gbs, plan, of.batch)
        except (ConfigError, InvalidProgramError, GpuMemoryError) as error:
            refused.append(_refuse(of, error))
            continue
        comparisons.append(held)
        origins.append(dict(each.origin))
    if not comparisons:
        raise click.exceptions.Exit(REJECTED)
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": work.name,
        "gpu": with_ranks(work.target.name, work.ranks),
        "dtype": work.dtype,
        "weights": work.weights,
        "random_weights": work.source.stored is None,
        "seed": seed,
        "notes": [asdict(each) for each in notes],
        **asdict(plan),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": bench_environment(gpu, work.ranks),
        "ceiling": {**asdict(probed), "datasheet_gbs": work.target.hbm_bandwidth_gbs},
        "comparisons": [
            {**comparison_document(comparison, single_of(comparison, comparisons)), "schedule": origin}
            for comparison, origin in zip(comparisons, origins, strict=True)
        ],
        "refused": [asdict(each) for each in refused],
    }
    return document, comparisons


def _contests(gpus: Sequence[Gpu], work: BenchWork, seed: int, formats: WeightFormats) -> Contests | RankedContests:
    given = work.source, DTYPES[work.dtype], seed, _say, formats
    if len(gpus) > 1:
        from flywheel.rivals.ranked_contests import RankedContests

        return RankedContests(gpus, *given)
    from flywheel.rivals.contestants import Contests

    return Contests(gpus[0], *given)


def _say(line: str) -> None:
    note(f"flywheel: {line}")
