"""Parses `--against`, and reconstructs the command line that a bench document records."""

from __future__ import annotations

import shlex
from typing import Final

import click
from click.core import ParameterSource

from flywheel.rivals.lineup import RANK_RIVALS, RIVALS, Rival

KNOWN_RIVALS: Final = {**RIVALS, **RANK_RIVALS}
"""Rivals of single-GPU and of multi-GPU programs, by name."""


def rival_names(text: str) -> tuple[Rival, ...]:
    """The rivals that a text such as `cublas,compile` names, without repeats. Raises click.BadParameter for an unknown
    name."""
    names = list(dict.fromkeys(text.split(",")))
    unknown = next((name for name in names if name not in KNOWN_RIVALS), None)
    if unknown is not None:
        raise click.BadParameter(f"{unknown!r} is not one of {', '.join(KNOWN_RIVALS)}")
    return tuple(KNOWN_RIVALS[name] for name in names)


def spoken(ctx: click.Context) -> str:
    """The command line, with every option that was set on the command line or by the environment."""
    words = [ctx.command_path]
    for option in ctx.command.params:
        told = ctx.get_parameter_source(option.name or "")
        if told not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        value = ctx.params[option.name or ""]
        flag = next(flag for flag in option.opts if flag.startswith("--"))
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            parts = value if isinstance(value, tuple) else (value,)
            words += [flag, ",".join(part.name if isinstance(part, Rival) else str(part) for part in parts)]
    return shlex.join(words[0].split() + words[1:])
