"""Does Kernel Tuner accept the output of `flywheel export --format t4`? Two halves, in two environments:

    python experiments/t4_roundtrip.py write FOLDER        # flywheel's
    python experiments/t4_roundtrip.py read FOLDER         # one with: pip install kernel_tuner autotuning_methodology

`write` makes two files of one small exhaustive search. In `predicted.json` every latency is the cost model's.
`outcomes.json` has the same numbers as if they had been measured, and made-up failures of every kind, so that one file
has each kind of result. `read` validates both against the schema that Kernel Tuner ships, loads them with its authors'
T4 reader (Kernel Tuner itself writes T4 and has no reader), and lets Kernel Tuner search each in its simulation mode,
from a cache that holds only the T4 file's data.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL, GPU = "smollm2-135m", "l4"
FREE = ("depth", "placement", "fuse.out")
FAILURES = ("rejected", "incorrect", "implausible", "timed_out", "crashed")


def write(folder: Path) -> None:
    """Search, and write both files."""
    from flywheel.interop.t4 import dump_t4, to_t4
    from flywheel.search.run import run_search
    from flywheel.search.space import make_space
    from flywheel.search.spec import CampaignSpec
    from flywheel.search.workload import make_workload
    from flywheel.store.sql import open_store

    good = make_space(make_workload(MODEL, GPU, "bf16", 512)).known_good()[1]
    fixed = {name: str(value) for name, value in good.items() if name not in FREE}
    spec = CampaignSpec(MODEL, GPU, measure="predict", sampler="grid", trials=10_000, fix=fixed, name="all")
    url = str(folder / "store.db")
    run_search(spec, url)
    with open_store(url, create=False) as store:
        rows = store.trials("all")
    (folder / "predicted.json").write_text(dump_t4(to_t4(rows, measured=False)), encoding="utf-8")
    made_up = []
    for row in rows:
        failure = FAILURES[row.trial // 10 % len(FAILURES)] if row.trial % 10 == 9 else None
        us = None if failure else row.predicted_us
        blank = replace(row, predicted_us=None, predictor=None, floor_fraction=None, outcome=failure or "measured",
                        latency_us=us, p10_us=us, p90_us=us, samples=None if failure else 1)  # fmt: skip
        made_up.append(replace(blank, reason="made up" if failure else None))
    (folder / "outcomes.json").write_text(dump_t4(to_t4(made_up, measured=True)), encoding="utf-8")


def read(folder: Path) -> None:
    """Print what Kernel Tuner makes of both files."""
    for package in ("kernel_tuner", "autotuning_methodology"):
        print(f"{package} {version(package)}")
    print(f"{'file':<16}{'results':>9}{'valid':>7}{'schema':>8}{'read as valid':>15}{'best ms':>9}{'simulated ms':>14}")
    for path in (folder / "predicted.json", folder / "outcomes.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        results = document["results"]
        objective = results[0]["objectives"][0]
        valid = [result for result in results if result["invalidity"] == "correct"]
        best = min(value(result, objective) for result in valid)
        validate(document)
        readable, smallest = load(path, objective)
        assert (readable, smallest) == (len(valid), best)
        assert simulate(folder / f"{path.stem}_cache.json", document, objective) == best
        print(f"{path.name:<16}{len(results):>9}{len(valid):>7}{'valid':>8}{readable:>15}{smallest:>9.4f}{best:>14.4f}")
        for kind in sorted({result["invalidity"] for result in results} - {"correct"}):
            print(f"    {kind}: {sum(result['invalidity'] == kind for result in results)}")


def value(result: dict[str, Any], name: str) -> Any:
    """The measurement of that name."""
    return next(found["value"] for found in result["measurements"] if found["name"] == name)


def validate(document: dict[str, Any]) -> None:
    """Raises unless the file has the form that Kernel Tuner's own schemas ask for."""
    import jsonschema
    from kernel_tuner import file_utils

    for target in ("results", "metadata"):
        expected, schema = file_utils.output_file_schema(target)
        jsonschema.validate(document, schema)
        assert document["schema_version"] == expected


def load(path: Path, objective: str) -> tuple[int, float]:
    """Valid results and the best of them, by the reader of Kernel Tuner's authors."""
    from autotuning_methodology.searchspace_statistics import SearchspaceStatistics

    times = ["compilation", "validation", "benchmark", "search_algorithm"]
    found = SearchspaceStatistics("decode", GPU, True, times, [objective], path)
    return len(found.objective_performances_total_sorted), float(found.total_performance_minimum())


def simulate(cache: Path, document: dict[str, Any], objective: str) -> float:
    """The best that Kernel Tuner finds in the file by brute force, in its simulation mode."""
    from kernel_tuner import tune_cache

    results = document["results"]
    names = list(results[0]["configuration"])
    entries = {}
    for result in results:
        times = result["times"]
        entries[",".join(str(result["configuration"][name]) for name in names)] = {
            **result["configuration"],
            objective: value(result, objective),
            "times": times["runtimes"],
            "compile_time": times["compilation"],
            "verification_time": times["validation"],
            "benchmark_time": times["benchmark"],
            "strategy_time": times["search_algorithm"],
            "framework_time": 0,
            "timestamp": result["timestamp"],
        }
    values = {name: sorted({result["configuration"][name] for result in results}) for name in names}
    header = {"device_name": GPU, "kernel_name": "decode", "problem_size": 1, "tune_params_keys": names,
              "tune_params": values, "objective": objective}  # fmt: skip
    cache.write_text(json.dumps({**header, "cache": entries}, indent=0), encoding="utf-8")
    searched, _ = tune_cache(str(cache), strategy="brute_force", objective=objective,
                             objective_higher_is_better=False, quiet=True)  # fmt: skip
    return min(found[objective] for found in searched if isinstance(found[objective], float))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
