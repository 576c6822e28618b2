"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from flywheel.cli.completing import completed
from flywheel.cli.helping import HelpedCommand
from flywheel.cli.text import HELP, json_text, note, show_document, show_json, stdout_taken, take_stdout
from flywheel.cli.wording import old_variables
from flywheel.errors import UsageError
from flywheel.ir import MAX_RANKS
from flywheel.ir.files import check_no_database, replace_file, same_file
from flywheel.models.decoder import MAX_BATCH
from flywheel.runtime.sequences import GREEDY
from flywheel.search.spec import DEFAULTS as DEFAULTS

_F = TypeVar("_F", bound=Callable[..., Any])

STDOUT: Final = Path("-")
DEFAULT_STORE: Final = "flywheel.db"

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS: Final = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_NO_FILE: Final = re.compile(r":memory:|sqlite:/*(:memory:)?(\?.*)?|sqlite:.*[?&]mode=memory(&.*)?")
"""Stores that end with the process."""


class SharedOption(click.Option):
    """An option that is also read from FLYWHEEL_<COMMAND>_<FLAG>, else from FLYWHEEL_<FLAG>, which all commands
    share."""


def seconds(text: str) -> float:
    """`90`, `90s`, `5m` or `1.5h` in seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 90, 90s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def setting(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def once(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """The pairs of an option that takes several, each of another name."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        values = ", ".join(value for name, value in pairs if name == twice)
        raise click.BadParameter(f"{twice} has {names.count(twice)} values, {values}; give one", ctx, param)
    return pairs


class NameOf(click.Choice[str]):
    """One of some names; the message for another one has the closest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            close = get_close_matches(str(value), list(self.choices), n=1, cutoff=0.5)
            if not close:
                raise
            self.fail(f"{error.message.removesuffix('.')}; did you mean {close[0]}?", param, ctx)


class OutputFile(click.ParamType[Path]):
    """A file to write, as a path; `-` is stdout, and the rest of the command's text then goes to stderr."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, Path):  # a default
            return value
        if value != str(STDOUT):
            path = Path(value)
            return path.absolute() if path == STDOUT else path  # ./- is a file
        flag = "the output" if param is None else param.opts[-1]
        before = take_stdout(flag)
        if before is not None:
            self.fail(f"{before} writes to stdout, too; give one of them a file", param, ctx)
        return STDOUT

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """A file."""
        return [CompletionItem(incomplete, type="file")]


def command(function: Callable[..., Any], name: str | None = None) -> click.Command:
    """Make a command. Its help is the function's docstring and its EXAMPLES, and options are also read from variables
    named after their flags.

    `name` is the command's name where the function cannot have it.
    """
    made = click.command(name, cls=HelpedCommand, context_settings=dict(HELP))(_one_stdout(function))
    for option in made.params:
        option.type = completed(made.name or "", option)
        if isinstance(option, click.Option):
            option.envvar = variables(made.name or "", option)
            option.allow_from_autoenv = False
    return made


def _one_stdout(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a command, which refuses --json beside a file on stdout. The variable FLYWHEEL_JSON does not
    count then."""

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        taken = stdout_taken()
        for name, flag in (("as_json", "--json"), ("jsonl", "--jsonl")):
            if taken is None or not given.get(name):
                continue
            if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UsageError(f"{flag} and {taken} - both write to stdout; give one")
            given[name] = False
        return function(*args, **given)

    return checked


def variables(name: str, option: click.Option) -> list[str]:
    """Environment variables that set an option of the command `name`, the one that wins first."""
    flags = [flag.removeprefix("--") for flag in option.opts if flag.startswith("--")]
    prefixes = [f"FLYWHEEL_{name}", *(["FLYWHEEL"] if isinstance(option, SharedOption) else [])]
    now = [f"{prefix}_{flag}".upper().replace("-", "_") for prefix in prefixes for flag in flags]
    return [*now, *(each for flag in option.opts for each in old_variables(name, flag))]


def json_option(function: _F) -> _F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", cls=SharedOption, is_flag=True, help="JSON on stdout.")(function)


def store_option(function: _F) -> _F:
    """`--store`."""
    return click.option(
        "--store", cls=SharedOption, type=store_place, default=DEFAULT_STORE, show_default=True, metavar="PATH|URL",
        help="Trial store: a SQLite file, or a sqlite: or postgresql: URL.",
    )(function)  # fmt: skip


def store_place(text: str) -> str:
    """The store's place, checked to outlive the process."""
    if not text.strip() or _NO_FILE.fullmatch(text) is not None:
        raise click.BadParameter(f"{text!r} names no file; give a path, sqlite:///PATH or postgresql://HOST/NAME")
    return text


def weights_option(function: _F) -> _F:
    """`--weights`, None where not given."""
    return click.option(
        "--weights", cls=SharedOption, metavar="FORMAT[,ROLE=FORMAT]",
        help="Format of weight matrices: fp8, int8 or int4; also variants, such as int4-g64-zeros and fp8-block, and "
             "formats by role, such as int4,lm_head=fp8.  [default: the dtype]",
    )(function)  # fmt: skip


def workload_options(function: _F) -> _F:
    """`--model`, `--gpu`, `--dtype`, `--weights` and `--context`, None where not given."""
    for option in (
        click.option("--context", cls=SharedOption, type=int, metavar="TOKENS",
                     help=f"Tokens that the step attends to.  [default: {DEFAULTS['context']}, or the model's "
                          "maximum if less]"),
        weights_option,
        click.option("--dtype", cls=SharedOption, metavar="bf16|f16|f32",
                     help="Type of activations and unquantised weights.  "
                          f"[default: {DEFAULTS['dtype']}]"),
        click.option("--gpu", cls=SharedOption, metavar="NAME",
                     help="GPU to schedule for; see flywheel targets.  [default: this machine's]"),
        click.option("--model", cls=SharedOption, metavar="NAME|DIR|REPO",
                     help="Model by name (flywheel models), the directory of a Hugging Face checkpoint, or a "
                          "repository of its Hub, such as Qwen/Qwen3-0.6B."),
    ):  # fmt: skip
        function = option(function)
    return function


def batch_option(function: _F) -> _F:
    """`--batch`, None where not given."""
    return click.option(
        "--batch", type=int, metavar="N",
        help=f"Sequences that one launch decodes, up to {MAX_BATCH}.  [default: {DEFAULTS['batch']}]",
    )(function)  # fmt: skip


def sampling_options(function: _F) -> _F:
    """`--temperature`, `--top-k`, `--top-p`, `--min-p` and `--repetition-penalty`, named as fields of Sampling, which
    checks their bounds."""
    for option in (
        click.option("--repetition-penalty", type=float, default=GREEDY.repetition_penalty, show_default=True,
                     metavar="X", help="Divide positive logits of tokens in the text by X, multiply negative ones."),
        click.option("--min-p", type=float, default=GREEDY.min_p, show_default=True, metavar="P",
                     help="Drop tokens less likely than P times the likeliest."),
        click.option("--top-p", type=float, default=GREEDY.top_p, show_default=True, metavar="P",
                     help="Draw from the fewest likeliest tokens whose shares add up to P."),
        click.option("--top-k", type=int, default=GREEDY.top_k, show_default=True, metavar="N",
                     help="Draw from the N likeliest tokens; 0: from all."),
        click.option("--temperature", type=float, default=GREEDY.temperature, show_default=True, metavar="T",
                     help="Divide the logits by T and draw, from --seed; 0: take the likeliest token."),
    ):  # fmt: skip
        function = option(function)
    return function


def ranks_option(function: _F) -> _F:
    """`--ranks`."""
    return click.option(
        "--ranks", type=click.IntRange(1, MAX_RANKS), metavar="N",
        help="GPUs that share a step (tensor parallelism).  [default: 1]",
    )(function)  # fmt: skip


def output_option(function: _F) -> _F:
    """`--output`, None where not given: stdout."""
    return click.option(
        "-o", "--output", type=OutputFile(), metavar="FILE", help="Write to FILE instead of stdout; - is stdout."
    )(function)


def document_option(function: _F) -> _F:
    """`--output` of a command that shows text or, with --json, a document; `give` takes its value."""
    return click.option(
        "-o", "--output", type=OutputFile(), metavar="FILE", help="Write what --json prints to FILE; - is stdout."
    )(function)


def give(document: object, output: Path | None, as_json: bool, show: Callable[[], None]) -> None:
    """Write a document to the file `output`; without one, to stdout as JSON or, by `show`, as text."""
    if output is None:
        show_json(document) if as_json else show()
    elif output == STDOUT:
        show_json(document)
    else:
        write_file(output, json_text(document))
        announce_written(output)


def announce_written(path: Path, more: str = "") -> None:
    """Say on stderr that a file is written, unless it is stdout."""
    if path != STDOUT:
        note(f"wrote {path}{more}")


def check_writable(path: Path) -> None:
    """Raises UsageError where `write_file` could not write `path`, as far as is known beforehand, and where `path` is
    the command's trial store, another database, or another file that the command reads or writes."""
    if path == STDOUT:
        return
    try:
        is_directory = path.is_dir()
    except OSError as error:  # no file can have this name
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    if is_directory:
        raise UsageError(f"{path}: is a directory")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{path}: cannot be written: directory {path.parent} does not exist")
    if not os.access(path.resolve().parent if path.is_file() or not path.exists() else path, os.W_OK):
        raise UsageError(f"{path}: cannot be written: permission denied")
    check_no_database(path)
    _check_apart(path)


def _check_apart(path: Path) -> None:
    """Raises UsageError where `path` is a file that another parameter of the running command names."""
    ctx = click.get_current_context(silent=True)
    if ctx is None or (path.exists() and not path.is_file()):  # a device may be named twice
        return
    for param in ctx.command.params:
        given = ctx.params.get(param.name or "")
        if param.name == "store" and given is not None:
            from flywheel.store.places import check_apart  # only where a store is: it waits for SQLAlchemy

            check_apart(path, given)
        for each in given if isinstance(given, tuple) else (given,):
            if each is path or each in (None, str(STDOUT)) or not _names_file(param):
                continue
            if same_file(path, Path(each)):
                raise UsageError(f"{path}: {param.opts[-1] if param.opts[0][:1] == '-' else 'an argument'} names this "
                                 "file, too; name another one")  # fmt: skip


def _names_file(param: click.Parameter) -> bool:
    """Whether the values of a parameter name files that its command reads or writes."""
    return isinstance(param.type, OutputFile | click.Path) or getattr(param.type, "kind", "") == "file"


def write_file(path: Path, text: str | Iterable[str]) -> None:
    """Write `text`, or its pieces, to `path`, replacing it atomically, or to stdout. Raises UsageError where that
    fails."""
    if path == STDOUT:
        for piece in (text,) if isinstance(text, str) else text:
            show_document(piece)
        return
    check_writable(path)
    replace_file(path, text)
