"""How a command shows its help: options under headings, and examples at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import click

from flywheel.cli.examples import EXAMPLES
from flywheel.cli.wording import WordedCommand

FLAT: Final = 10
"""A command with so many options, or fewer, lists them under one heading."""

HEADINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Work": (
            "--model", "--gpu", "--dtype", "--weights", "--context", "--batch", "--ranks", "--max-sequences",
            "--any-size",
        ),
        "Schedule": ("--config", "--campaign", "--set", "--format", "--measured", "--best", "--corpus"),
        "Method": (
            "--measure", "--sampler", "--seed", "--seeds", "--warm", "--fix", "--machine", "--prefilter",
            "--against", "--rounds", "--device", "--lookup", "--position", "--positions", "--order",
            "--verify", "--against-unquantised", "--text", "--alias",
        ),
        "Budget": ("--trials", "--time", "--until", "--patience", "--fail-if-slower"),
        "Text": ("--prompt", "--prompt-ids", "--chat", "--max-tokens"),
        "Sampling": ("--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"),
        "Server": (
            "--serve", "--clients", "--requests", "--prompt-words", "--engines", "--host", "--port", "--queue",
            "--api-key-file", "--allow-origin", "--log-level",
        ),
        "Processes": ("--jobs", "--engine", "--ray-address", "--workers"),
        "Campaign and store": ("--name", "--options", "--fresh", "--store"),
        "Output": (
            "--output", "--picture", "--trace", "--stream", "--mlflow", "--tracking-uri", "--json", "--jsonl", "--help",
        ),
    }
)  # fmt: skip
"""Heading -> its options, in every command that has enough of them."""

_HEADING_OF: Final = {flag: heading for heading, flags in HEADINGS.items() for flag in flags}
_ELSEWHERE: Final = MappingProxyType(
    {("serve", "--name"): "Server", ("bench", "--max-tokens"): "Server", ("bench", "--device"): "Server"}
)
"""(command, option) -> a heading other than that of HEADINGS."""


class HelpedCommand(WordedCommand):
    """A command whose help has headings and examples."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, under HEADINGS where there are more than FLAT."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        shown = [(option, record) for option in options if (record := option.get_help_record(ctx))]
        if len(shown) <= FLAT:
            with formatter.section("Options"):
                formatter.write_dl([record for _, record in shown])
            return
        for heading in HEADINGS:
            records = [record for option, record in shown if heading_of(self.name or "", option) == heading]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(self.name or "", formatter)


def heading_of(command: str, option: click.Option) -> str:
    """The heading of an option of a command. KeyError where it has none."""
    flag = next(flag for flag in option.opts if flag.startswith("--"))
    return _ELSEWHERE.get((command, flag)) or _HEADING_OF[flag]


def write_examples(command: str, formatter: click.HelpFormatter) -> None:
    """Write the examples of a command, each on a line, whatever the width is, since they are copied."""
    with formatter.section("Examples"):
        for line in EXAMPLES[command]:
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
