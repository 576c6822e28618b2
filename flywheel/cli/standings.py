"""How `flywheel bench` shows its results: the environment, tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from flywheel.cli.text import ABSENT, pairs, percent, show, show_table, size, us
from flywheel.rivals.lineup import dequantises, label_of

if TYPE_CHECKING:
    from flywheel.measure.comparison import Comparison, Entry
    from flywheel.vm.gpu.driver import Gpu


def bench_environment(gpu: Gpu, ranks: int = 1) -> dict[str, Any]:
    """Versions of everything that took part in the measurement.

    `cuda_driver` is the newest CUDA that the driver supports, `cuda_torch` the one that torch was built with.
    """
    from flywheel.measure.environment import capture_environment
    from flywheel.rivals.contestants import TORCH_CUDA
    from flywheel.vm.gpu.nvrtc import nvrtc_version
    from flywheel.vm.gpu.sources import kernels_id

    name = gpu.name if ranks == 1 else f"{ranks} x {gpu.name}"
    here = replace(capture_environment(), gpu=name, nvrtc=nvrtc_version(), kernels=kernels_id())
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {**asdict(here), "cuda_driver": gpu.cuda_version, "cuda_torch": TORCH_CUDA, "triton": triton}


def draw(document: Mapping[str, Any], comparisons: Sequence[Comparison]) -> str:
    """The picture as the text of a file."""
    from flywheel.report.bars import bars
    from flywheel.report.svg import standalone

    whole = None if _quantised(document) is None else document["dtype"]
    return standalone(bars(_work(document), comparisons, whole))


def _quantised(document: Mapping[str, Any]) -> str | None:
    """The format of quantised weights; None where the weights have the dtype."""
    weights: str | None = document.get("weights")
    return None if weights == document["dtype"] else weights


def _work(document: Mapping[str, Any]) -> str:
    own = _quantised(document)
    types = document["dtype"] if own is None else f"{own} weights, {document['dtype']}"
    return f"{document['model']} on {document['environment']['gpu']}, {types}"


def show_bench(document: Mapping[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Show the environment, then a table for each context.

    The document is that of the comparisons, which are ordered by context.
    """
    environment, ceiling = document["environment"], document["ceiling"]
    show(f"{_work(document)}: us a step, in {document['rounds']} rounds of {document['samples']} samples")
    versions = [("driver", environment["driver"]), ("NVRTC", environment["nvrtc"]), ("torch", environment["torch"]),
                ("triton", environment["triton"]), ("CUDA", environment["cuda_torch"])]  # fmt: skip
    share = percent(ceiling["read_gbs"] / ceiling["datasheet_gbs"])
    show(*pairs([
        ("versions", ", ".join(f"{name} {found}" for name, found in versions if found)),
        ("commit", environment["commit"]),
        ("read ceiling", f"{ceiling['read_gbs']:,.0f} GB/s with {ceiling['read_kernel']}, measured in this run; "
                         f"{share} of the datasheet's {ceiling['datasheet_gbs']:,.0f}"),
        ("weights", f"random, of seed {document['seed']}" if document["random_weights"] else "the checkpoint's"),
        *dict.fromkeys((label_of(entry.name), _how(entry, document)) for each in comparisons for entry in each.entries),
    ]))  # fmt: skip
    described = list(zip(comparisons, document["comparisons"], strict=True))
    for _, group in groupby(described, key=lambda each: each[0].context):
        together = list(group)
        _show_context([comparison for comparison, _ in together], [each["schedule"] for _, each in together])
    for each in document["refused"]:
        show("", f"context {each['context']:,}, batch {each['batch']} is not compared: {each['reason']}")


def _how(entry: Entry, document: Mapping[str, Any]) -> str:
    whole = _quantised(document) is not None and dequantises(entry.name)
    return f"{entry.how}, {document['dtype']} over the dequantised weights" if whole else entry.how


def _show_context(comparisons: Sequence[Comparison], origins: Sequence[Mapping[str, Any]]) -> None:
    """Show one table, with a set of rows for each batch."""
    from flywheel.measure.comparison import reason_of, single_of

    show("")
    for comparison, origin in zip(comparisons, origins, strict=True):
        found = origin.get("file") or f"{origin['title']} of {origin['campaign']}"
        found += ", imported" if origin.get("imported_from") else ""
        show(f"context {comparison.context:,}, batch {comparison.batch}: {size(comparison.weight_bytes)} of "
             f"weights and {size(comparison.cache_bytes)} of caches read a step; the weights alone need "
             f"{us(comparison.ceiling_us)} at the read ceiling, {us(comparison.floor_us)} at "
             f"the datasheet's bandwidth; schedule {origin['config_id']}, {found}")  # fmt: skip
        if any(entry.strangers for entry in comparison.entries):
            show("others computed on the GPU meanwhile: these times are doubtful")
    names = [entry.name for entry in comparisons[0].entries]
    headers = ["batch", "<name", "median us", "p10", "p90", "back to back", "GB/s", "of floor", "of ceiling",
               *(f"x {label_of(name).partition(',')[0]}" for name in names[1:]), "/ batch 1", "<verdict"]  # fmt: skip
    rows = [
        _row(comparison, entry, names[1:], single_of(comparison, comparisons))
        for comparison in comparisons
        for entry in comparison.entries
    ]
    show_table(headers, rows, indent="  ")
    for comparison in comparisons:
        for entry in comparison.entries:
            if entry.latency is None:
                who = f"{label_of(entry.name)}, batch {comparison.batch},"
                show(f"  {who} is not timed: {reason_of(entry.outcome)}")


def _row(comparison: Comparison, entry: Entry, rivals: Sequence[str], single: Comparison | None) -> list[str]:
    from flywheel.measure.comparison import standing
    from flywheel.measure.outcome import outcome_name

    found, batch = standing(comparison, entry, single), str(comparison.batch)
    if found is None or entry.verdict is None:
        return [batch, label_of(entry.name), *([ABSENT] * (8 + len(rivals))), outcome_name(entry.outcome)]
    latency = found.latency
    times = (latency.median_us, latency.p10_us, latency.p90_us, latency.batch_us)
    against = (found.speedups.get(name) for name in rivals)
    return [
        batch,
        label_of(entry.name),
        *(ABSENT if time is None else f"{time:,.1f}" for time in times),
        f"{found.read_gbs:,.0f}",
        percent(found.floor_fraction),
        percent(found.ceiling_fraction),
        *(ABSENT if factor is None else f"{factor:.2f}" for factor in against),
        ABSENT if found.over_single is None else f"{found.over_single:.2f}",
        f"pass ({entry.verdict.error:.2g})",
    ]
