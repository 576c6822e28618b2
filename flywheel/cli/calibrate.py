"""`flywheel calibrate`: fit the cost model's constants of a GPU to measurements."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.options import (
    OutputFile,
    SharedOption,
    check_writable,
    command,
    json_option,
    store_option,
    write_file,
)
from flywheel.cli.text import ABSENT, note, pairs, percent, show, show_json, show_table
from flywheel.cost_model import MODEL_VERSION
from flywheel.cost_model.calibration import constants
from flywheel.cost_model.machine import FREE
from flywheel.search.provenance import find_campaign

if TYPE_CHECKING:
    from flywheel.search.knowledge.calibrating import Calibrated, Selection

_BOUNDS: Final = {"read_gbs": "read_gbs at most {:,.0f}", "visibility_us": "visibility_us at least {:.2f}"}
_LINK: Final = "{one_way_us:.2f} us one way ({same_gpu_us:.2f} on one GPU), {gbs:,.0f} GB/s"
_MOST_JOBS: Final = 8


@command
@click.option("--gpu", cls=SharedOption, metavar="NAME", required=True, help="GPU of the measurements.")
@store_option
@click.option("--campaign", "campaigns", metavar="NAME", multiple=True,
              help="Use this campaign's measurements; repeatable.  [default: every campaign of the GPU]")
@click.option("--kernels", metavar="DIGEST", multiple=True,
              help="Also use trials of these kernels, which must be as fast as the newest trial's; repeatable.")
@click.option("--held-back", type=click.FloatRange(0.1, 0.9), default=0.5, show_default=True, metavar="SHARE",
              help="Share of each model's configs that only test the fit.")
@click.option("--only", type=click.Choice([each.name for each in FREE]), multiple=True, metavar="CONSTANT",
              help="Fit only this constant, as consumer.fp8_times; repeatable. The others, but for a probed link, "
                   "stay as flywheel ships them.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N",
              help=f"Processes that predict.  [default: one per processor, up to {_MOST_JOBS}]")
@click.option("-o", "--output", type=OutputFile(), default=Path("machine.json"), show_default=True,
              metavar="FILE", help="File for the constants, for --machine of other commands.")
@json_option
def calibrate(
    gpu: str,
    store: str,
    campaigns: tuple[str, ...],
    kernels: tuple[str, ...],
    held_back: float,
    only: tuple[str, ...],
    jobs: int | None,
    output: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Fit the cost model's constants for a GPU to campaigns' measurements, and show how well it predicts held-back
    configs.

    The rates of reading and of hand-offs come from flywheel doctor --probe. Only trials with the GPU, driver, compiler
    and kernels of the newest measured trial count. search, evaluate, lower and simulate take the result as --machine.
    """
    from flywheel.cost_model.calibration import dump_calibration
    from flywheel.search.knowledge.calibrating import calibrate as run_calibration
    from flywheel.search.knowledge.calibrating import select
    from flywheel.search.knowledge.pricing import open_pool
    from flywheel.store.sql import open_store

    check_writable(output)
    with open_store(store, create=False) as opened:
        campaigns = tuple(find_campaign(opened, name).name for name in campaigns)
        selection = select(opened, gpu, campaigns, kernels)
        gpu_name = selection.place["gpu_name"]
        ceiling = None if gpu_name is None else opened.ceiling(gpu_name)
        links = [] if gpu_name is None else opened.links(gpu_name)
    if ceiling is None:
        note(f"flywheel: no probe of {gpu_name} in the store bounds its read rate; flywheel doctor --probe adds one")
    with open_pool(jobs or min(os.cpu_count() or 1, _MOST_JOBS)) as pool:
        found = run_calibration(
            selection, ceiling, held_back, pool, lambda told: note(f"flywheel: {told}"), links, only
        )
    document = _document(selection, found, only, output)
    if as_json:
        show_json(document)
    else:
        _show(document)
    write_file(output, dump_calibration(found.calibration))


def _document(selection: Selection, found: Calibrated, only: tuple[str, ...], output: Path) -> dict[str, Any]:
    return {
        "gpu": selection.gpu,
        **selection.place,
        "path": str(output),
        "predictor": found.calibration.predictor.version,
        "before": MODEL_VERSION,
        "probed": dict(found.probed),
        "only": list(only),
        "other_kernels": list(selection.kernels),
        "campaigns": list(selection.campaigns),
        "elsewhere": selection.elsewhere,
        "imported": selection.imported,
        "few": dict(selection.few),
        "disturbed": [work.workload.model for work in selection.works if work.disturbed],
        "works": [asdict(work) for work in found.works],
        "machine": constants(found.calibration.machine),
    }


def _show(document: dict[str, Any]) -> None:
    works = document["works"]
    fitted, held = sum(work["fitted"] for work in works), sum(work["after"]["n"] for work in works)
    show(f"{document['gpu']}: fitted to {fitted} programs and compared with {held} that were held back")
    few = [f"{count} configs of {name}" for name, count in document["few"].items()]
    left_out = [
        *([f"{document['elsewhere']:,} rows of other GPUs, drivers or kernels"] if document["elsewhere"] else []),
        *([f"{', '.join(few)}: too few"] if few else []),
        *([f"{changed} programs that are lowered otherwise today"] if (changed := _changed(works)) else []),
    ]
    probed = document["probed"]
    measured = f"{document['gpu_name']}, driver {document['gpu_driver']}, NVRTC {document['nvrtc']}"
    show(
        *pairs(
            [
                ("measured", f"{measured}, kernels {', '.join([document['kernels'], *document['other_kernels']])}"),
                ("campaigns", ", ".join(document["campaigns"])),
                ("imported", f"{document['imported']:,} of these rows" if document["imported"] else None),
                ("fitted", ", ".join(document["only"]) or None),
                ("probed", ", ".join(_BOUNDS[name].format(value) for name, value in probed.items()) or None),
                ("link", _LINK.format(**link) if (link := document["machine"].get("link")) else None),
                ("disturbed", ", ".join(document["disturbed"]) or None),
                ("left out", "; ".join(left_out) or None),
                ("predictor", f"{document['predictor']} (not {document['before']})"),
                ("written", document["path"]),
            ]
        )
    )
    rows = [
        (
            f"{work['model']}, {work['dtype']}, context {work['context']}"
            + ("" if work["weights"] == work["dtype"] else f", {work['weights']} weights")
            + (f", batch {work['batch']}" if work["batch"] > 1 else ""),
            str(work["after"]["n"]),
            *(cell for when in ("before", "after") for cell in _cells(work[when])),
        )
        for work in works
    ]
    headers = ("<held back", "configs", "Spearman before", "median", "p90", "Spearman after", "median", "p90")
    show_table(headers, rows, indent="  ", gap=True)


def _changed(works: list[dict[str, Any]]) -> int:
    return sum(work["changed"] for work in works)


def _cells(score: dict[str, Any]) -> tuple[str, str, str]:
    spearman = score["spearman"]
    ranked = ABSENT if spearman is None else f"{spearman:.3f}"
    return ranked, percent(score["median_error"]), percent(score["p90_error"])
