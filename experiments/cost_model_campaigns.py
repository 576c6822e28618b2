"""Compares the shipped cost model's predictions with campaigns measured on an H200.

    python experiments/cost_model_campaigns.py [results/gpu/calibration.tsv ...]

By default it reads results/gpu/calibration.tsv, to part of which shipped constants were fitted. Scores are of the
configs that `flywheel calibrate --held-back 0.6` holds back. They are also split, since most configs of a search are
neighbours of its best ones. The replay counts the trials that `--prefilter` would have left unmeasured, of the same
trials in the same order. A search with it would have proposed other trials.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.cost_model.calibrate import score
from flywheel.errors import ConfigError
from flywheel.ir import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.search.knowledge.calibrating import Config, split
from flywheel.search.workload import make_workload

RECORDED = Path(__file__).parents[1] / "results" / "gpu" / "calibration.tsv"
HELD_BACK = 0.6
LEAST = 8
"""Configs that a score is given of."""
TOGETHER = {
    f"gemv.{name}_proj.N_tile": knob
    for knob, names in (("rows.qkv", "qkv"), ("rows.gate_up", ("gate", "up")))
    for name in names
}
FACTORS = (1.02, 1.05, 1.1, 1.2)


def knobs(config: str) -> dict[str, Any]:
    """Its fields, those of tilings by name."""
    fields = json.loads(config)
    tiling = fields.pop("tiling")
    return fields | {f"{name}.{key}": value for name, part in tiling.items() for key, value in part.items()}


def apart(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Knobs that differ; projections that one knob moves count once."""
    names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return len({TOGETHER.get(name, name) for name in names})


def main() -> None:
    """Print scores and replays of each piece of work."""
    csv.field_size_limit(sys.maxsize)
    sys.stdout.write(
        f"version {MODEL_VERSION} of the cost model. The constants of quantised products were fitted to no config\n"
        "that is held back, all others to four of llama3-8b with int4 weights, which a search proposed and older\n"
        "kernels ran.\n"
        "Which mechanisms it has was decided with measured configs in sight, held back or not.\n"
    )
    works = defaultdict[tuple[str, str, int], list[dict[str, str]]](list)
    for path in map(Path, sys.argv[1:] or [RECORDED]):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if row["source"] in ("search", "seed") and row["outcome"] == "measured":
                    works[row["model"], row.get("weights") or "", int(row["context"])].append(row)
    for work, rows in sorted(works.items()):
        report(*work, rows)


def report(model: str, weights: str, context: int, rows: Sequence[dict[str, str]]) -> None:
    """Print what there is to say of a model at a context."""
    work = make_workload(model, "h200", "bf16", context, 1, weights or None)
    predicted = {}
    for row in rows:
        with suppress(ConfigError):  # says what no schedule can say any more
            program = lower(work.graph, config_from_dict(json.loads(row["config"])), work.target)
            predicted[row["config_id"]] = predict(program).latency_us
    rows = [row for row in rows if row["config_id"] in predicted]
    measured = {row["config_id"]: float(row["latency_us"]) for row in rows}
    configs = [Config(row["config"], row["config_id"], None, measured[row["config_id"]]) for row in rows]
    fitted, kept = ({config.config_id for config in part} for part in split(configs, HELD_BACK))
    by_id = {row["config_id"]: knobs(row["config"]) for row in rows}
    drawn = {row["config_id"] for row in rows if row["sampler"] == "random"}
    far = {name for name in kept if min(apart(by_id[name], by_id[other]) for other in fitted) > 1}
    best = min(measured.values())
    parts = {
        "held back": kept,
        "of these, of the search": kept - drawn,
        "of these, within 10 % of the best": {name for name in kept if measured[name] <= 1.1 * best},
        "of these, drawn at random": kept & drawn,
        "of these, at most twice the best": {name for name in kept & drawn if measured[name] <= 2 * best},
        "two knobs or more from every fitted one": far,
    }
    kernels = ", ".join(sorted({row["kernels"] for row in rows}))
    sys.stdout.write(f"{model},{f' {weights} weights,' * bool(weights)} context {context} (kernels {kernels})\n")
    for label, part in parts.items():
        names = sorted(part)
        if len(names) < LEAST:
            continue
        found = score([predicted[name] for name in names], [measured[name] for name in names])
        sys.stdout.write(
            f"  {label:<42}{found.n:>5} configs, Spearman {found.spearman or 0.0:.3f}, error: median "
            f"{found.median_error:.1%}, 90th percentile {found.p90_error:.1%}\n"
        )
    for campaign in sorted({row["campaign"] for row in rows}):
        replay([row for row in rows if row["campaign"] == campaign], predicted, measured)


def replay(rows: Sequence[dict[str, str]], predicted: dict[str, float], measured: dict[str, float]) -> None:
    """Print what `--prefilter` would have left unmeasured of a campaign's trials."""
    best = min(measured[row["config_id"]] for row in rows)
    for factor in FACTORS:
        incumbent, saved = rows[0]["config_id"], 0
        for row in rows[1:]:
            name = row["config_id"]
            if predicted[name] > factor * predicted[incumbent]:
                saved += 1
            elif measured[name] < measured[incumbent]:
                incumbent = name
        sys.stdout.write(
            f"  {rows[0]['sampler']}, --prefilter {factor}: {saved} of {len(rows)} measurements saved, best "
            f"{measured[incumbent]:,.1f} us instead of {best:,.1f}\n"
        )


if __name__ == "__main__":
    main()
