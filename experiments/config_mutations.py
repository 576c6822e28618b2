"""Compares flywheel with transformers on tiny random checkpoints whose configs are changed in a few keys.

    python experiments/config_mutations.py [--count 5000] [--seed 0] [--families llama,gemma2] [--record FILE]

Each config ends as equal, refused, or not built by transformers. One that ends different, or makes flywheel raise
something else, is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mutated_configs as mutated
import torch
from transformers.utils.logging import disable_progress_bar

from flywheel.models.families import FAMILIES


def main() -> int:
    """Compare, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    families = tuple(arguments.families.split(","))
    endings: Counter[tuple[str, str]] = Counter()
    wrong = []
    began = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for family, changes in islice(mutated.mutations(arguments.seed, families), arguments.count):
            try:
                found = mutated.compare(family, changes, Path(folder) / "checkpoint")
                ending, said = found.ending.value, found.said
            except mutated.FAULTS as error:  # of flywheel, to be printed with the config
                ending, said = "raised", f"{type(error).__name__}: {error}"
            endings[family, ending] += 1
            if ending in ("different", "raised"):
                wrong.append(f"{family} {json.dumps(changes, default=lambda _: 'ABSENT')}: {ending}, {said}"[:400])
                print(wrong[-1], flush=True)
    names = [each.value for each in mutated.Ending] + ["raised"]
    lines = [f"python experiments/config_mutations.py {' '.join(sys.argv[1:])}"]
    lines += [f"{arguments.count} configs in {perf_counter() - began:.0f} s", ""]
    lines.append(f"{'family':12}" + "".join(f"{name:>28}" for name in names))
    lines += [f"{family:12}" + "".join(f"{endings[family, name]:28}" for name in names) for family in families]
    print("\n".join(lines))
    if arguments.record is not None:
        arguments.record.write_text("\n".join([*lines, "", *wrong]).rstrip() + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
