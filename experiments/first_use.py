"""Lets everything fail that an installation's first use needs: `python experiments/first_use.py [--rounds N]`.

Each round begins with an empty or a warm cache of compiled code, and lets one fault happen:

- The script cuts, empties or exchanges files of the cache, flips their bits or writes garbage into them.
- It kills (-9) or stops a command that compiles.
- Two commands compile at once.
- The disk is full, where this machine lets the script mount a file system.
- The home is nowhere.

Then the script makes the same predictions as before. It expects exit code 0, the same latencies, and besides progress
only lines of flywheel's own.
Prints a line a round. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEARCH = ("--model", "smollm2-135m", "--gpu", "h100", "--measure", "predict", "--cold", "--trials", "6", "--jsonl")
COMPILE_S = 30.0
"""About what compiling takes here: kills and stops fall into it."""
HANG_S = 600.0
EXPECTED = ("Known: ", "compiling", "trial", "Latencies", "smollm2-135m", "is stopped", "waits for another",
            "is not kept", "has not answered")  # fmt: skip
"""What lines on stderr may say."""

Fault = Callable[["Place"], None]


class Place:
    """A cache, and commands that use it."""

    def __init__(self, folder: Path, warm: Path | None, chance: random.Random) -> None:
        self.folder, self.cache, self.chance = folder, folder / "cache", chance
        self.settings = {"NUMBA_CACHE_DIR": str(self.cache)}
        self.started: list[subprocess.Popen[str]] = []
        if warm is not None:
            shutil.copytree(warm, self.cache)

    def start(self, name: str) -> subprocess.Popen[str]:
        """A search on two processes, with a store of its own."""
        words = [sys.executable, "-m", "flywheel", "search", *SEARCH, "--jobs", self.chance.choice("12")]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **self.settings}
        with (self.folder / f"{name}.err").open("w") as complaints:
            process = subprocess.Popen(
                [*words, "--store", str(self.folder / f"{name}.db")], env=environ, text=True, stderr=complaints,
                stdout=subprocess.PIPE, process_group=0,
            )  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def latencies(self, name: str, process: subprocess.Popen[str]) -> tuple[list[Any], list[str]]:
        """(its latencies, what is wrong)."""
        try:
            said, _ = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [], ["hangs"]
        lines = (self.folder / f"{name}.err").read_text().splitlines()
        wrong = [line for line in lines if line and not any(part in line for part in EXPECTED)]
        if process.returncode:
            return [], [f"exit code {process.returncode}: {wrong[-3:]}"]
        events = [json.loads(line) for line in said.splitlines()]
        return [[each["config_id"], each["predicted_us"]] for each in events if each["event"] == "trial"], wrong[-3:]


def damage(change: Callable[[random.Random, bytes], bytes], place: Place) -> None:
    files = sorted(place.cache.rglob("*.code"))
    for file in place.chance.sample(files, place.chance.randint(1, len(files))):
        file.write_bytes(change(place.chance, file.read_bytes()))


def flip(chance: random.Random, raw: bytes) -> bytes:
    at = chance.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << chance.randrange(8))]) + raw[at + 1 :]


def exchange(place: Place) -> None:
    files = sorted(place.cache.rglob("*.code"))
    contents = [file.read_bytes() for file in files]
    place.chance.shuffle(contents)
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)


def strike(number: int, place: Place) -> None:
    """A command gets a signal while it compiles. One that is stopped stays so until the others have ended."""
    process = place.start("struck")
    sleep(place.chance.uniform(0.5, COMPILE_S))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def together(place: Place) -> None:
    place.start("beside")
    sleep(place.chance.uniform(0.0, 3.0))


def full_disk(place: Place) -> None:
    place.cache.mkdir()
    size = place.chance.choice((8, 64, 512))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place.cache)], check=True)


def nowhere(place: Place) -> None:
    home = place.chance.choice(("/dev/null", "/proc/none"))
    place.settings = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator", "HOME": home, "XDG_CACHE_HOME": home}


WARM: dict[str, Fault] = {
    "cut": partial(damage, lambda chance, raw: raw[: chance.randrange(len(raw))]),
    "emptied": partial(damage, lambda chance, raw: b""),
    "a bit": partial(damage, flip),
    "garbage": partial(damage, lambda chance, raw: chance.randbytes(chance.randrange(2 * len(raw)))),
    "exchanged": exchange,
}
COLD: dict[str, Fault] = {
    "kill -9": partial(strike, signal.SIGKILL),
    "two at once": together,
    "nowhere": nowhere,
    "disk full": full_disk,
    "stopped": partial(strike, signal.SIGSTOP),
}


def play(name: str, fault: Fault, warm: Path | None, wanted: list[Any], chance: random.Random) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        place, begun = Place(Path(folder), warm, chance), monotonic()
        try:
            fault(place)
            found, wrong = place.latencies("after", place.start("after"))
            if found != wanted and not wrong:
                wrong = [f"other latencies: {found[:2]}"]
        except subprocess.CalledProcessError:
            found, wrong = wanted, []
            name = f"{name} (no mount)"
        finally:
            place.end()
            subprocess.run(["umount", "-q", str(place.cache)], check=False, stderr=subprocess.DEVNULL)
    print(f"{name:<14}{monotonic() - begun:>8.1f} s  {'; '.join(wrong) or 'ok'}", flush=True)
    return not wrong


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of each fault  [default: 4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults with one of these words, with commas")
    arguments = parser.parse_args()
    chance, fine = random.Random(arguments.seed), True
    print(f"predicted searches of smollm2-135m; rounds {arguments.rounds}, seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        first = Place(Path(folder), None, chance)
        wanted, wrong = first.latencies("first", first.start("first"))
        if wrong or not wanted:
            sys.exit(f"the first search fails: {wrong}")
        for _ in range(arguments.rounds):
            for faults, warm in ((WARM, first.cache), (COLD, None)):
                for name, fault in faults.items():
                    if any(each in name for each in arguments.only.split(",")):
                        fine = play(name, fault, warm, wanted, chance) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
