"""The words of options: one name has one meaning in all commands. Old spellings work for a release, and say so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import click

from flywheel.cli.text import note

OLD: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "search": {"--campaign": "--options", "--schedule": "--output"},
        "export": {"--schedule": "--config"},
        "generate": {"--schedule": "--config"},
        "serve": {"--schedule": "--config"},
        "import": {"--as": "--name"},
        "compare": {"-o": "--picture", "--output": "--picture"},
        "report": {"--out": "--output"},
        "quantize": {"--best": "--least-error"},
        "simulate": {"--seeds": "--orders"},
    }
)
"""Command -> an option's spelling of the last release -> its spelling now. The next release drops these."""


class WordedCommand(click.Command):
    """A command that takes its options' old spellings, on the command line and as variables, with a line on stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, from the words in their new spelling."""
        words, said = renewed(self, args)
        said += [
            f"{old} is now {new}" for old, new in _old_variables(self.name or "").items() if os.environ.get(old)
        ]  # fmt: skip
        if not ctx.resilient_parsing:
            note(*(f"flywheel: {each}" for each in said))
        return super().parse_args(ctx, words)


def old_variables(command: str, flag: str) -> list[str]:
    """Environment variables that the last release read for an option, which is `flag` now."""
    return [_variable(command, old) for old, new in OLD.get(command, {}).items() if new == flag and old[:2] == "--"]


def renewed(command: click.Command, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words of a command line with today's flags, a sentence for each flag that was another). Values, and words
    behind `--`, stay."""
    old = OLD.get(command.name or "", {})
    options = [each for each in command.params if isinstance(each, click.Option)]
    valued = {flag for option in options if not option.is_flag for flag in option.opts}
    words: list[str] = []
    said: list[str] = []
    is_value = False
    for place, word in enumerate(args):
        if word == "--" and not is_value:
            return [*words, *args[place:]], said
        flag, sign, value = word.partition("=")
        if not is_value and flag in old:
            if any(each.partition("=")[0] == old[flag] for each in args):
                raise click.UsageError(f"{flag} and {old[flag]} are one option; give it once")
            said.append(f"{flag} is now {old[flag]}")
            word = f"{old[flag]}{sign}{value}"
        words.append(word)
        is_value = not is_value and not sign and (flag in valued or flag in old)
    return words, said


def _old_variables(command: str) -> dict[str, str]:
    names = OLD.get(command, {}).items()
    return {_variable(command, old): _variable(command, new) for old, new in names if old[:2] == "--"}


def _variable(command: str, flag: str) -> str:
    return f"FLYWHEEL_{command}_{flag.removeprefix('--')}".upper().replace("-", "_")
