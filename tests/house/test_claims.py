"""What README and docs say of commands, options, names, counts and limits is what the code has."""

from __future__ import annotations

import csv
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import click
import pytest

from flywheel import compiled
from flywheel.cli import text
from flywheel.cli.examples import EXAMPLES
from flywheel.cli.export import FORMATS
from flywheel.cli.main import COMMANDS, cli
from flywheel.cli.options import SharedOption
from flywheel.cli.search import SAMPLERS
from flywheel.cli.wording import OLD
from flywheel.decode import pieces, prefixes, prompts
from flywheel.ir import files
from flywheel.ir.validate import structure
from flywheel.judge import bench
from flywheel.lowering import lower
from flywheel.measure import tenants
from flywheel.models import hf, spec, tokenizer, tokenizer_files, tokenizing
from flywheel.models.decoder import DTYPES, MAX_BATCH
from flywheel.models.formats import CODES
from flywheel.runtime.sequences import MOST_LIKELY
from flywheel.search import finals
from flywheel.search import spec as campaigns
from flywheel.search.knowledge import lessons, pricing, warm
from flywheel.search.sampling import descending, descent, expectation, foreseen
from flywheel.search.space import make_space
from flywheel.search.trials import forks, measuring
from flywheel.search.workload import make_workload
from flywheel.serve import child, engine, fields, guard, openai, server
from flywheel.serve.worker import BEAT_S
from flywheel.store import names, vetting
from flywheel.store.schedule import shipped_schedules
from flywheel.vm import client
from flywheel.vm.client import Limits
from flywheel.vm.watching import PATIENCE

FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ASSIGNED = re.compile(r"^([A-Z_]+=\S+ )+")
BRACKETS = re.compile(r"[\[\]…]|\.\.\.")
OTHERS = {"--num-cpus", "--load-format", "--emulate-gpu"}
"""Options of ray, vLLM and pytest of which the docs speak."""

NUMBERS = {2: "two", 3: "three", 5: "five", 8: "eight", 12: "twelve"}
MIB = 2**20


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """A page with each run of blanks as one blank."""
    return re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))


def old_rows(root: Path) -> str:
    """The reference's table of old spellings."""
    _, head, behind = (root / "docs" / "reference.md").read_text(encoding="utf-8").partition("| command | old | now |")
    return head + behind.partition("\n\n")[0]


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words behind `flywheel` of each command line of a page's code, and of each span that is one."""
    written = page.read_text(encoding="utf-8")
    for block in FENCE.findall(written):
        for line in block.replace("\\\n", " ").splitlines():
            words = ASSIGNED.sub("", line.strip().removeprefix("$ ").partition(" > ")[0])
            if words.startswith("flywheel "):
                yield shlex.split(BRACKETS.sub("", words), comments=True)[1:]
    for span in SPAN.findall(FENCE.sub("", written)):
        words = ASSIGNED.sub("", re.sub(r"\s+", " ", span))
        first = words.partition(" ")[0]
        if words.startswith("flywheel ") or (first in COMMANDS and re.search(r" --?[a-z]", words)):
            yield shlex.split(BRACKETS.sub("", words.removeprefix("flywheel ")))


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command


def flags_of(command: click.Command) -> set[str]:
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"-h", "--help"}


def fault(words: list[str]) -> str | None:
    """What is wrong with a command: its name, a flag, or a value that is none of an option's. Words in capitals stand
    for any value."""
    name, *rest = words
    if name.startswith("--"):
        return None if name in {"--debug", "--version", "--help"} else f"no option {name}"
    if name not in COMMANDS:
        return f"no command {name}"
    command = command_of(name)
    told = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    unknown = [flag for flag in told if flag not in flags_of(command)]
    if unknown:
        return f"no option {unknown[0]}"
    if rest and rest[-1] in told:
        return None  # a phrase such as `bench --weights`, without a value
    given, _, _ = command.make_parser(click.Context(command)).parse_args(rest)
    for param in command.params:
        value = given.get(param.name or "")
        one_of = param.type.choices if isinstance(param.type, click.Choice) else (value,)
        if isinstance(value, str) and not value.isupper() and value not in one_of:
            return f"{param.opts[-1]} has no {value}"
    return None


@pytest.mark.parametrize("words", ["serch", "search --modle x", "export --format xml", "search --sampler best"])
def test_a_command_that_is_not_there_is_found(words: str) -> None:
    assert fault(words.split()) is not None


def test_every_command_of_a_page_and_of_help_is_one_that_flywheel_takes(root: Path) -> None:
    found = [(page.name, words) for page in pages(root) for words in commands_of(page)]
    found += [("help", shlex.split(step, comments=True)[1:]) for lines in EXAMPLES.values() for line in lines
              for step in line.split(" | ")]  # fmt: skip
    assert len(found) > 150
    assert [(page, *words, why) for page, words in found if (why := fault(words)) is not None] == []


def test_every_command_has_a_line_in_the_docs(root: Path) -> None:
    told = {words[0] for page in pages(root) for words in commands_of(page)}
    assert [name for name in COMMANDS if name not in told] == []


def test_every_option_of_a_page_is_one_of_some_command(root: Path) -> None:
    known = {flag for name in COMMANDS for flag in flags_of(command_of(name))} | OTHERS | {"--debug", "--version"}
    told = [
        (page.name, flag) for page in pages(root)
        for span in SPAN.findall(FENCE.sub("", page.read_text("utf-8").replace(old_rows(root), "")))
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    ]  # fmt: skip
    assert len(told) > 150
    assert [each for each in told if each[1] not in known] == []


def test_every_variable_of_the_reference_is_one_of_an_option(root: Path) -> None:
    known = {name for command in COMMANDS for option in command_of(command).params for name in option.envvar or ()}
    environment = (root / "docs" / "reference.md").read_text(encoding="utf-8").partition("## Environment")[2]
    environment = environment.partition("\n## ")[0]
    told = re.findall(r"`(FLYWHEEL_\w+)", environment)
    told += [f"FLYWHEEL{name}" for name in re.findall(r"`(_[A-Z]\w+)`", environment)]
    assert len(told) > 8
    assert [name for name in told if name not in known] == []


def test_a_variable_of_all_commands_is_read_by_all_but_the_exceptions_of_the_reference(root: Path) -> None:
    told = prose(root / "docs" / "reference.md").partition("## Environment")[2].partition(" set the option")[0]
    names = re.findall(r"`(?:FLYWHEEL)?(_[A-Z_]+)`", told)
    shared = {name.lower().replace("_", "-").replace("-", "--", 1) for name in names}
    own = {
        "serve": {"--model", "--gpu", "--dtype", "--context", "--device"},
        "bench": {"--device"}, "models": {"--gpu"}, "mpk": shared - {"--json"},
    }  # fmt: skip
    read = {
        (name, flag): isinstance(option, SharedOption)
        for name in COMMANDS for option in command_of(name).params for flag in option.opts if flag.startswith("--")
    }  # fmt: skip
    assert {flag for (_, flag), of_all in read.items() if of_all} == shared
    of_one = {(name, flag) for (name, flag), of_all in read.items() if flag in shared and not of_all}
    assert of_one == {(name, flag) for name, flags in own.items() for flag in flags if (name, flag) in read}


def test_the_reference_lists_every_old_spelling(root: Path) -> None:
    rows = old_rows(root).splitlines()[2:]
    told = [[re.findall(r"`(-?-?[a-z-]+)", cell) for cell in row.split("|")[1:4]] for row in rows]
    listed = {(name, old, now[0]) for names, olds, now in told for name in names for old in olds}
    assert listed == {(name, old, new) for name, flags in OLD.items() for old, new in flags.items()}


def test_pages_name_the_extras_and_the_python_of_the_distribution(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {name for page in pages(root) for names in re.findall(r"pip install '\.\[([\w,]+)\]'", prose(page))
             for name in names.split(",")}  # fmt: skip
    asked |= {name for page in pages(root) for name in re.findall(r"\bextra `(\w+)`", prose(page))}
    assert len(asked) > 5 and asked <= project["optional-dependencies"].keys()
    told = prose(root / "README.md")
    assert [
        name for name in project["optional-dependencies"] if not re.search(rf"`{name}`|[\[,]{name}[\],]", told)
    ] == []
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in told


@pytest.mark.parametrize(
    ("page", "names"),
    [("docs/search.md", SAMPLERS), ("docs/store.md", set(FORMATS) - {"program", "bundle"}),
     ("docs/weights.md", {*CODES, *DTYPES}), ("docs/bundle.md", {"bundle"})],
    ids=["samplers", "formats of exports", "formats of weights", "bundles"],
)  # fmt: skip
def test_a_page_has_every_name_of_its_kind(root: Path, page: str, names: set[str]) -> None:
    told = prose(root / page)
    assert [name for name in sorted(names) if f"`{name}`" not in told and f"--format {name}" not in told] == []


def counts() -> Iterator[tuple[str, str]]:
    """(page, a piece of its text) with counts of what is there."""
    work = make_workload("llama3-8b", "h200", "bf16", 512)
    sizes = [len(each.values) for each in make_space(work).dimensions]
    configurations = f"{prod(sizes):.1e}".replace("e+", "e")
    yield "README.md", f"{len(sizes)} knobs, {configurations} configurations for llama3-8b"
    shipped = Counter(each.schedule.gpu for each in shipped_schedules())
    yield "README.md", f"lists the {shipped.total()} that come with it"
    yield (
        "docs/search.md",
        (
            f"flywheel ships {shipped.total()} schedules, each for one workload: {shipped['h200']} on an H200, "
            f"{shipped['2xh200']} on two H200, {shipped['4xh200']} on four H200, {shipped['h100']} on an H100, "
            f"{shipped['2xh100']} on two H100."
        ),
    )
    yield "docs/store.md", f"A cell has at most {csv.field_size_limit():,} characters."
    most = NUMBERS[MAX_BATCH]
    yield "README.md", f"for one to {most} sequences"
    yield "docs/compare.md", f"a step for at most {most} sequences"
    yield "docs/search.md", f"decodes N sequences, 2 to {MAX_BATCH}, in lock-step"
    yield "docs/serve.md", f"decodes up to {most} requests together"


def numbers_of_searches() -> Iterator[str]:
    """Pieces of docs/search.md."""
    yield f"old ones included. {campaigns.DEFAULT_TRIALS} by default"
    yield f"a search that predicts ends after {campaigns.PREDICTED_PATIENCE} trials without an improvement"
    yield f"`local` proposes the first {descending.LED} trials"
    yield f"A fifth of the later descents begin at one of the first {NUMBERS[descent._FIRST]} schedules"
    yield f"Of the others, {descent._DETOURS:.0%} begin with a *detour*".replace("%", " %")
    yield f"one of the {descent._ENDS} best local optima"
    yield f"one for each usable core, at most {forks.MOST_JOBS}"
    yield f"The {NUMBERS[foreseen._FIRST]} of which most is expected are measured first"
    yield f"{expectation._WEIGHT:g} is expected at first"
    yield f"with its {lessons._EACH} best measurements, as far as they lose less than {100 * lessons._WITHIN:g} %"
    yield f"At most {NUMBERS[lessons._CAMPAIGNS]} campaigns a workload teach"
    yield f"at most {lessons._ALL} measurements in all"
    yield f"the best schedules of the {NUMBERS[warm.NEIGHBOURS]} most similar workloads"
    yield f"A final has up to {NUMBERS[finals.ROUNDS]} rounds"


def limits() -> Iterator[str]:
    """Pieces of docs/reference.md."""
    yield f"| {text.MAX_COMPLAINT:,} and {text.MAX_LINE:,} characters |"
    yield (
        f"{files.MAX_FILE_BYTES // 2**30} GiB (config.json {hf._MAX_FILE_BYTES // MIB} MiB, an options file "
        f"{campaigns._MAX_FILE_BYTES // MIB} MiB), {power(files.MAX_VALUES)} values"
    )
    yield (
        f"{power(structure.MAX_NUMEL)} elements of a buffer, {power(structure.MAX_EST_BYTES)} bytes and "
        f"{power(structure.MAX_EST_FLOPS)} FLOPs of a task"
    )
    yield (
        f"{power(spec.MAX_DIM)}, {spec.MAX_HEADS} heads, {spec.MAX_LAYERS} layers, {power(spec.MAX_LAYER_HEADS)} KV "
        f"heads of all layers together, a vocabulary of {power(spec.MAX_VOCAB)}"
    )
    yield f"| {lower.MAX_TASKS >> 20} x 2^20, of which a layer's attention has {power(lower.MAX_ATTENTION)};"
    yield f"limited number of dots | {campaigns._MOST_DOTS} |"
    yield f"pages that are damaged (in files up to {vetting._CHECKED_BYTES // MIB} MiB)"
    yield f"| 10^{len(str(vetting._LEAST_STEPS)) - 1}, and {vetting._STEPS_A_BYTE} for each byte of the file |"
    most = campaigns._MOST
    yield f"| {most['jobs']} jobs or workers |"
    yield (
        f"| {tokenizing.MAX_BYTES // 2**30} GiB, {tokenizer.LIMIT_S:g} s for an answer, {tokenizing.MAX_SECONDS} s of "
        "a processor"
    )
    yield (
        f"| {tokenizer_files._MAX_TOKENIZER_BYTES // MIB} MiB of `tokenizer.json`, {tokenizer_files._MAX_BYTES // MIB} "
        "MiB of each other file |"
    )
    yield f"is the best only if nothing else was measured | {tenants.PAUSE_LIMIT_S:g} s in all |"
    yield (
        f"| {PATIENCE.say_s:g} s until the line, {client._QUIET_S:g} s for measurements, {pricing._QUIET_S:g} s for "
        "imports and predictions of a fit"
    )
    yield (
        f"A process that is stopped (SIGSTOP): {PATIENCE.stopped_s:g} s. Its first word {Limits().greet_s:g} s, its "
        f"packages {measuring._IMPORT_S:g} s, opening a GPU {bench._OPEN_S:g} s, weights {bench._WEIGHTS_S:g} s, "
        f"all of a start {Limits().start_s:g} s; a measurement {Limits().answer_s:g} s |"
    )
    headers, body = (seconds for _, seconds in server._LIMITS.values())
    yield (
        f"| {headers:g} s for headers, {body:g} s for a body, 16 KiB and {guard.MAX_BODY // MIB} MiB, "
        f"{server._KEEP_ALIVE_S} s between requests |"
    )
    yield (
        f"| {child._MISSED * BEAT_S:g} s without a sign of life, {child._START_S / 60:g} min to start, "
        f"{len(engine._PAUSES_S)} attempts in 5 min |"
    )
    steps = len(str(names._STEPS)) - 1
    yield f"| {names.MOST} names, 10^{steps} of SQLite's steps, {names.WAIT_S} s for a server or a lock |"
    yield f"| {compiled._SAY_S:g} s until the line, {compiled._WAIT_S:g} s of waiting |"


def limits_of_serve() -> Iterator[str]:
    """Pieces of docs/serve.md."""
    defaults = {option.opts[-1]: option.default for name in ("serve", "bench") for option in command_of(name).params}
    yield f"`--queue` ({defaults['--queue']}) is the largest number"
    yield f"each for `--max-tokens` ({defaults['--max-tokens']}) tokens"
    yield f"1 to `--prompt-words` ({defaults['--prompt-words']}) words"
    yield f"`--requests` ({defaults['--requests']}) are sent"
    yield f"up to {openai._MOST_CHOICES} choices, over all prompts"
    yield f"up to {fields.MOST_STOPS} strings"
    yield f"up to {openai._MOST_OF_COMPLETIONS} for a completion; true for a chat"
    yield f"with `top_logprobs` up to {MOST_LIKELY}"
    yield f"in blocks of {prefixes.BLOCK} tokens"
    yield f"or takes over {tokenizer.LIMIT_S:g} s | 500"
    yield f"a body of more than {guard.MAX_BODY // MIB} MiB | 413"
    headers, body = (seconds for _, seconds in server._LIMITS.values())
    yield f"headers that are not complete after {headers:g} s, a body that is not after {body:g} s | 408"
    yield f"request for {server._KEEP_ALIVE_S} s"
    yield f"running answers have {server._GRACE_S} s to finish"
    yield f"gives no sign of life for {child._MISSED * BEAT_S:g} s"
    yield f"{child._START_S / 60:g} minutes without being ready"
    pauses = engine._PAUSES_S
    yield f"pauses of up to {max(pauses):g} s, {len(pauses)} times in about {NUMBERS[round(sum(pauses) / 60)]} minutes"


def limits_of_decoding() -> Iterator[str]:
    """Pieces of docs/decode.md."""
    yield f"copies of cache rows in blocks of {prefixes.BLOCK} tokens"
    yield f"Up to {prompts.CHUNK:,} tokens pass through the model together"
    yield f"has at most {pieces.MOST} layers"


def power(number: int) -> str:
    assert number & (number - 1) == 0
    return f"2^{number.bit_length() - 1}"


def test_counts_of_the_docs_are_those_of_the_code(root: Path) -> None:
    assert [(page, piece) for page, piece in counts() if piece not in prose(root / page)] == []


def test_what_a_search_does_has_the_numbers_of_the_code(root: Path) -> None:
    told = prose(root / "docs" / "search.md")
    assert [piece for piece in numbers_of_searches() if piece not in told] == []


def test_limits_of_decoding_are_those_of_the_code(root: Path) -> None:
    told = prose(root / "docs" / "decode.md")
    assert [piece for piece in limits_of_decoding() if piece not in told] == []


def test_limits_of_the_server_are_those_of_the_code(root: Path) -> None:
    told = prose(root / "docs" / "serve.md")
    assert [piece for piece in limits_of_serve() if piece not in told] == []


def test_limits_of_the_reference_are_those_of_the_code(root: Path) -> None:
    told = prose(root / "docs" / "reference.md")
    assert [piece for piece in limits() if piece not in told] == []
