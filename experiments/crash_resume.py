"""Kills the coordinator of a campaign by SIGKILL again and again.

    python experiments/crash_resume.py [--kills 50] [--postgresql | --store URL]

Each campaign has a SQLite file of its own, or a database of a PostgreSQL server that the script starts.

Every run of the campaign is a process. It is killed at a random moment: after a random number of rows that it reports,
and a random part of a trial later. Some runs die before the campaign exists. The last one finishes. After each kill the
script reads the rows. No reported row may be gone or changed, and numbers have no gap.

The proposals of a resumed campaign depend on its seed, its rows and the places where it was resumed. So the killed
campaign is compared with a replay that was stopped cleanly at the same numbers of rows. Both must have tried the same
configs and found the same best. A grid tries every config in any case, so it is also compared with an undisturbed
campaign. Exits with 1 if anything is lost, repeated or different.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep

from flywheel.errors import StoreError
from flywheel.measure.record import TrialRecord
from flywheel.search.run import run_search
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.workload import make_workload
from flywheel.store.sql import open_store

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""One small layer: a trial is so short that many kills fall on its row's way into the store."""
GPU, CONTEXT = "l4", 32
SEARCHED = ("depth", "chunk", "threads", "smem", "placement")
"""Knobs of a grid, as many of them as make enough trials; the others are pinned to their first known good values."""
ROWS_A_RUN = 3
FORK = multiprocessing.get_context("fork")  # a coordinator that need not import everything again


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of a campaign under fire. `stops` are the numbers of rows at each kill."""

    rows: list[TrialRecord]
    stops: list[int]
    unborn: int
    unreported: int
    lost: int
    repeated: int


def grid(model: str, trials: int) -> tuple[dict[str, str], int]:
    """Pins that leave a space of at least so many configurations, and its size."""
    space = make_space(make_workload(model, GPU, "bf16", CONTEXT))
    sizes = {dimension.name: len(dimension.values) for dimension in space.dimensions}
    count = next(n for n in range(len(SEARCHED) + 1) if prod(sizes[name] for name in SEARCHED[:n]) >= trials)
    free = SEARCHED[:count]
    pins = {name: str(value) for name, value in space.known_good()[0].items() if name not in free}
    return pins, prod(sizes[name] for name in free)


def rows_of(url: str, name: str) -> list[TrialRecord]:
    """The campaign's rows; none where there is no store yet."""
    try:
        with open_store(url, create=False) as store:
            return store.trials(name)
    except StoreError as error:
        if "does not exist" in str(error) or "is not a flywheel store" in str(error):
            return []
        raise


def coordinate(spec: CampaignSpec, url: str, reader: Connection, reports: Connection) -> None:
    """One run of the campaign, which reports each row once it is in the store."""
    reader.close()  # so that it cannot outlive whoever reads
    run_search(spec, url, watch=lambda progress: reports.send(progress.record))


def run(spec: CampaignSpec, url: str) -> None:
    """One run of the campaign, left alone."""
    process = FORK.Process(target=run_search, args=(spec, url))
    process.start()
    process.join()
    assert process.exitcode == 0


def run_and_kill(spec: CampaignSpec, url: str, wanted: int, delay_s: float) -> list[TrialRecord]:
    """Kill a run `delay_s` after its `wanted`th report; what it had reported by then."""
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=coordinate, args=(spec, url, reader, writer))
    process.start()
    writer.close()
    reported = []
    while len(reported) < wanted:
        reported.append(reader.recv())
    sleep(delay_s)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with suppress(EOFError, OSError):  # the end, or a report that was cut
        while reader.poll():
            reported.append(reader.recv())
    return reported


def kill_again_and_again(spec: CampaignSpec, url: str, kills: int, seed: int, start_s: float, trial_s: float) -> Killed:
    """Run a campaign to its end through so many kills."""
    chance, name = random.Random(seed), str(spec.name)
    before: list[TrialRecord] = []
    stops, unborn, unreported, lost, repeated = [], 0, 0, 0, 0
    for _ in range(kills):
        room = spec.trials - len(before) - 2 * ROWS_A_RUN
        wanted = max(0, min(chance.randint(not before, 2 * ROWS_A_RUN), room)) if stops else 0
        delay_s = chance.uniform(0, trial_s if wanted else 2 * start_s)
        reported = run_and_kill(spec, url, wanted, delay_s)
        rows = rows_of(url, name)
        unborn += not rows
        expected = before + reported
        lost += sum(row not in rows for row in expected) + sum(row.trial != n for n, row in enumerate(rows))
        unreported += len(rows) - len(expected)
        repeated += len(rows) - len({row.trial for row in rows})
        before = rows
        stops.append(len(rows))
    run(spec, url)
    rows = rows_of(url, name)
    lost += sum(row not in rows for row in before)
    repeated += len(rows) - len({row.trial for row in rows})
    if spec.sampler == "grid":
        repeated += len(rows) - len({row.config_id for row in rows})
    return Killed(rows, stops, unborn, unreported, lost, repeated)


def replay(spec: CampaignSpec, url: str, stops: list[int]) -> list[TrialRecord]:
    """Rows of a campaign that is stopped cleanly at each of those numbers of rows, and resumed."""
    for trials, _ in groupby([stop for stop in stops if stop]):
        run(replace(spec, trials=trials), url)
    run(spec, url)
    return rows_of(url, str(spec.name))


def best_us(rows: list[TrialRecord]) -> float:
    """Lowest objective."""
    return min(row.objective_us for row in rows if row.objective_us is not None)


def tried(rows: list[TrialRecord]) -> list[tuple[str, str, float | None]]:
    """What makes two campaigns the same."""
    return [(row.config_id, row.outcome, row.objective_us) for row in rows]


def judge(spec: CampaignSpec, url: str, kills: int, seed: int, folder: Path) -> bool:
    """Print one line about one campaign; whether all is well."""
    calm = str(folder / "undisturbed.db")
    run(replace(spec, trials=spec.trials // 2), calm)
    reader, writer = FORK.Pipe(duplex=False)
    stamps = [perf_counter()]
    rest = FORK.Process(target=coordinate, args=(spec, calm, reader, writer))
    rest.start()
    writer.close()
    for _ in range(spec.trials - spec.trials // 2):
        reader.recv()
        stamps.append(perf_counter())
    rest.join()
    undisturbed = rows_of(calm, str(spec.name))
    trial_s = statistics.median(later - earlier for earlier, later in pairwise(stamps[1:]))
    killed = kill_again_and_again(spec, url, kills, seed, stamps[1] - stamps[0], trial_s)
    same = replay(spec, str(folder / "replayed.db"), killed.stops)
    fine = tried(same) == tried(killed.rows) and not killed.lost and not killed.repeated and len(killed.stops) == kills
    fine = fine and [row.trial for row in killed.rows] == list(range(spec.trials))
    if spec.sampler == "grid":
        fine = fine and best_us(killed.rows) == best_us(undisturbed)
    kind = url.partition(":")[0].partition("+")[0]
    print(
        f"{kind:<12}{spec.sampler:<8}{spec.jobs:>4}{len(killed.stops):>7}{killed.unborn:>8}{killed.unreported:>12}"
        f"{len(killed.rows):>6}{killed.lost:>6}{killed.repeated:>10}{best_us(killed.rows):>11.3f}{best_us(same):>11.3f}"
        f"{best_us(undisturbed):>13.3f}  {'ok' if fine else 'WRONG'}",
        flush=True,
    )
    return fine


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", help="URL of an empty database  [default: a SQLite file of its own for each campaign]"
    )
    parser.add_argument("--postgresql", action="store_true", help="a server of the script's own; needs its binaries")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samplers", default="tpe,grid")
    parser.add_argument("--jobs", default="1,2")
    arguments = parser.parse_args()
    with server() if arguments.postgresql else nullcontext(arguments.store) as url:
        return 0 if judge_all(arguments, url) else 1


@contextmanager
def server() -> Iterator[str]:
    """URL of a database of a server that is there until the end."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from postgres_server import MISSING, Server, find_binaries

    binaries = find_binaries()
    if binaries is None:
        sys.exit(MISSING)
    with Server(binaries) as running:
        yield running.create_database()


def judge_all(arguments: argparse.Namespace, store: str | None) -> bool:
    """Print the table; whether all is well. Without a store each campaign has a file."""
    # Of a killed pool's semaphores, which Python itself sweeps up.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    print(
        f"llama of one layer on {GPU}, predicted; kill -9 of the coordinator at random moments, seed {arguments.seed}"
    )
    print(
        f"{'store':<12}{'sampler':<8}{'jobs':>4}{'kills':>7}{'unborn':>8}{'unreported':>12}{'rows':>6}{'lost':>6}"
        f"{'repeated':>10}{'best, us':>11}{'replayed':>11}{'undisturbed':>13}",
        flush=True,
    )
    fine = True
    for sampler in arguments.samplers.split(","):
        for jobs in map(int, arguments.jobs.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                model = Path(folder) / "small.json"
                model.write_text(json.dumps(MODEL))
                pins, trials = grid(str(model), (ROWS_A_RUN + 1) * arguments.kills)
                spec = CampaignSpec(
                    str(model), GPU, context=CONTEXT, measure="predict", sampler=sampler, seed=arguments.seed,
                    jobs=jobs, trials=trials, fix=pins if sampler == "grid" else {}, warm=False,
                    name=f"{sampler}-{jobs}",
                )  # fmt: skip
                url = store or f"sqlite:///{folder}/killed.db"
                fine = judge(spec, url, arguments.kills, arguments.seed, Path(folder)) and fine
    return fine


if __name__ == "__main__":
    sys.exit(main())
