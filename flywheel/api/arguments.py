"""Arguments of the public functions, checked by the functions' own annotations before anything is done."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import Signature, signature
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from flywheel.errors import UsageError
from flywheel.ir.show import show

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which raises UsageError for an argument that is not of its annotated type."""

    @wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
        written, hints = _annotated(function)
        for name, value in written.bind(*arguments, **options).arguments.items():
            if not _is_of(value, hints.get(name, Any)):
                wanted = written.parameters[name].annotation
                raise UsageError(f"{function.__name__}: {name}={show(value)} is not of type {wanted}")
        return function(*arguments, **options)

    return call


@cache
def _annotated(function: Callable[..., Any]) -> tuple[Signature, Mapping[str, Any]]:
    """A function's signature, with annotations as they are written, and the types of its parameters."""
    written = signature(function)
    hints = {name: annotation for name, annotation in function.__annotations__.items() if name != "return"}
    named = types.SimpleNamespace(__annotations__=hints)
    return written, get_type_hints(named, function.__globals__)


def _is_of(value: object, wanted: Any) -> bool:
    """Whether a value has an annotated type. A bool is no number, and an int is a float."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True
    if wanted is None or wanted is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(_is_of(value, each) for each in arguments)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        keys, values = arguments
        return isinstance(value, Mapping) and all(_is_of(k, keys) and _is_of(v, values) for k, v in value.items())
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int | float)
    return isinstance(value, origin or wanted)
