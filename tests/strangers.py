"""What the command does with files of strangers, and what it may do with them.

`Strangers(folder).run(target, seed)` changes a good file, gives it to the commands that read it, in this process, and
returns what is wrong with what they did; nothing, where all is well. The same seed does the same.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import process_time
from types import FrameType
from typing import Any, Final

from chat_templates import Renderers, template
from click.testing import CliRunner, Result
from mutations import ODD, mutate_bytes, mutated_csv, mutated_json, mutated_table
from patience import HANG_S
from stores_that_compute import TRAPS, spring
from strange_files import options_file, safetensors_file, sizes_of, tokenizer_file
from tokenizer_directories import by_flywheel, by_transformers, differences, directory

from flywheel.cli.main import cli
from flywheel.cli.text import MAX_COMPLAINT, MAX_LINE

CODES: Final = frozenset({0, 1, 2, 3, 4, 5})
LIMIT_S: Final = 20.0
"""What a command may take of a processor."""
LIMIT_BYTES: Final = 1 << 30
"""What a command may add to the memory of this process at its largest."""

CONFIG: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0,
    "torch_dtype": "float32",
}  # fmt: skip
GPU: Final = ("--gpu", "l4")
WORK: Final = (*GPU, "--context", "32", "--dtype", "f32")
SEARCH: Final = ("--measure", "predict", "--engine", "local", "--jobs", "1", "--trials", "3")

TARGETS: Final = (
    "program", "config", "schedule", "campaign", "options", "machine", "table", "foreign", "model", "safetensors",
    "tokenizer", "directory", "template", "store", "sizes", "traps",
)  # fmt: skip
"""Kinds of files. `sizes` are those of models and their tiles; `traps` are stores that compute."""
NEEDS: Final[Mapping[str, Sequence[str]]] = {
    "safetensors": ("torch", "safetensors"),
    "tokenizer": ("torch", "safetensors", "tokenizers"),
    "directory": ("torch", "safetensors", "tokenizers", "jinja2", "transformers"),
    "template": ("tokenizers", "jinja2", "transformers"),
}
"""Packages without which a kind is read by nobody; the store wants nothing but SQLite, the reports nothing."""


class TooSlowError(Exception):
    """A command took LIMIT_S of a processor, or HANG_S."""


class Strangers:
    """Good files in a folder, and the commands that read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        self.has_weights = all(find_spec(name) for name in NEEDS["safetensors"])
        if self.has_weights:
            _save_weights(self.model)
        self.work = ("--model", str(self.model), *WORK)
        self._do("lower", *self.work, "-o", self.folder / "program.json")
        self._do("search", *self.work, *SEARCH, "--name", "good", "--store", self.folder / "good.db")
        self._do("search", *self.work, *SEARCH, "--name", "other", "--store", self.folder / "good.db")
        with closing(sqlite3.connect(self.folder / "good.db")) as source:
            source.execute("VACUUM INTO ?", (str(self.folder / "one.db"),))  # with what is in its log
        export = ("export", "--campaign", "good", "--store", self.folder / "good.db")
        self._do(*export, "--format", "tsv", "-o", self.folder / "table.tsv")
        self._do(*export, "--format", "csv", "-o", self.folder / "table.csv")
        self._do(*export, "--format", "schedule", "-o", self.folder / "schedule.json")
        self.program = json.loads((self.folder / "program.json").read_text())
        self.schedule = json.loads((self.folder / "schedule.json").read_text())
        self.table = (self.folder / "table.tsv").read_text()
        self.csv = (self.folder / "table.csv").read_text()

    def _do(self, *words: object) -> None:
        result = CliRunner().invoke(cli, [str(word) for word in words])
        assert result.exit_code == 0, result.output

    def run(self, target: str, seed: int) -> tuple[list[str], list[int | str]]:
        """(what is wrong, the exit codes of the commands)."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        wrong, codes = [], []
        before = Path.cwd()
        os.chdir(place)
        try:
            commands: Callable[[Random], Iterator[Sequence[object]]] = getattr(self, f"_{target}")
            for words in commands(Random(f"{target}:{seed}")):
                if isinstance(words, str):  # what is wrong, found without a command
                    wrong.append(f"{target} {seed}: {words}")
                    continue
                line = " ".join(str(word) for word in words)
                result, told = watched([str(word) for word in words])
                codes.append(result.exit_code if result is not None else "slow")
                wrong += [f"{target} {seed}: flywheel {line[:120]}: {each}" for each in told]
            wrong += [f"{target} {seed}: left {name}" for name in draft_names(place)]
        finally:
            os.chdir(before)
        return wrong, codes

    def _program(self, random: Random) -> Iterator[Sequence[object]]:
        Path("p.json").write_bytes(mutated_json(self.program, random))
        yield "validate", "p.json"
        yield "inspect", "p.json"
        yield "diff", self.folder / "program.json", "p.json"
        yield "simulate", "p.json", "--orders", "1", "--trace", "out.json"
        if self.has_weights and random.random() < 0.2:
            yield "verify", "p.json", "--model", self.model, "--positions", "3"

    def _config(self, random: Random) -> Iterator[Sequence[object]]:
        Path("c.json").write_bytes(mutated_json(self.schedule["config"], random))
        yield "lower", *self.work, "--config", "c.json", "-o", "out.json"
        shutil.copy(self.folder / "one.db", "s.db")
        yield "evaluate", *self.work, "--config", "c.json", "--measure", "predict", "--store", "s.db"

    def _schedule(self, random: Random) -> Iterator[Sequence[object]]:
        Path("s.json").write_bytes(mutated_json(self.schedule, random))
        yield "lower", "--config", "s.json", "-o", "out.json"
        yield "import", "s.json", "--name", "x", "--measure", "predict", "--store", "s.db"

    def _campaign(self, random: Random) -> Iterator[Sequence[object]]:
        good = {"sampler": "random", "seed": 3, "until": 0.9, "patience": 2, "fix": {}}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in good.items()]
        if random.random() < 0.5:
            name, odd = random.choice([*good, "name"]), json.dumps(random.choice(ODD))
            lines[random.randrange(len(lines))] = f"{name} = {odd}\n"
            Path("c.toml").write_text("".join(lines))
        else:
            Path("c.toml").write_bytes(mutate_bytes("".join(lines).encode(), random))
        yield "search", "--options", "c.toml", *self.work, *SEARCH, "--time", "2s", "--store", "s.db", "--name", "x"

    def _options(self, random: Random) -> Iterator[Sequence[object]]:
        Path("c.toml").write_bytes(options_file(str(self.model), random))
        here = ("--measure", "predict", "--jobs", "1", "--time", "2s")
        yield "search", "--options", "c.toml", *here, "--store", "s.db"

    def _machine(self, random: Random) -> Iterator[Sequence[object]]:
        from flywheel.cost_model import machine_for
        from flywheel.cost_model.calibration import Calibration, dump_calibration
        from flywheel.ir import TARGETS

        good = json.loads(dump_calibration(Calibration(machine_for(TARGETS["l4"]), {"rows": 1})))
        Path("m.json").write_bytes(signed(mutated_json(good, random)))
        yield "simulate", self.folder / "program.json", "--machine", "m.json", "--orders", "0"

    def _table(self, random: Random) -> Iterator[Sequence[object]]:
        if random.random() < 0.5:
            Path("table").write_bytes(mutated_table(self.table, random))
        else:
            Path("table").write_bytes(mutated_csv(self.csv, random))
        yield "import", "table", "--name", "x", "--store", "s.db"
        if Path("s.db").exists():
            yield from self._read("s.db", "x")

    def _foreign(self, random: Random) -> Iterator[Sequence[object]]:
        config = json.dumps(self.schedule["config"])
        text = f"correctness\tmodel\tgpu\tlatency_us\tschedule\nPASS\tm\tg\t1.5\t{config}\nFAIL\tm\tg\t2\t{config}\n"
        Path("t.tsv").write_bytes(mutated_table(text, random))
        yield "import", "t.tsv", "--name", "x", *self.work, "--measure", "predict", "--store", "s.db"

    def _model(self, random: Random) -> Iterator[Sequence[object]]:
        Path("config.json").write_bytes(mutated_json(CONFIG, random))
        yield "lower", "--model", "config.json", *WORK, "-o", "out.json"

    def _sizes(self, random: Random) -> Iterator[Sequence[object]]:
        config, schedule = sizes_of(CONFIG, random)
        Path("config.json").write_text(json.dumps(config))
        Path("c.json").write_text(json.dumps(schedule))
        yield "lower", "--model", "config.json", *GPU, "--any-size", "--config", "c.json", "-o", "/dev/null"

    def _traps(self, random: Random) -> Iterator[Sequence[object]]:
        shutil.copy(self.folder / "one.db", "s.db")
        if random.random() < 0.5:
            with closing(sqlite3.connect("s.db")) as connection:
                change_cells(connection, random)
        for trap in random.sample(TRAPS, random.choice((1, 1, 2))):
            with suppress(sqlite3.Error):  # of two, the second may find its tables gone
                spring(Path("s.db"), trap)
        yield from self._read("s.db", "good")
        yield "search", *self.work, *SEARCH, "--name", "good", "--store", "s.db"

    def _safetensors(self, random: Random) -> Iterator[Sequence[object]]:
        raw = (self.model / "model.safetensors").read_bytes()
        if random.random() < 0.8:
            self._checkpoint(safetensors_file(raw, random))
        else:
            self._checkpoint(self._broken(raw, random))
        yield "generate", "--model", ".", *WORK, "--prompt-ids", "1,2", "--max-tokens", "1"

    def _broken(self, raw: bytes, random: Random) -> bytes:
        """A checkpoint whose header may be none."""
        (length,) = struct.unpack("<Q", raw[:8])
        header = mutated_json(json.loads(raw[8 : 8 + length]), random)
        size = len(header) if random.random() < 0.9 else random.choice((0, 2**63, len(raw), 2**40))
        return struct.pack("<Q", size) + header + raw[8 + length :]

    def _tokenizer(self, random: Random) -> Iterator[Sequence[object]]:
        self._checkpoint((self.model / "model.safetensors").read_bytes())
        known = random.random() < 0.3
        Path("tokenizer.json").write_bytes(mutated_json(_tokenizer(), random) if known else tokenizer_file(random))
        yield "generate", "--model", ".", *WORK, "--prompt", "ab cab", "--max-tokens", "2"

    def _directory(self, random: Random) -> Iterator[Sequence[object]]:
        case = directory(random.randrange(2**32))
        case.write(Path.cwd())
        found = differences(by_flywheel(Path.cwd()), by_transformers(Path.cwd()))
        if found is not None:
            yield f"{case.name}: {found}"
        if random.random() < 0.2:
            self._checkpoint((self.model / "model.safetensors").read_bytes())
            chat = random.choice(((), ("--chat",)))
            yield "generate", "--model", ".", *WORK, "--prompt", "!", *chat, "--max-tokens", "2"

    def _template(self, random: Random) -> Iterator[Sequence[object]]:
        text = template(random.randrange(2**32))
        found = self.renderers.differ(text)
        if found is not None:
            yield f"{text[:200]!r}: {found[:400]}"

    @cached_property
    def renderers(self) -> Renderers:
        """What writes conversations by templates."""
        return Renderers(self.folder)

    def _checkpoint(self, weights: bytes) -> None:
        shutil.copy(self.model / "config.json", "config.json")
        Path("model.safetensors").write_bytes(weights)

    def _store(self, random: Random) -> Iterator[Sequence[object]]:
        shutil.copy(self.folder / "one.db", "s.db")
        if random.random() < 0.2:
            Path("s.db").write_bytes(mutate_bytes(Path("s.db").read_bytes(), random))
        else:
            with closing(sqlite3.connect("s.db")) as connection:
                change_cells(connection, random)
        yield from self._read("s.db", "good")
        yield "search", *self.work, *SEARCH, "--name", "good", "--store", "s.db"

    def _read(self, store: str, name: str) -> Iterator[Sequence[object]]:
        yield "campaigns", "--store", store
        yield "campaigns", name, "--store", store
        yield "export", "--format", "tsv", "--store", store
        for form in ("schedule", "program", "t4"):
            yield "export", "--format", form, "--campaign", name, "--store", store, "-o", f"out.{form}"
        yield "report", name, "--output", "out.html", "--store", store


def draft_names(folder: Path) -> list[str]:
    """Files that a command began and did not end."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def change_cells(connection: sqlite3.Connection, random: Random) -> None:
    """One to three cells of a store, whatever its constraints say."""
    connection.execute("PRAGMA foreign_keys=OFF")
    good = json.loads(connection.execute("SELECT spec FROM campaigns").fetchone()[0])
    for _ in range(random.randint(1, 3)):
        table = random.choice(("trials", "trials", "trials", "campaigns", "schema_version"))
        column = random.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        odd = random.choice((*ODD, b"\xff\x00", b"blob"))
        if isinstance(odd, list | dict) or (isinstance(odd, int) and abs(odd) >= 2**63):
            odd = json.dumps(odd)
        if isinstance(odd, str):
            odd = odd.encode("utf-8", "surrogatepass") if "\udcff" in odd else odd
        if column == "spec" and random.random() < 0.7:
            odd = mutated_json(good, random).decode(errors="replace")
        try:
            connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid % 2 = 1', (odd,))
        except sqlite3.IntegrityError:
            continue
    connection.commit()


def signed(raw: bytes) -> bytes:
    """A machine file whose version is that of its constants, where they make one: what is behind that is read, too."""
    from flywheel.cost_model.calibration import Calibration, _machine
    from flywheel.errors import FlywheelError

    try:
        document = json.loads(raw)
        document["predictor"] = Calibration(_machine(document["machine"], ""), {}).predictor.version
    except (ValueError, TypeError, KeyError, RecursionError, FlywheelError):
        return raw
    return json.dumps(document).encode()


@contextmanager
def limited() -> Iterator[None]:
    """Raises TooSlowError in here after LIMIT_S of a processor, and after HANG_S."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)


def watched(words: Sequence[str]) -> tuple[Result | None, list[str]]:
    """The result of a command, None where it was too slow, and what is wrong with it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = process_time()
    try:
        with limited():
            result = CliRunner().invoke(cli, list(words))
    except TooSlowError:
        return None, [f"took {LIMIT_S:g} s"]
    if isinstance(result.exception, TooSlowError) or process_time() - began >= LIMIT_S:
        return None, [f"took {LIMIT_S:g} s"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return result, [*judge(result), *([f"took {grown / 1e9:.1f} GB more"] if grown > LIMIT_BYTES else [])]


def judge(result: Result) -> list[str]:
    """What is wrong with how a command ended."""
    wrong = []
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        wrong.append(f"{type(result.exception).__name__}: {str(result.exception)[:200]}")
    if result.exit_code not in CODES:
        wrong.append(f"exit code {result.exit_code}")
    complaints = [line for line in result.stderr.splitlines() if line.startswith("flywheel: ")]
    silent = not (wrong or complaints or result.stdout.strip()) and result.exit_code
    wrong += ["exit code without a word"] if silent else []
    wrong += ["internal error"] if "internal error" in result.stderr else []
    wrong += ["a traceback"] if "Traceback (most recent" in result.output else []
    wrong += ["a complaint too long"] if any(len(line) > 5 * MAX_COMPLAINT for line in complaints) else []
    wrong += ["a line too long"] if any(len(line) > 5 * MAX_LINE for line in result.stderr.splitlines()) else []
    tame = result.stderr.replace("\n", "")
    wrong += [] if tame.isprintable() else ["stderr that cannot be printed"]
    if Path("out.json").exists() and result.exit_code == 0:
        json.loads(Path("out.json").read_text())
    return wrong


def _save_weights(folder: Path) -> None:
    from safetensors.torch import save_file

    from flywheel.models.hf import load_spec
    from flywheel.models.weights import random_weights

    import torch  # isort: skip

    save_file(random_weights(load_spec(folder), 3, torch.float32), folder / "model.safetensors")


def _tokenizer() -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [" ", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document
