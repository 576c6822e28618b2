"""The `flywheel` command: a table of commands, each loaded when called, and how errors end it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from errno import EAGAIN, EDQUOT, EFBIG, EIO, ENOSPC
from importlib import import_module
from types import TracebackType
from typing import Any, Final

import click

from flywheel.cli.exits import ABORTED, BROKEN_PIPE, FAILED, USAGE, exit_code
from flywheel.cli.helping import write_examples
from flywheel.cli.interrupt import abort, end_interrupted, interrupts_first, watch_interrupts
from flywheel.cli.output import buffer_output
from flywheel.cli.text import HELP, complain, note, show
from flywheel.errors import FlywheelError, OutputError
from flywheel.process import threads_abandoned, usable_cores
from flywheel.search.trials.forks import expect_forks
from flywheel.version import VERSION

GROUPS: Final = {
    "Search and results": {
        "search": ("flywheel.cli.search:search", "Search for the fastest schedule of a model on a GPU."),
        "campaigns": ("flywheel.cli.campaigns:campaigns", "List the campaigns of a store, or show one."),
        "schedules": ("flywheel.cli.schedules:schedules", "List the measured schedules that come with flywheel."),
        "export": ("flywheel.cli.export:export", "Write the best schedule, its program, or all trials."),
        "compare": ("flywheel.cli.compare:compare", "Compare two campaigns, schedules or GPUs."),
        "import": ("flywheel.cli.importing:import_file", "Import trials, or schedules to try first, from a file."),
        "evaluate": ("flywheel.cli.evaluate:evaluate", "Predict or measure one schedule."),
        "report": ("flywheel.cli.report:report", "Write a campaign as one HTML page."),
        "mlflow": ("flywheel.cli.mlflow:mlflow", "Mirror campaigns in MLflow."),
        "dashboard": ("flywheel.cli.dashboard:dashboard", "Show the store's campaigns in MLflow's browser pages."),
    },
    "Models and running": {
        "models": ("flywheel.cli.catalog:models", "List the models known by name."),
        "generate": ("flywheel.cli.generate:generate", "Generate tokens with a model's program."),
        "serve": ("flywheel.cli.serve:serve", "Serve a model with OpenAI's API."),
        "verify": ("flywheel.cli.verify:verify", "Check every tensor of a program against the model's reference."),
        "bench": ("flywheel.cli.bench:bench", "Time the best schedule and PyTorch on this machine's GPU."),
        "trace": ("flywheel.cli.trace:trace", "Show how a launch on this machine's GPU spends its time."),
        "quantize": ("flywheel.cli.quantize:quantize", "Write a checkpoint with quantised matrices."),
    },
    "Programs": {
        "lower": ("flywheel.cli.lower:lower", "Turn a model and a schedule config into a program."),
        "validate": ("flywheel.cli.validate:validate", "Prove programs free of deadlocks and races."),
        "simulate": ("flywheel.cli.simulate:simulate", "Run a program's counters and predict its latency."),
        "inspect": ("flywheel.cli.inspect:inspect", "Summarise a program."),
        "diff": ("flywheel.cli.diff:diff", "Compare two programs."),
        "mpk": ("flywheel.cli.mpk:mpk", "Prove, repair and predict task graphs of Mirage MPK."),
    },
    "Machine": {
        "doctor": ("flywheel.cli.doctor:doctor", "Show this machine's GPU, packages and store, and what is missing."),
        "targets": ("flywheel.cli.catalog:targets", "List the GPUs known by name."),
        "knobs": ("flywheel.cli.knobs:knobs", "List the knobs of a model's schedules on a GPU."),
        "calibrate": ("flywheel.cli.calibrate:calibrate", "Fit the cost model to a GPU's measurements."),
    },
}
"""Heading of `--help` -> name -> (module:command, one line of help), in their order. `--help` imports none of them."""

COMMANDS: Final = {name: entry for group in GROUPS.values() for name, entry in group.items()}

_NO_ROOM: Final = (ENOSPC, EFBIG, EDQUOT, EIO, EAGAIN)
"""Errors of a write where the disk, a quota, a file's size limit or a pipe is full, or the disk is broken."""


class CommandTable(click.Group):
    """The commands of COMMANDS. A command is imported when it is called. An error becomes one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with the closest name in the error."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        if args[0] == "search" and not ctx.resilient_parsing and _may_fork(args):
            expect_forks()  # they import while this process goes on
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands, without importing one."""
        width = max(map(len, COMMANDS))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in group.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, and what holds for every command."""
        write_examples("flywheel", formatter)
        super().format_epilog(ctx, formatter)

    def main(  # type: ignore[override]  # click overloads it on standalone_mode
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> int:
        """Run the command and return its exit code; with `standalone_mode`, end the process with it."""
        if "_FLYWHEEL_COMPLETE" in os.environ:
            from flywheel.cli.completing import complete_words

            complete_words()
        try:
            code = super().main(args, prog_name or "flywheel", complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            note(*(error.ctx.get_help() if error.ctx else error.format_message()).split("\n"))
            code = USAGE
        except click.ClickException as error:
            complain(_click_message(error))
            code = USAGE
        except click.Abort:
            complain("aborted")
            abort()
            code = ABORTED
        except OSError as error:  # raised by click, which writes the help itself
            if error.errno not in _NO_ROOM or error.filename is not None:
                raise
            _discard_output()
            complain(f"output: cannot be written: {error.strerror}")
            code = FAILED
        code = code if isinstance(code, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A FlywheelError becomes one line on stderr, after a traceback with `--debug`."""
        debug = bool(ctx.params.get("debug"))
        if debug:
            sys.excepthook = _show_bug
        try:
            with interrupts_first():
                return super().invoke(ctx)
        except FlywheelError as error:
            if isinstance(error, OutputError):
                _discard_output()
            if debug:
                _show_trace(error)
            complain(str(error))
            return exit_code(error)
        except RecursionError:
            complain("the input is nested too deeply")
            return USAGE
        except MemoryError:
            complain("this process ran out of memory")
            return FAILED
        except BrokenPipeError:
            _discard_output()
            return BROKEN_PIPE


def _may_fork(args: Sequence[str]) -> bool:
    """Whether a search with these arguments may start processes, as far as the arguments show."""
    jobs = os.environ.get("FLYWHEEL_SEARCH_JOBS", "")
    words = f" {' '.join(args)} --jobs {jobs} "
    return usable_cores() > 1 and not any(word in words for word in (" --help ", " -h ", " --jobs 1 ", " --jobs=1 "))


@click.command(
    "flywheel",
    cls=CommandTable,
    context_settings={**HELP, "auto_envvar_prefix": "FLYWHEEL"},
    epilog="Results go to stdout, progress to stderr. FLYWHEEL_<COMMAND>_<FLAG> variables stand for options; "
    "FLYWHEEL_MODEL, _GPU, _DTYPE, _CONTEXT, _STORE and _JSON for those of every command. "
    "Exit codes: 0 done, 2 usage, 3 rejected, wrong or nothing feasible, 4 no such GPU here, 5 store trouble, "
    "130 interrupted.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, help="Show the version.",
    callback=lambda ctx, _, wanted: _show_version(ctx) if wanted else None,
)  # fmt: skip
def cli(debug: bool) -> None:
    """Search for the fastest schedule of an LLM decode step that runs as one persistent GPU kernel."""


def main() -> int:
    """Entry point. Returns the exit code."""
    buffer_output()
    watch_interrupts()
    sys.excepthook = _report_bug
    code = cli.main(standalone_mode=False)
    if code == ABORTED:
        end_interrupted()
    if threads_abandoned():
        os._exit(code)
    return code


def _show_version(ctx: click.Context) -> None:
    show(f"flywheel {VERSION}")
    ctx.exit()


def _click_message(error: click.ClickException) -> str:
    message = error.format_message().strip().removesuffix(".")
    message = message[:1].lower() + message[1:]
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message}; see {ctx.command_path} --help" if ctx is not None else message


def _discard_output() -> None:
    """Discard further output, so that the interpreter's last flush does not fail, too."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_trace(error: BaseException) -> None:
    note(*"".join(traceback.format_exception(error)).removesuffix("\n").split("\n"))


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _show_trace(error)


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    complain(f"internal error: {kind.__name__}: {error}; flywheel --debug shows where")
