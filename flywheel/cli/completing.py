"""What a shell completes: names of models, GPUs, campaigns, schedules, knobs and formats, else files.

Completion is quick and silent: a name that cannot be found out is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from flywheel.errors import FlywheelError

Offer = Callable[[click.Context, str], Iterable[str]]
"""(the command so far, the incomplete word) -> words that may stand there."""


class Completed(click.ParamType[Any]):
    """A type `base` of which a shell completes the names that `offer` gives; without one of them, a path of `kind`."""

    def __init__(self, base: click.ParamType[Any], offer: Offer, kind: str = "") -> None:
        self.name, self._base, self._offer, self.kind = base.name, base, offer, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As the type."""
        return self._base.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The offered words that begin with `incomplete`, in any case, and hold only characters that print."""
        try:
            offered = list(self._offer(ctx, incomplete))
        except (FlywheelError, OSError, ImportError):
            offered = []
        begin = incomplete.lower()
        found = [CompletionItem(word) for word in offered if word.lower().startswith(begin) and word.isprintable()]
        return found or ([CompletionItem(incomplete, type=self.kind)] if self.kind else [])


class EqualsBash(BashComplete):
    """As click for Bash, which takes `NAME=VALUE` for three words, and puts only what is behind the last `=` anew."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words, joined at each `=`, and the incomplete one."""
        args, last = super().get_completion_args()
        words = [""]
        for word in (*args, last):
            if word[:1] == "=" or (words[-1][-1:] == "=" and word):
                words[-1] += word
            else:
                words.append(word)
        return words[1:-1], words[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """The completions, each without what stands before its last typed `=`."""
        found = super().get_completions(args, incomplete)
        value = incomplete.partition("=")[2] if incomplete[:1] == "-" else incomplete
        typed = value.rfind("=") + 1
        return [CompletionItem(each.value[typed:], each.type, each.help) for each in found]


def complete_words() -> None:
    """Have click complete for Bash as EqualsBash does."""
    add_completion_class(EqualsBash, "bash")


def _models(ctx: click.Context, incomplete: str) -> Iterable[str]:
    from flywheel.models.catalog import CATALOG

    return CATALOG


def _gpus(ctx: click.Context, incomplete: str) -> Iterable[str]:
    from flywheel.ir.target import TARGETS

    return TARGETS


def _dtypes(ctx: click.Context, incomplete: str) -> Iterable[str]:
    from flywheel.models.decoder import DTYPES

    return DTYPES


def _weights(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """Formats; behind a comma, of each matrix by name."""
    from flywheel.models.formats import CODES, MATRICES

    formats = [f"{code}{scales}" for code in CODES for scales in _SCALES if code != "fp8" or "zeros" not in scales]
    before, comma, last = incomplete.rpartition(",")
    matrix, sign, _ = last.partition("=")
    if sign:
        return [f"{before}{comma}{matrix}={each}" for each in formats]
    return [*([] if comma else formats), *(f"{before}{comma}{each}=" for each in MATRICES)]


def _campaigns(ctx: click.Context, incomplete: str) -> Iterable[str]:
    from flywheel.store.names import campaign_names

    store = ctx.params.get("store")
    return () if store is None else campaign_names(store)


def _schedules(ctx: click.Context, incomplete: str) -> Iterable[str]:
    from flywheel.store.schedule import shipped_schedules

    return [each.stem for each in shipped_schedules()]


def _sides(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """What `compare` takes but files; of schedules and GPUs also where no store is."""
    try:
        named = list(_campaigns(ctx, incomplete))
    except FlywheelError:
        named = []
    return [*_gpus(ctx, incomplete), *named, *_schedules(ctx, incomplete)]


def _settings(ctx: click.Context, incomplete: str) -> Iterable[str]:
    """`NAME=` of each knob; NAME=VALUE of each value where one knob is left."""
    from flywheel.search.knobs import KNOBS

    names = [knob.name for knob in KNOBS]
    knob, sign, _ = incomplete.partition("=")
    left = [name for name in names if name == knob or (not sign and name.startswith(knob))]
    if len(left) != 1:
        return [f"{name}=" for name in names]
    return [f"{left[0]}={value}" for value in _values(ctx.params, left[0])]


def _values(params: Mapping[str, Any], knob: str) -> Iterable[object]:
    """The values of a knob for the work that the command names, or else for llama3-8b on an H200."""
    from flywheel.search.space import make_space
    from flywheel.search.spec import DEFAULTS
    from flywheel.search.workload import make_workload

    given = {name: value for name, value in params.items() if name in _WORK and value is not None}
    work = make_workload(**{"model": "llama3-8b", "gpu": "h200", **{name: DEFAULTS[name] for name in _PLAIN}, **given},
                         any_size=True)  # fmt: skip
    return next((each.values for each in make_space(work).dimensions if each.name == knob), ())


def _nothing(ctx: click.Context, incomplete: str) -> Iterable[str]:
    return ()


def _shipped(ctx: click.Context, incomplete: str) -> Iterable[str]:
    return ("shipped",) if ctx.command.name == "export" and incomplete else ()


_SCALES: Final = ("", "-tensor", "-row", "-block", "-g32", "-g64", "-g64-zeros", "-g128", "-g128-zeros")
_PLAIN: Final = ("dtype", "context")
_WORK: Final = ("model", "gpu", "dtype", "context", "batch", "weights", "ranks")
OPTIONS: Final[Mapping[str, tuple[Offer, str]]] = MappingProxyType(
    {
        "--model": (_models, "dir"),
        "--gpu": (_gpus, ""),
        "--dtype": (_dtypes, ""),
        "--weights": (_weights, ""),
        "--campaign": (_campaigns, ""),
        "--fix": (_settings, ""),
        "--set": (_settings, ""),
        "--config": (_shipped, "file"),
        "--machine": (_nothing, "file"),
    }
)
"""Option -> (its words, the kind of path that it takes else), in every command."""

ARGUMENTS: Final[Mapping[tuple[str, str], tuple[Offer, str]]] = MappingProxyType(
    {
        ("campaigns", "name"): (_campaigns, ""),
        ("report", "campaign"): (_campaigns, ""),
        ("mlflow", "campaigns"): (_campaigns, ""),
        ("schedules", "name"): (_schedules, ""),
        ("compare", "first"): (_sides, "file"),
        ("compare", "second"): (_sides, "file"),
    }
)
"""(command, argument) -> the same. Every other argument that is a text is a file."""


def completed(command: str, param: click.Parameter) -> click.ParamType[Any]:
    """The type of a parameter, which completes its words. A choice of names has them already."""
    if isinstance(param.type, click.Choice):
        return param.type
    if isinstance(param, click.Argument):
        return Completed(param.type, *ARGUMENTS.get((command, param.name or ""), (_nothing, "file")))
    offers = next((OPTIONS[flag] for flag in param.opts if flag in OPTIONS), None)
    return param.type if offers is None else Completed(param.type, *offers)
